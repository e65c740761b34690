"""Log lines as Megatron's users grep them, TensorBoard events, and the bar."""

import io
import math
import re
import sys
from datetime import datetime
from pathlib import Path

import pytest

from megatron.pretrain.errors import ConfigError
from megatron.pretrain.log import IterationRecord, TrainingLog, open_summary_writer, validation_line

TIME = datetime(2026, 11, 30, 20, 53, 49, 123456)
LINE = (
    " [2026-11-30 20:53:49] iteration       10/     200 | consumed samples:          160 | elapsed time per iteration (ms): 305.6 |"
    " learning rate: 6.000000E-04 | global batch size:    16 | lm loss: 6.123456E+00 | loss scale: 1.0 | grad norm: 1.234 |"
    " number of skipped iterations:   0 | number of nan iterations:   0 |"
)


class Clock:
    """Seconds that a test moves on by hand."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def make_log(stream: io.StringIO, clock: Clock, **changes: object) -> TrainingLog:
    options = dict(
        train_iters=200,
        log_interval=10,
        enabled=True,
        stream=stream,
        terminal=io.StringIO(),
        clock=clock,
        now=lambda: TIME,
    )
    return TrainingLog(**(options | changes))


def step(log: TrainingLog, iteration: int, loss: float, **changes: object) -> None:
    values = dict(learning_rate=6e-4, global_batch_size=16, consumed_samples=16 * iteration, grad_norm=1.2341)
    log.iteration(iteration, loss=loss, **(values | changes))


def test_the_iteration_line() -> None:
    record = IterationRecord(
        time=TIME,
        iteration=10,
        train_iters=200,
        consumed_samples=160,
        elapsed_ms=305.6,
        learning_rate=6e-4,
        global_batch_size=16,
        loss=6.123456,
        grad_norm=1.2341,
    )
    assert str(record) == LINE


def test_a_line_holds_means_over_its_interval() -> None:
    stream, clock = io.StringIO(), Clock()
    log = make_log(stream, clock)
    for iteration in range(1, 11):
        clock.seconds += 0.3056
        assert stream.getvalue() == ""
        step(log, iteration, 6.123456 + (iteration - 5.5))
    assert stream.getvalue() == LINE + "\n"


def test_time_inside_a_pause_does_not_count() -> None:
    stream, clock = io.StringIO(), Clock()
    log = make_log(stream, clock, log_interval=2)
    for iteration in (1, 2, 3):
        clock.seconds += 0.5
        step(log, iteration, 1.0)
        with log.paused():
            clock.seconds += 60
    clock.seconds += 0.5
    step(log, 4, 1.0)
    assert re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", stream.getvalue()) == ["500.0", "500.0"]


def test_skipped_and_nan_iterations_are_counted_and_kept_out_of_the_mean() -> None:
    stream = io.StringIO()
    log = make_log(stream, Clock(), log_interval=6)
    step(log, 1, 2.0)
    step(log, 2, math.nan)
    step(log, 3, math.inf, skipped=True)
    step(log, 4, 100.0, skipped=True)
    step(log, 5, 4.0)
    step(log, 6, 6.0)
    assert "| lm loss: 4.000000E+00 |" in stream.getvalue()
    assert "| number of skipped iterations:   2 | number of nan iterations:   2 |" in stream.getvalue()
    for iteration in range(7, 13):
        step(log, iteration, 1.0)
    assert "| number of skipped iterations:   0 | number of nan iterations:   0 |" in stream.getvalue().splitlines()[1]


def test_an_interval_without_a_finite_loss_says_nan() -> None:
    stream = io.StringIO()
    step(make_log(stream, Clock(), log_interval=1), 1, math.nan)
    assert "| lm loss: NAN |" in stream.getvalue()


def test_after_a_resume_the_first_interval_is_shorter() -> None:
    stream, clock = io.StringIO(), Clock()
    log = make_log(stream, clock, start_iteration=7)
    for iteration in (8, 9, 10):
        clock.seconds += 0.2
        step(log, iteration, float(iteration))
    assert "elapsed time per iteration (ms): 200.0 |" in stream.getvalue()
    assert "| lm loss: 9.000000E+00 |" in stream.getvalue()


def test_a_missing_grad_norm_is_left_out() -> None:
    stream = io.StringIO()
    step(make_log(stream, Clock(), log_interval=1), 1, 1.0, grad_norm=None)
    assert "loss scale: 1.0 | number of skipped iterations:" in stream.getvalue()


def test_the_validation_lines() -> None:
    stream = io.StringIO()
    log = make_log(stream, Clock())
    log.validation(200, 3.123456)
    text = " validation loss at iteration 200 | lm loss value: 3.123456E+00 | lm loss PPL: 2.272478E+01 |"
    assert stream.getvalue().splitlines() == ["-" * len(text), text, "-" * len(text)]
    assert validation_line(5, 30.0, "test") == (
        " validation loss at iteration 5 on test set | lm loss value: 3.000000E+01 | lm loss PPL: 4.851652E+08 |"
    )


def test_other_ranks_are_silent(tmp_path: Path) -> None:
    stream, terminal = io.StringIO(), Terminal()
    log = make_log(
        stream, Clock(), enabled=False, log_interval=1, terminal=terminal, tensorboard_dir=str(tmp_path / "events")
    )
    step(log, 1, 1.0)
    log.validation(1, 1.0)
    log.line("text")
    with log.paused():
        pass
    log.close()
    assert (stream.getvalue(), terminal.getvalue()) == ("", "")
    assert not (tmp_path / "events").exists()


def test_tensorboard_gets_every_iteration(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    clock = Clock()
    log = make_log(io.StringIO(), clock, log_interval=2, tensorboard_dir=str(tmp_path))
    for iteration in (1, 2):
        clock.seconds += 0.25
        step(log, iteration, float(iteration))
    log.validation(2, 2.0)
    log.close()
    log.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    read = {
        tag: [(event.step, round(event.value, 6)) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }
    assert read == {
        "lm loss": [(1, 1.0), (2, 2.0)],
        "learning-rate": [(1, 6e-4), (2, 6e-4)],
        "grad-norm": [(1, 1.2341), (2, 1.2341)],
        "batch-size": [(1, 16.0), (2, 16.0)],
        "iteration-time": [(2, 0.25)],
        "lm loss validation": [(2, 2.0)],
        "lm loss validation ppl": [(2, 7.389056)],
    }


def test_missing_tensorboard_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        open_summary_writer("events")


def test_the_bar_is_on_a_terminal_only_and_lines_do_not_tear_it() -> None:
    """Both streams are one terminal here, as they are for a person who runs the script."""
    terminal = Terminal()
    log = make_log(terminal, Clock(), log_interval=1, terminal=terminal, start_iteration=9)
    step(log, 10, 6.123456)
    log.close()
    printed = terminal.getvalue()
    assert "| 9/200 [" in printed and "| 10/200 [" in printed
    before, _, _ = printed.partition(" [2026-11-30")
    # The bar was wiped from its line, and the cursor put back to the left, before the log line went out.
    assert re.search(r"\r *\r$", before) or before.endswith("\r")
    assert re.search(r"iteration       10/     200 .*\|\n", printed)
