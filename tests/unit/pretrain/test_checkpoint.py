"""Saving and loading: exact resumes, other pipeline layouts, kills at every point of a save, damaged and unfit folders."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import run_ranks, run_ranks_to_the_end
from tiny_run import TinyRun, tiny_config

from megatron.pretrain import checkpoint
from megatron.pretrain.errors import ConfigError

STATE = {
    "iteration": 3,
    "consumed_train_samples": 6,
    "config": {"model": {"hidden_size": 32}},
    "path": ["a", None, 1.5],
}


def _save(run: TinyRun, root: Path, iteration: int) -> None:
    checkpoint.save(root, iteration=iteration, **run.parts(), state=STATE | {"iteration": iteration})


def _train_and_save(root: Path, iterations: int = 3, settings: dict[str, Any] | None = None) -> dict[str, torch.Tensor]:
    run = TinyRun(tiny_config(**settings or {}))
    for iteration in range(iterations):
        run.step(iteration)
    _save(run, root, iterations)
    return run.tensors()


# Resuming


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"bf16": True}, {"swiglu": True}], ids=["fp32", "bf16", "swiglu"])
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(tmp_path, ranks, settings):
    whole = run_ranks(_whole_run, ranks, tmp_path, tmp_path / "save", settings)
    resumed = run_ranks(_resumed_run, ranks, tmp_path, tmp_path / "save", settings)
    for expected, (steps, tensors, state) in zip(whole, resumed, strict=True):
        assert state == STATE
        assert steps == expected[0]
        assert tensors.keys() == expected[1].keys()
        assert [name for name in tensors if not torch.equal(tensors[name], expected[1][name])] == []


def _whole_run(root: Path, settings: dict[str, Any]) -> tuple:
    run = TinyRun(tiny_config(**settings))
    for iteration in range(3):
        run.step(iteration)
    _save(run, root, 3)
    return [run.step(iteration) for iteration in range(3, 6)], run.tensors()


def _resumed_run(root: Path, settings: dict[str, Any]) -> tuple:
    run = TinyRun(tiny_config(**settings), seed=99)
    state = checkpoint.load(root, **run.parts())
    return [run.step(iteration) for iteration in range(3, 6)], run.tensors(), state


def test_another_number_of_pipeline_ranks_loads_the_same_tensors(tmp_path):
    for saving, loading in ((2, 1), (1, 2)):
        root = tmp_path / f"from-{saving}"
        saved = _joined(run_ranks(_train_and_save, saving, tmp_path, root))
        loaded = _joined(run_ranks(_load_tensors, loading, tmp_path, root))
        assert saved.keys() == loaded.keys()
        assert [name for name in saved if not torch.equal(saved[name], loaded[name])] == []


def _load_tensors(root: Path) -> dict[str, torch.Tensor]:
    run = TinyRun(tiny_config(), seed=99)
    checkpoint.load(root, **run.parts())
    return run.tensors()


def _joined(ranks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """One dict of all ranks' tensors; the head's copy of the embedding has the embedding's name."""
    return {name: tensor for part in ranks for name, tensor in part.items()}


def test_several_chunks_on_a_rank_save_under_global_names(tmp_path):
    (names,) = run_ranks(_two_chunks, 1, tmp_path, tmp_path / "save")
    assert names == []
    assert run_ranks(_load_tensors, 1, tmp_path, tmp_path / "save")


def _two_chunks(root: Path) -> list[str]:
    """Save a model as two chunks, the way an interleaved placement holds it, and load it into two others."""
    first, second = _ChunkedRun(1234), _ChunkedRun(99)
    first.step(0), first.step(1)
    _save(first, root, 2)
    checkpoint.load(root, **second.parts())
    before, after = first.tensors(), second.tensors()
    return [name for name in before if not torch.equal(before[name], after[name])]


class _ChunkedRun(TinyRun):
    """A TinyRun whose model is handed to the checkpoint in two parts, each with some of the tensors."""

    def __init__(self, seed: int) -> None:
        super().__init__(tiny_config(), seed)

    def parts(self) -> dict[str, Any]:
        return super().parts() | {"model_chunks": [_Part(self.model, first=True), _Part(self.model, first=False)]}


class _Part:
    def __init__(self, model: Any, first: bool) -> None:
        self.model, self.first = model, first

    def _is_mine(self, name: str) -> bool:
        return (name.startswith("embedding") or ".layers.0." in name or ".layers.1." in name) == self.first

    def sharded_state_dict(self, metadata: dict) -> dict:
        return {
            name: item for name, item in self.model.sharded_state_dict(metadata=metadata).items() if self._is_mine(name)
        }

    def load_state_dict(self, tensors: dict) -> None:
        unknown = self.model.load_state_dict(tensors, strict=False).unexpected_keys
        assert not unknown and all(self._is_mine(name) for name in tensors)


