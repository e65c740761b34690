"""pretrain_gpt.py as its users run it: mistakes, failures, resumes and kills, on forked ranks as a launcher starts them."""

import os
import random
import re
import signal
import sys
import time

import gpt_runs
import numpy
import pytest
import torch
from forked_ranks import run_ranks_to_the_end
from gpt_runs import flags

import pretrain_gpt
from megatron.pretrain.failure import run_rank

SECONDS_TO_STOP = 20
SLOW_S = 1.5


def program(argv, providers=None):
    """What the file does under `if __name__ == "__main__"`, with other providers where given."""
    for name, value in (providers or {}).items():
        setattr(pretrain_gpt, name, value)
    run_rank(lambda: pretrain_gpt.main(argv), os.environ, patience_s=2.0)


def counting(argv):
    """The program on generated samples that there is something to learn from."""
    program(argv, {"datasets_provider": gpt_runs.datasets_provider})


def start(function, tmp_path, *args, ranks=2, ends_together=False, **changes):
    began = time.monotonic()
    argv = flags(**{"pipeline_model_parallel_size": ranks, **changes})
    outcomes = run_ranks_to_the_end(
        function, ranks, tmp_path, argv, *args, initialised=False, ends_together=ends_together
    )
    return outcomes, time.monotonic() - began


def losses(outcomes):
    """{iteration: loss as printed} from the log lines of all ranks."""
    lines = re.findall(r"iteration +(\d+)/.*?lm loss: (\S+)", "".join(outcome.log for outcome in outcomes))
    return {int(iteration): loss for iteration, loss in lines}


def write_dataset(prefix, tokens):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.int32)
    for _ in range(20):
        builder.add_document(torch.tensor(tokens), [len(tokens)])
    builder.finalize(f"{prefix}.idx")


def data_with_token_99(tmp_path):
    write_dataset(tmp_path / "data", [1, 2, 99])
    return {"mock_data": None, "data_path": tmp_path / "data"}


