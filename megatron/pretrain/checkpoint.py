"""Checkpoints in Megatron's layout, written by megatron-core's dist_checkpointing so that a kill never costs the last one.

    ROOT/latest_checkpointed_iteration.txt      the marker: the iteration to load, written last
    ROOT/iter_0000100/.metadata, __0_0.distcp   weights and optimizer state, by global names: any pipeline layout loads them
    ROOT/iter_0000100/common.pt                 what all ranks share: schedule, optimizer groups, the training loop's state
    ROOT/iter_0000100/SHA256SUMS                every file's sum (`sha256sum -c` reads it), checked before anything is unpickled

A save fills `iter_0000100.tmp`, flushes it to the disk, renames it, then replaces the marker. All functions are called on
every rank together, and an error is raised on every rank, so that none waits for another that is gone. The folder must be
one that all ranks see.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.pretrain.errors import ConfigError

MARKER = "latest_checkpointed_iteration.txt"
SUMS = "SHA256SUMS"

Result = TypeVar("Result")


def iteration_folder(root: str | Path, iteration: int) -> Path:
    """The folder of one iteration, named as Megatron names it."""
    return Path(root) / f"iter_{iteration:07d}"


def save(
    root: str | Path,
    *,
    iteration: int,
    model_chunks: list[GPTModel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    state: dict[str, Any],
) -> None:
    """Write a checkpoint and point the marker at it; when it returns, the checkpoint is on the disk.

    `model_chunks` are this rank's models without wrappers. `state` holds plain values (numbers, strings, lists, dicts),
    equal on all ranks, and comes back from `load`. Needs at least one optimizer step before it, since without one there
    is no optimizer state. Raises ConfigError where the folder can't be written.
    """
    assert len(optimizer.state) > 0, "a checkpoint needs an optimizer step before it"
    final = iteration_folder(root, iteration)
    temporary = final.with_name(final.name + ".tmp")
    _on_rank_zero(lambda: _start_folder(temporary))
    content = _sharded_state(model_chunks, optimizer)
    content |= {"opt_param_scheduler": scheduler.state_dict(), "state": state}
    try:
        dist_checkpointing.save(content, str(temporary), sharded_strategy=_SynchronousSave("torch_dist", 1))
    except (torch_checkpoint.CheckpointException, OSError) as error:  # torch raises its own on all ranks
        raise ConfigError(_cannot_write(temporary, error)) from error
    own_sums = _on_every_rank(lambda: _flushed_sums(temporary, torch.distributed.get_rank()))
    all_sums: list[dict[str, str]] = [{}] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(all_sums, own_sums)
    sums = {name: digest for part in all_sums for name, digest in part.items()}
    _on_rank_zero(lambda: _publish(temporary, final, sums, iteration))


def load(
    root: str | Path,
    *,
    model_chunks: list[GPTModel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    load_optim: bool = True,
) -> dict[str, Any] | None:
    """Fill model, optimizer and scheduler from the checkpoint that the marker names, and return its `state`.

    None where there is no marker: a fresh start. With `load_optim` False only the weights are filled (the optimizer's
    float32 copies of them too), and the scheduler stays at its start. Raises ConfigError for a checkpoint that is
    damaged or does not fit; model and optimizer are then not to be used.
    """
    folder = _on_rank_zero(lambda: _find_folder(Path(root)))
    if folder is None:
        return None
    _on_every_rank(lambda: _verify_sums(folder))
    content = _sharded_state(model_chunks, optimizer if load_optim else None, is_loading=True)
    wanted = _gathered_shapes(content)
    _on_every_rank(lambda: _check_shapes(folder, wanted, load_optim))
    loaded = _on_every_rank(lambda: _read(content, folder))
    _on_every_rank(lambda: _fill(loaded, folder, model_chunks, optimizer, scheduler, load_optim))
    return loaded["state"]


class _SynchronousSave(torch_dist.TorchDistSaveShardedStrategy):
    """Core's `torch_dist` format, written by the calling process itself.

    Core's own strategy hands the files to a forked child and starts a multiprocessing manager, which imports the main
    script again (seconds), outlives a killed rank, and lets the rank wait forever for a child that died.
    """

    def save(self, sharded_state_dict: dict, checkpoint_dir: str | Path) -> None:
        by_key, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        torch_checkpoint.save(
            torch_dist.mcore_to_pyt_state_dict(by_key, False),
            storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir, sync_files=True, thread_count=1),
            planner=torch_dist.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def _sharded_state(
    model_chunks: list[GPTModel], optimizer: MegatronOptimizer | None, is_loading: bool = False
) -> dict[str, Any]:
    """What this rank saves or wants: `model`, or `model0`, `model1`, …, and `optimizer`.

    These names only group a rank's own tensors. In the files a tensor has its global name
    (`decoder.layers.5.mlp.linear_fc1.weight`), whichever rank and chunk holds the layer.
    """
    names = ["model"] if len(model_chunks) == 1 else [f"model{index}" for index in range(len(model_chunks))]
    content = {
        name: chunk.sharded_state_dict(metadata={"non_homogeneous_layers": True})
        for name, chunk in zip(names, model_chunks, strict=True)
    }
    if optimizer is not None:
        content["optimizer"] = optimizer.sharded_state_dict(dict(content), is_loading=is_loading)
    return content


# Writing


def _start_folder(temporary: Path) -> None:
    """An empty `temporary`; what killed saves left behind is removed."""
    root = temporary.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob("iter_*.tmp"):
            shutil.rmtree(leftover)
        temporary.mkdir()
    except OSError as error:
        raise ConfigError(_cannot_write(temporary, error)) from error


def _flushed_sums(folder: Path, rank: int) -> dict[str, str]:
    """The sums of the files that `rank` wrote, each flushed to the disk."""
    own = [path for path in folder.iterdir() if path.is_file() and _writer(path.name) == rank]
    try:
        return {path.name: _sha256(path, flush=True) for path in own}
    except OSError as error:
        raise ConfigError(_cannot_write(folder, error)) from error


def _writer(file_name: str) -> int:
    """The rank that wrote a file: `__3_0.distcp` is rank 3's, all else (`.metadata`, `common.pt`, …) is rank 0's."""
    match = re.match(r"__(\d+)_", file_name)
    return int(match[1]) if match else 0


def _publish(temporary: Path, final: Path, sums: dict[str, str], iteration: int) -> None:
    """Make the finished folder the checkpoint that the marker names.

    The order is what a kill can't hurt: files and sums on the disk, then the folder's name, then the marker. A folder
    of the same iteration steps aside as `.old` first, where `_find_folder` still finds it.
    """
    root, aside = final.parent, final.with_name(final.name + ".old")
    try:
        _write_flushed(temporary / SUMS, "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())))
        _flush_folder(temporary)
        if final.exists():
            if aside.exists():
                shutil.rmtree(aside)
            os.replace(final, aside)
        os.replace(temporary, final)
        _flush_folder(root)
        _write_flushed(root / (MARKER + ".tmp"), str(iteration))
        os.replace(root / (MARKER + ".tmp"), root / MARKER)
        _flush_folder(root)
        for leftover in root.glob("iter_*.old"):
            shutil.rmtree(leftover)
    except OSError as error:
        raise ConfigError(_cannot_write(final, error)) from error


def _write_flushed(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """Flush a folder's entries: without it a crash of the machine may undo a rename that came before a later write."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path, flush: bool = False) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        if flush:
            os.fsync(file.fileno())
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# Reading