def test_without_the_optimizer_only_weights_are_filled(tmp_path):
    saved = _train_and_save_in_ranks(tmp_path, {"bf16": True})
    for bf16 in (False, True):  # weights alone may change their type
        (result,) = run_ranks(_load_weights, 1, tmp_path, tmp_path / "save", bf16)
        tensors, state, learning_rate = result
        assert state == STATE
        assert learning_rate == 0.0  # the warmup's start: the schedule was not loaded
        weights = [name for name in saved if name.endswith("weight") or name.endswith("bias")]
        assert weights
        assert all(torch.equal(saved[name].float(), tensors[name].float()) for name in weights)
        # float32 main parameters follow the loaded weights, or the first step would undo the load
        assert all(torch.equal(tensors[f"{name} main"], saved[name].float()) for name in weights)


def _train_and_save_in_ranks(tmp_path: Path, settings: dict[str, Any], ranks: int = 1) -> dict[str, torch.Tensor]:
    return _joined(run_ranks(_train_and_save, ranks, tmp_path, tmp_path / "save", 3, settings))


def _load_weights(root: Path, bf16: bool) -> tuple:
    run = TinyRun(tiny_config(bf16=bf16), seed=99)
    state = checkpoint.load(root, **run.parts(), load_optim=False)
    learning_rate = run.optimizer.param_groups[0]["lr"]
    run.optimizer.param_groups[0]["lr"] = run.optimizer.param_groups[1]["lr"] = 0.0
    run.step(0)  # makes the optimizer's state, which names the main parameters
    return run.tensors(), state, learning_rate


def test_no_marker_is_a_fresh_start(tmp_path):
    assert run_ranks(_load_state, 2, tmp_path, tmp_path / "nowhere") == [None, None]


def _load_state(root: Path) -> dict[str, Any] | None:
    return checkpoint.load(root, **TinyRun(tiny_config()).parts())


# Kills