def damaged_checkpoint(tmp_path):
    start(counting, tmp_path, train_iters=1, save=tmp_path / "save")
    metadata = tmp_path / "save" / "iter_0000001" / ".metadata"
    content = bytearray(metadata.read_bytes())
    content[len(content) // 2] ^= 1
    metadata.write_bytes(content)
    return {"load": tmp_path / "save"}


MISTAKES = {
    "a missing data file": (lambda path: {"mock_data": None, "data_path": path / "nothing"}, "--data-path .*nothing"),
    "a token beyond the vocabulary": (data_with_token_99, "holds token 99, but the vocabulary has 61 tokens"),
    "more ranks than layers": (lambda path: {"pipeline_model_parallel_size": 8}, "--pipeline-model-parallel-size 8 is larger than --num-layers 4"),
    "layers that do not divide": (lambda path: {"num_layers": 7}, "--pipeline-model-parallel-size 2 does not divide --num-layers 7.*6 or 8"),
    "a batch that does not divide": (lambda path: {"global_batch_size": 5}, "--global-batch-size 5 does not divide.*4 or 6"),
    "a damaged checkpoint": (damaged_checkpoint, "iter_0000001 is damaged: .metadata"),
    "a schedule that is not built": (lambda path: {"pipeline_schedule": "zbv"}, "--pipeline-schedule zbv is not built yet"),
    "an unknown flag": (lambda path: {"num_layer": 4}, "unknown flag --num-layer .*--num-layers"),
}  # fmt: skip


def assert_one_line(message, function, tmp_path, **changes):
    """Run with `changes`, a mistake: one line that matches, every rank out in seconds; returns how the ranks ended."""
    outcomes, seconds = start(function, tmp_path, ends_together=True, **changes)
    codes = [outcome.exitcode for outcome in outcomes]
    # The first to end has status 2; the launcher ends the rest.
    assert 2 in codes and set(codes) <= {2, -signal.SIGTERM}
    said = [line for outcome in outcomes for line in outcome.log.splitlines() if "error" in line or "Error" in line]
    assert len(said) == 1, said
    assert re.search(message, said[0]), said[0]
    assert "Traceback" not in "".join(outcome.log for outcome in outcomes)
    assert seconds < SECONDS_TO_STOP
    return outcomes


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_every_rank_ends_in_seconds(mistake, tmp_path):
    change, message = MISTAKES[mistake]
    assert_one_line(message, program, tmp_path, **change(tmp_path))


def saved_run(tmp_path, **changes):
    """The folder of a checkpoint that another run left."""
    outcomes, _ = start(counting, tmp_path, train_iters=2, save=tmp_path / "save", **changes)
    assert [outcome.exitcode for outcome in outcomes] == [0, 0], outcomes[0].log
    return tmp_path / "save"


def in_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "below"


UNFIT = {
    "another model": (lambda path: {"load": saved_run(path), "num_attention_heads": 8, "train_iters": 2}, "another model: --num-attention-heads was 2, is 8"),
    "a longer run": (
        lambda path: {"load": saved_run(path), "train_iters": 4},
        "--lr-decay-iters 2, which without it follows --train-iters",
    ),
    "weights that are not there": (
        lambda path: {"save": path / "new", "load": path / "new", "finetune": True},
        "--finetune needs weights to begin with, and --load .*new holds no checkpoint",
    ),
    "a folder that can't be written": (lambda path: {"save": in_a_file(path)}, "--save .*file/below: can't write"),
    "events that can't be written": (lambda path: {"tensorboard_dir": in_a_file(path)}, "--tensorboard-dir .*file/below can't be written"),
}  # fmt: skip


@pytest.mark.parametrize("misfit", UNFIT)
def test_what_does_not_fit_is_one_line_before_any_work_is_lost(misfit, tmp_path):
    change, message = UNFIT[misfit]
    outcomes = assert_one_line(message, counting, tmp_path, **change(tmp_path))
    assert losses(outcomes) == {}


def test_a_loss_that_is_no_number_ends_the_run_before_it_is_saved(tmp_path):
    save = tmp_path / "save"
    outcomes, seconds = start(
        counting, tmp_path, train_iters=9, lr=1e30, save=save, save_interval=1, ends_together=True
    )
    assert 1 in [outcome.exitcode for outcome in outcomes]
    log = "".join(outcome.log for outcome in outcomes)
    found = re.search(
        r"error: the (?:loss|gradient norm) of iteration (\d+) is (?:nan|inf): checkpoints in .*save are from before",
        log,
    )
    assert found, log
    assert "Traceback" not in log
    assert int((save / "latest_checkpointed_iteration.txt").read_text()) < int(found.group(1))
    assert seconds < SECONDS_TO_STOP


def test_a_resume_says_what_is_told_differently(tmp_path):
    folder = saved_run(tmp_path)
    outcomes, _ = start(counting, tmp_path, train_iters=3, lr_decay_iters=2, load=folder, seed=99)
    assert "resumed at iteration 2" in outcomes[1].log
    assert "other than when the checkpoint was saved: --seed was 1234, is 99" in outcomes[1].log
    outcomes, _ = start(counting, tmp_path, train_iters=3, load=tmp_path / "none", save=tmp_path / "none")
    assert f"no checkpoint in {tmp_path / 'none'}: a fresh start" in outcomes[1].log


def test_finetune_begins_again_with_the_weights_and_no_load_optim_goes_on(tmp_path):
    folder = saved_run(tmp_path)
    whole, _ = start(counting, tmp_path, train_iters=2)
    finetuned, _ = start(counting, tmp_path, train_iters=1, load=folder, finetune=True)
    assert f"loaded the weights of iteration 2 from {folder}" in finetuned[1].log
    # Its first loss is of the first batch, under trained weights.
    assert float(losses(finetuned)[1]) < float(losses(whole)[1]) - 0.01
    continued, _ = start(counting, tmp_path, train_iters=3, lr_decay_iters=9, load=folder, no_load_optim=True)
    assert sorted(losses(continued)) == [3]
    rate = float(re.search(r"learning rate: (\S+)", continued[1].log).group(1))
    assert rate == pytest.approx(1e-2 * (1 - 2 / 9))


def interrupted(argv):
    """Ctrl-C reaches every rank."""

    def forward_step(data_iterator, model, step=gpt_runs.pretrain_gpt.forward_step, count=[0]):
        count[0] += 1
        if count[0] == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step(data_iterator, model)

    program(argv, {"forward_step": forward_step, "datasets_provider": gpt_runs.datasets_provider})


def test_ctrl_c_is_one_word_and_ends_at_once(tmp_path):
    outcomes, seconds = start(interrupted, tmp_path, global_batch_size=8)
    assert outcomes[0].exitcode == 130 and outcomes[1].exitcode in (1, 130)
    assert "".join(outcome.log for outcome in outcomes).count("interrupted") == 1
    assert "Traceback" not in outcomes[0].log
    assert seconds < SECONDS_TO_STOP


def group_timeouts():
    from megatron.core import parallel_state

    from megatron.pipeline_parallel.planning.op import Placement
    from megatron.pretrain.flags import parse
    from megatron.pretrain.initialize import process_groups

    config = parse(flags(pipeline_model_parallel_size=2, distributed_timeout_minutes=3))
    with process_groups(config, Placement.loop(2)):
        groups = [parallel_state.get_pipeline_model_parallel_group(), parallel_state.get_data_parallel_group()]
        return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def test_the_timeout_holds_for_the_groups_that_ranks_wait_in(tmp_path):
    outcomes = run_ranks_to_the_end(group_timeouts, 2, tmp_path, initialised=False)
    assert [outcome.result for outcome in outcomes] == [[180.0, 180.0]] * 2


def slow_outside_the_steps(argv):
    """Evaluations and saves that take much longer than an iteration."""
    from megatron.pretrain import checkpoint, training

    for owner, name in ((checkpoint, "save"), (training.Trainer, "_iterators")):
        fast = getattr(owner, name)

        def slow(*args, fast=fast, **options):
            time.sleep(SLOW_S)
            return fast(*args, **options)

        setattr(owner, name, slow)
    program(argv)


def test_data_parallel_pipelines_on_a_dataset_log_once_and_as_one_rank_does(tmp_path):
    write_dataset(tmp_path / "data", [(7 * i) % 59 for i in range(200)])
    settings = {
        "mock_data": None, "data_path": tmp_path / "data", "split": "80,10,10", "global_batch_size": 8, "train_iters": 4,
        "eval_iters": 1, "eval_interval": 2, "pipeline_schedule": "zb-h1", "log_interval": 1,
    }  # fmt: skip
    plain = {**settings, "data_cache_path": tmp_path / "plain"}
    piped = {**settings, "save": tmp_path / "save", "save_interval": 2, "tensorboard_dir": tmp_path / "events"}
    piped |= {"pipeline_model_parallel_size": 2, "data_cache_path": tmp_path / "piped"}
    expected, _ = start(program, tmp_path, ranks=1, **plain)
    outcomes, _ = start(slow_outside_the_steps, tmp_path, ranks=4, **piped)
    assert [outcome.exitcode for outcome in outcomes] == [0] * 4, outcomes[3].log
    log = "".join(outcome.log for outcome in outcomes)
    assert len(re.findall(r"iteration +\d+/", log)) == 4
    assert len(re.findall(r"validation loss at iteration \d+ \|", log)) == 2
    assert max(float(text) for text in re.findall(r"iteration \(ms\): (\S+)", log)) < 1000 * SLOW_S
    ours, one_rank = losses(outcomes), losses(expected)
    assert {iteration: float(loss) for iteration, loss in ours.items()} == pytest.approx(
        {iteration: float(loss) for iteration, loss in one_rank.items()}, rel=1e-4
    )
    assert scalars(tmp_path / "events", "lm loss") == pytest.approx(
        {i: float(loss) for i, loss in ours.items()}, rel=1e-6
    )
    assert sorted(scalars(tmp_path / "events", "lm loss validation")) == [2, 4]


def scalars(folder, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


def failing_on_rank_1(argv):
    def forward_step(data_iterator, model, step=gpt_runs.pretrain_gpt.forward_step, count=[0]):
        count[0] += 1
        if os.environ["RANK"] == "1" and count[0] == 3:
            raise RuntimeError("the third microbatch is broken")
        return step(data_iterator, model)

    program(argv, {"forward_step": forward_step, "datasets_provider": gpt_runs.datasets_provider})


def test_when_one_rank_raises_all_end_and_its_error_is_the_one_that_is_printed(tmp_path):
    outcomes, seconds = start(failing_on_rank_1, tmp_path, global_batch_size=8, pipeline_schedule="zb-h1")
    assert [outcome.exitcode for outcome in outcomes] == [1, 1]
    assert outcomes[1].log.count("rank 1 failed: RuntimeError: the third microbatch is broken") == 1
    assert "Traceback" in outcomes[1].log
    assert "Traceback" not in outcomes[0].log and "failed" not in outcomes[0].log
    assert seconds < SECONDS_TO_STOP


def killed_on_rank_1(argv):
    def forward_step(data_iterator, model, step=gpt_runs.pretrain_gpt.forward_step, count=[0]):
        count[0] += 1
        if os.environ["RANK"] == "1" and count[0] == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(data_iterator, model)

    program(argv, {"forward_step": forward_step, "datasets_provider": gpt_runs.datasets_provider})


def test_when_one_rank_is_killed_the_others_end_and_say_that_it_is_gone(tmp_path):
    outcomes, seconds = start(killed_on_rank_1, tmp_path, global_batch_size=8, pipeline_schedule="zb-h1")
    assert [outcome.exitcode for outcome in outcomes] == [1, -signal.SIGKILL]
    assert "rank 0 failed" in outcomes[0].log
    assert seconds < SECONDS_TO_STOP


def slow_steps(argv):
    def forward_step(data_iterator, model, step=gpt_runs.pretrain_gpt.forward_step):
        time.sleep(0.05)
        return step(data_iterator, model)

    program(argv, {"forward_step": forward_step, "datasets_provider": gpt_runs.datasets_provider})


def test_the_logged_time_of_an_iteration_is_the_time_of_its_computation(tmp_path):
    """Not the time in which it was enqueued: four microbatches of 50 ms on each of two ranks take 250 ms."""
    outcomes, _ = start(slow_steps, tmp_path, global_batch_size=8)
    times = [float(text) for text in re.findall(r"iteration \(ms\): (\S+)", outcomes[1].log)]
    assert len(times) == 3
    assert min(times) >= 250


def test_each_microbatch_of_each_iteration_is_logged_once(tmp_path):
    outcomes, _ = start(counting, tmp_path, global_batch_size=6, eval_iters=2, eval_interval=2, train_iters=4)
    assert sorted(losses(outcomes)) == [1, 2, 3, 4]
    log = outcomes[1].log
    assert re.findall(r"consumed samples: +(\d+)", log) == ["6", "12", "18", "24"]
    assert re.findall(r"validation loss at iteration (\d+) \|", log) == ["2", "4"]
    assert log.count("validation loss at iteration 4 on test set") == 1
    assert [outcome.exitcode for outcome in outcomes] == [0, 0]


@pytest.mark.parametrize("resumed_ranks", [2, 4])
def test_a_resumed_run_continues_the_curve(resumed_ranks, tmp_path):
    """Bit for bit, on other numbers of ranks too: dropout and data order are keyed by iteration, not by what ran before."""
    settings = {"train_iters": 6, "global_batch_size": 6, "pipeline_schedule": "zb-h1"}
    whole, _ = start(counting, tmp_path, **settings)
    saved = {**settings, "save": tmp_path / "save", "load": tmp_path / "save"}
    first, _ = start(counting, tmp_path, exit_interval=3, **saved)
    second, _ = start(counting, tmp_path, ranks=resumed_ranks, **saved)
    assert sorted(losses(first)) == [1, 2, 3] and sorted(losses(second)) == [4, 5, 6]
    assert losses(first) | losses(second) == losses(whole)


def killed_at(argv, seconds):
    """All ranks die at once, as when a machine loses its power."""
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    counting(argv)


def seeds():
    return [pytest.param(seed, marks=() if seed < 3 else pytest.mark.full) for seed in range(20)]


@pytest.mark.parametrize("seed", seeds())
def test_a_run_killed_at_any_moment_resumes_to_the_same_curve(seed, tmp_path):
    """It saves in every iteration, so that many of the kills fall into a save."""
    settings = {"train_iters": 12, "global_batch_size": 4, "pipeline_schedule": "zb-h1"}
    whole, _ = start(counting, tmp_path, **settings)
    saved = {**settings, "save": tmp_path / "save", "load": tmp_path / "save", "save_interval": 1}
    rng, curve = random.Random(seed), {}
    for _ in range(3):
        killed, _ = start(killed_at, tmp_path, rng.uniform(0.3, 2.5), **saved)
        curve |= losses(killed)
    last, _ = start(counting, tmp_path, **saved)
    assert [outcome.exitcode for outcome in last] == [0, 0], last[0].log + last[1].log
    assert curve | losses(last) == losses(whole)
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text() == "12"


def test_help_answers_at_once_and_without_torch(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit) as stopped:
        pretrain_gpt.main(["--help"])
    assert stopped.value.code == 0
    assert "--pipeline-schedule" in capsys.readouterr().out