def _find_folder(root: Path) -> Path | None:
    """The folder that the marker names; None without a marker."""
    marker = root / MARKER
    try:
        text = marker.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"checkpoint marker {marker} can't be read ({_reason(error)}): write an iteration into it"
        ) from error
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ConfigError(
            f"checkpoint marker {marker} holds {text[:40]!r}, not an iteration: write one of {_others(root)} into it"
        )
    final = iteration_folder(root, int(text))
    # A save of an iteration that was there before may have been killed between its two renames.
    for folder in (final, final.with_name(final.name + ".old")):
        if folder.is_dir():
            return folder
    raise ConfigError(f"checkpoint {final} does not exist, but {marker} names it: {_way_out(final)}")


def _verify_sums(folder: Path) -> None:
    """Check this rank's share of the files against the sums; together the ranks check them all."""
    world_size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _damaged(folder, f"{SUMS} can't be read, {_reason(error)}") from error
    entries = [re.fullmatch(r"([0-9a-f]{64})  ([^/]+)", line) for line in lines]
    if not entries or None in entries:
        raise _damaged(folder, f"{SUMS} is not a list of SHA-256 sums")
    for entry in entries[rank::world_size]:
        digest, name = entry.groups()
        try:
            actual = _sha256(folder / name)
        except OSError as error:
            raise _damaged(folder, f"{name} can't be read, {_reason(error)}") from error
        if actual != digest:
            raise _damaged(folder, f"{name} is not as it was saved (its SHA-256 sum differs)")