def _kill(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_at_call(owner: Any, name: str, number: int) -> None:
    """Die on entering the `number`-th call of `owner.name`, counted from 1."""
    original, calls = getattr(owner, name), [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return _kill() if calls[0] == number else original(*args, **kwargs)

    setattr(owner, name, counted)


def _while_writing_tensors() -> None:
    import torch.distributed.checkpoint.filesystem as filesystem

    _kill_at_call(filesystem, "_write_item", 20)


KILL_POINTS: dict[str, Callable[[], None]] = {
    "before the folder": lambda: _kill_at_call(checkpoint, "_start_folder", 1),
    "while writing tensors": _while_writing_tensors,
    "before .metadata has its name": lambda: _kill_at_call(Path, "rename", 1),
    "before the sums": lambda: _kill_at_call(checkpoint, "_publish", 1),
    "before the rename": lambda: _kill_at_call(checkpoint.os, "replace", 1),
    "before the marker is written": lambda: _kill_at_call(checkpoint, "_write_flushed", 2),
    "before the marker is replaced": lambda: _kill_at_call(checkpoint.os, "replace", 2),
}


def test_a_kill_anywhere_in_a_save_leaves_the_previous_checkpoint(tmp_path):
    saved = _train_and_save_in_ranks(tmp_path, {})
    for number, point in enumerate(KILL_POINTS):
        shutil.copytree(tmp_path / "save", tmp_path / f"killed-{number}")
        (outcome,) = run_ranks_to_the_end(_save_until_killed, 1, tmp_path, tmp_path / f"killed-{number}", point, 4)
        assert outcome.exitcode == -signal.SIGKILL, f"{point}: {outcome.exitcode}\n{outcome.log}"
    (results,) = run_ranks(
        _load_and_save_again, 1, tmp_path, [tmp_path / f"killed-{i}" for i in range(len(KILL_POINTS))]
    )
    for point, (iteration, tensors, left) in zip(KILL_POINTS, results, strict=True):
        assert iteration == 3, point
        assert [name for name in saved if not torch.equal(saved[name], tensors[name])] == [], point
        assert left == ["iter_0000003", "iter_0000004", checkpoint.MARKER], point


def _save_until_killed(root: Path, point: str, iteration: int) -> None:
    run = TinyRun(tiny_config(), seed=99)
    checkpoint.load(root, **run.parts())
    run.step(3)
    KILL_POINTS[point]()
    _save(run, root, iteration)


def _load_and_save_again(roots: list[Path]) -> list[tuple]:
    """What each folder loads after the kill, and what is in it once iteration 4 is saved for good."""
    found = []
    for root in roots:
        run = TinyRun(tiny_config(), seed=99)
        state = checkpoint.load(root, **run.parts())
        tensors = run.tensors()
        run.step(3)
        _save(run, root, 4)
        assert checkpoint.load(root, **run.parts())["iteration"] == 4
        found.append((state["iteration"], tensors, sorted(os.listdir(root))))
    return found


def test_saving_the_same_iteration_again_never_leaves_none(tmp_path):
    saved = _train_and_save_in_ranks(tmp_path, {})
    (outcome,) = run_ranks_to_the_end(
        _save_until_killed, 1, tmp_path, tmp_path / "save", "before the marker is replaced", 3
    )
    assert outcome.exitcode == -signal.SIGKILL  # here: between the two renames, with the folder set aside
    assert not (tmp_path / "save" / "iter_0000003").exists()
    (tensors,) = run_ranks(_load_tensors, 1, tmp_path, tmp_path / "save")
    assert [name for name in saved if not torch.equal(saved[name], tensors[name])] == []
    run_ranks(_train_and_save, 1, tmp_path, tmp_path / "save")
    assert sorted(os.listdir(tmp_path / "save")) == ["iter_0000003", checkpoint.MARKER]


def test_a_killed_rank_takes_the_others_down_and_the_previous_checkpoint_stays(tmp_path):
    saved = _train_and_save_in_ranks(tmp_path, {}, ranks=2)
    began = time.monotonic()
    outcomes = run_ranks_to_the_end(_save_until_rank_one_dies, 2, tmp_path, tmp_path / "save", timeout_s=30)
    assert time.monotonic() - began < 20
    assert outcomes[1].exitcode == -signal.SIGKILL
    assert outcomes[0].exitcode not in (0, None, -signal.SIGKILL)
    loaded = _joined(run_ranks(_load_tensors, 2, tmp_path, tmp_path / "save"))
    assert [name for name in saved if not torch.equal(saved[name], loaded[name])] == []


def _save_until_rank_one_dies(root: Path) -> None:
    run = TinyRun(tiny_config(), seed=99)
    checkpoint.load(root, **run.parts())
    run.step(3)
    if run.rank == 1:
        _while_writing_tensors()
    _save(run, root, 4)


# Damaged and unfit checkpoints


def _flip(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1
    path.write_bytes(content)


def _truncate(path: Path, share: float) -> None:
    os.truncate(path, int(path.stat().st_size * share))


def _folder(root: Path) -> Path:
    return root / "iter_0000003"


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "half a tensor file": (lambda r: _truncate(_folder(r) / "__1_0.distcp", 0.5), "__1_0.distcp is not as it was saved"),
    "an empty tensor file": (lambda r: _truncate(_folder(r) / "__0_0.distcp", 0), "__0_0.distcp is not as it was saved"),
    "a flipped bit in a tensor": (lambda r: _flip(_folder(r) / "__0_0.distcp", 0.5), "__0_0.distcp is not as it was saved"),
    "a flipped bit in .metadata": (lambda r: _flip(_folder(r) / ".metadata", 0.3), ".metadata is not as it was saved"),
    "a flipped bit in common.pt": (lambda r: _flip(_folder(r) / "common.pt", 0.9), "common.pt is not as it was saved"),
    "no common.pt": (lambda r: (_folder(r) / "common.pt").unlink(), "common.pt can't be read, No such file"),
    "no metadata.json": (lambda r: (_folder(r) / "metadata.json").unlink(), "metadata.json can't be read"),
    "no sums": (lambda r: (_folder(r) / checkpoint.SUMS).unlink(), "SHA256SUMS can't be read"),
    "garbled sums": (lambda r: (_folder(r) / checkpoint.SUMS).write_bytes(b"\xff\x00"), "SHA256SUMS can't be read"),
    "cut sums": (lambda r: _truncate(_folder(r) / checkpoint.SUMS, 0.55), "SHA256SUMS is not a list"),
    "empty sums": (lambda r: _truncate(_folder(r) / checkpoint.SUMS, 0), "SHA256SUMS is not a list"),
    "no folder": (lambda r: shutil.rmtree(_folder(r)), "does not exist"),
    "a file for a folder": (lambda r: (shutil.rmtree(_folder(r)), _folder(r).touch()), "does not exist"),
    "an empty marker": (lambda r: (r / checkpoint.MARKER).write_text(""), "not an iteration"),
    "a word in the marker": (lambda r: (r / checkpoint.MARKER).write_text("release\n"), "not an iteration"),
    "bytes in the marker": (lambda r: (r / checkpoint.MARKER).write_bytes(b"\xff\xfe\x00"), "can't be read"),
    "a folder for the marker": (
        lambda r: ((r / checkpoint.MARKER).unlink(), (r / checkpoint.MARKER).mkdir()), "can't be read"),
    "another iteration in the marker": (lambda r: (r / checkpoint.MARKER).write_text("17"), "iter_0000017 does not exist"),
}  # fmt: skip


def test_every_damage_is_one_line_on_every_rank_within_seconds(tmp_path):
    _train_and_save_in_ranks(tmp_path, {}, ranks=2)
    for number, (damage, _) in enumerate(DAMAGES.values()):
        shutil.copytree(tmp_path / "save", tmp_path / f"damaged-{number}")
        damage(tmp_path / f"damaged-{number}")
    roots = [tmp_path / f"damaged-{number}" for number in range(len(DAMAGES))]
    both = run_ranks(_messages, 2, tmp_path, roots)
    assert both[0] == both[1]
    for root, (name, (_, expected)), message in zip(roots, DAMAGES.items(), both[0], strict=True):
        assert expected in message, f"{name}: {message}"
        assert str(root) in message and "\n" not in message, name
        assert "fresh start" in message or "write" in message, name


def _messages(roots: list[Path]) -> list[str]:
    run, messages = TinyRun(tiny_config()), []
    for root in roots:
        began = time.monotonic()
        with pytest.raises(ConfigError) as error:
            checkpoint.load(root, **run.parts())
        assert time.monotonic() - began < 5
        messages.append(str(error.value))
    return messages


MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "another hidden size": ({"hidden_size": 64}, r"has the shape \(.*32.*\) in it and \(.*64.*\) in this run"),
    "more layers": ({"num_layers": 6}, r"lacks decoder\.layers\.4"),
    "fewer layers": ({"num_layers": 2}, r"holds decoder\.layers\.2"),
    "bf16": ({"bf16": True}, r"lacks optimizer\.state\.fp32_param.*--bf16"),
    "another peak learning rate": ({"lr": 0.5}, r"max_lr 0\.01, and this run has 0\.5; give --lr as"),
    "another decay": ({"lr_decay_iters": 20}, r"lr_decay_steps 20, and this run has 40; give --lr-decay-iters"),
    "another weight decay": ({"weight_decay": 0.5}, r"start_wd 0\.01, and this run has 0\.5; give --weight-decay"),
    "another beta": ({"adam_beta2": 0.5}, r"0\.999.*0\.5.*--adam-beta2"),
}


def test_every_misfit_is_one_line_on_every_rank(tmp_path):
    _train_and_save_in_ranks(tmp_path, {}, ranks=2)
    both = run_ranks(_misfit_messages, 2, tmp_path, tmp_path / "save", [settings for settings, _ in MISFITS.values()])
    assert both[0] == both[1]
    for (name, (_, pattern)), message in zip(MISFITS.items(), both[0], strict=True):
        with pytest.raises(ConfigError, match=pattern):
            raise ConfigError(message)
        assert "does not fit this run" in message and "\n" not in message, name


def _misfit_messages(root: Path, misfits: list[dict[str, Any]]) -> list[str]:
    messages = []
    for settings in misfits:
        with pytest.raises(ConfigError) as error:
            checkpoint.load(root, **TinyRun(tiny_config(**settings)).parts())
        messages.append(str(error.value))
    return messages


def test_a_folder_that_cant_be_written_is_one_line_on_every_rank(tmp_path):
    (tmp_path / "file").touch()
    both = run_ranks(_save_message, 2, tmp_path, tmp_path / "file")
    assert both[0] == both[1]
    assert f"--save {tmp_path / 'file'}" in both[0] and "iter_0000001.tmp" in both[0]


def _save_message(root: Path) -> str:
    run = TinyRun(tiny_config())
    run.step(0)
    with pytest.raises(ConfigError) as error:
        _save(run, root, 1)
    return str(error.value)


def test_a_write_that_fails_on_one_rank_fails_on_all_and_leaves_the_marker(tmp_path):
    _train_and_save_in_ranks(tmp_path, {}, ranks=2)
    both = run_ranks(_full_disk, 2, tmp_path, tmp_path / "save")
    assert both[0] == both[1]
    assert "No space left on device" in both[0]
    assert run_ranks(_load_state, 2, tmp_path, tmp_path / "save")[0] == STATE


def _full_disk(root: Path) -> str:
    import torch.distributed.checkpoint.filesystem as filesystem

    def no_space(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    run = TinyRun(tiny_config(), seed=99)
    checkpoint.load(root, **run.parts())
    run.step(3)
    if run.rank == 1:
        filesystem._write_item = no_space
    with pytest.raises(ConfigError) as error:
        _save(run, root, 4)
    return str(error.value)


def test_sums_are_what_sha256sum_reads(tmp_path):
    _train_and_save_in_ranks(tmp_path, {})
    folder = tmp_path / "save" / "iter_0000003"
    listed = dict(reversed(line.split("  ")) for line in (folder / checkpoint.SUMS).read_text().splitlines())
    assert sorted([*listed, checkpoint.SUMS]) == sorted(os.listdir(folder))
    assert all(hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest for name, digest in listed.items())