def _gathered_shapes(content: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and global shape of every tensor that any rank wants."""
    # Core builds parts of some tensors (SwiGLU's two halves) only in this step, on a copy.
    sharded, _, _ = load_preprocess(content)
    own = {item.key: tuple(item.global_shape) for item in nested_values(sharded) if isinstance(item, ShardedTensor)}
    gathered: list[dict[str, tuple[int, ...]]] = [{}] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, own)
    return {key: shape for part in gathered for key, shape in part.items()}


def _check_shapes(folder: Path, wanted: dict[str, tuple[int, ...]], load_optim: bool) -> None:
    """Compare what the model needs with what the checkpoint holds, before any tensor is overwritten."""
    try:
        stored = dist_checkpointing.load_tensors_metadata(str(folder))
    except _READ_ERRORS as error:
        raise _damaged(folder, _reason(error)) from error
    held = {
        key: tuple(tensor.global_shape)
        for key, tensor in stored.items()
        if load_optim or not key.startswith("optimizer.")
    }
    for key in sorted(wanted.keys() | held.keys()):
        if key not in held:
            raise _unfit(folder, f"it lacks {key}, which this run needs")
        if key not in wanted:
            raise _unfit(folder, f"it holds {key}, which this run lacks")
        if held[key] != wanted[key]:
            raise _unfit(folder, f"{key} has the shape {held[key]} in it and {wanted[key]} in this run")


def _read(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Read the tensors into model and optimizer state, and return them with the common part."""
    try:
        return dist_checkpointing.load(content, str(folder), validate_access_integrity=False)
    except _READ_ERRORS as error:
        raise _damaged(folder, _reason(error)) from error


def _fill(
    loaded: dict[str, Any],
    folder: Path,
    model_chunks: list[GPTModel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    load_optim: bool,
) -> None:
    for index, chunk in enumerate(model_chunks):
        chunk.load_state_dict(loaded["model" if len(model_chunks) == 1 else f"model{index}"])
    if not load_optim:
        optimizer.reload_model_params()  # float32 copies would otherwise undo the load at the first step
        return
    _check_schedule(folder, scheduler.state_dict(), loaded["opt_param_scheduler"], loaded["state"])
    given = _hyperparameters(optimizer)
    optimizer.load_state_dict(loaded["optimizer"])
    saved = _hyperparameters(optimizer)
    if saved != given:
        raise _unfit(
            folder, f"it was saved with {saved}, and this run has {given}", "--adam-beta1, --adam-beta2 and --adam-eps"
        )
    scheduler.load_state_dict(loaded["opt_param_scheduler"])


def _hyperparameters(optimizer: MegatronOptimizer) -> dict[str, Any]:
    """What torch's optimizers take from a checkpoint in place of the flags."""
    group = optimizer.param_groups[0]
    return {name: list(group[name]) if name == "betas" else group[name] for name in ("betas", "eps")}


_SCHEDULE_FLAGS = {
    # First: a warmup given as a fraction follows it.
    "lr_decay_steps": "--lr-decay-iters (--train-iters without it), times --global-batch-size",
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "lr_warmup_steps": "--lr-warmup-iters or --lr-warmup-fraction, times --global-batch-size",
    "lr_decay_style": "--lr-decay-style",
    "start_wd": "--weight-decay",
}


def _check_schedule(folder: Path, given: dict[str, Any], saved: dict[str, Any], state: dict[str, Any]) -> None:
    for name, flags in _SCHEDULE_FLAGS.items():
        if saved[name] == given[name]:
            continue
        if name == "lr_decay_steps" and state.get("consumed_train_samples"):
            iterations = saved[name] * state["iteration"] // state["consumed_train_samples"]
            flags = (
                f"--lr-decay-iters {iterations}, which without it follows --train-iters, to go on with the same decay"
            )
        raise _unfit(folder, f"it was saved with {name} {saved[name]}, and this run has {given[name]}", flags)


def check_writable(root: str | Path) -> None:
    """Raise ConfigError on every rank where rank 0 can't write into the folder, which is made if need be."""

    def write() -> None:
        try:
            Path(root).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=root):
                pass
        except OSError as error:
            raise ConfigError(_cannot_write(Path(root) / "checkpoints", error)) from error

    _on_rank_zero(write)


# Errors

# torch's CheckpointException is a BaseException; the rest is what files with right sums but another origin can cause.
_READ_ERRORS = (
    torch_checkpoint.CheckpointException,
    dist_checkpointing.core.CheckpointingException,
    pickle.UnpicklingError,
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    LookupError,
    AttributeError,
    TypeError,
)


def _cannot_write(folder: Path, error: BaseException) -> str:
    return f"--save {folder.parent}: can't write {folder.name} ({_reason(error)}): check the space and the rights of that folder"


def _damaged(folder: Path, what: str) -> ConfigError:
    return ConfigError(f"checkpoint {folder} is damaged: {what}; {_way_out(folder)}")


def _unfit(folder: Path, what: str, flags: str = "the model's flags, --bf16 and the vocabulary") -> ConfigError:
    return ConfigError(
        f"checkpoint {folder} does not fit this run: {what}; give {flags} as when it was saved, or another --load and --save folder"
    )


def _way_out(folder: Path) -> str:
    marker = folder.parent / MARKER
    return f"write another iteration into {marker} ({_others(folder.parent, folder)}), or remove that file for a fresh start"


def _others(root: Path, but: Path | None = None) -> str:
    """The iterations that `root` holds, latest first, at most five of them."""
    found = [path.name[5:] for path in root.glob("iter_*") if path.name[5:].isdigit() and path != but]
    return ", ".join(sorted((name.lstrip("0") or "0" for name in found), key=int, reverse=True)[:5]) or "there is none"


def _reason(error: BaseException) -> str:
    """The error's own words on one line; of torch's collective errors, the first rank's."""
    if isinstance(error, torch_checkpoint.CheckpointException) and error.failures:
        error = error.failures[min(error.failures)][0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


# Agreement


def _on_rank_zero(function: Callable[[], Result]) -> Result:
    """What `function` returns on rank 0, on every rank; a ConfigError too."""
    answer: list[Any] = [None, None]
    if torch.distributed.get_rank() == 0:
        try:
            answer[0] = function()
        except ConfigError as error:
            answer[1] = str(error)
    torch.distributed.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise ConfigError(answer[1])
    return answer[0]


def _on_every_rank(function: Callable[[], Result]) -> Result:
    """What `function` returns here; a ConfigError of any rank is raised on all of them, the lowest rank's."""
    result, error = None, None
    try:
        result = function()
    except ConfigError as raised:
        error = str(raised)
    errors: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(errors, error)
    for message in errors:
        if message is not None:
            raise ConfigError(message)
    return result
