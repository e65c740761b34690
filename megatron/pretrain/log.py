"""What a run says while it trains: Megatron's log lines, TensorBoard events, and a progress bar on a terminal.

One process logs, the one that has the loss (the last pipeline rank); on the others every call returns at once.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TextIO

from megatron.pretrain.errors import ConfigError, missing_package


@dataclass(frozen=True, kw_only=True)
class IterationRecord:
    """The figures of one log line; it prints as the line that Megatron's users grep."""

    time: datetime
    iteration: int
    train_iters: int
    consumed_samples: int
    elapsed_ms: float
    """Wall time of one iteration, the mean since the line before."""
    learning_rate: float
    global_batch_size: int
    loss: float
    """Mean over the iterations since the line before; NaN where none of them had a finite loss."""
    loss_scale: float = 1.0
    grad_norm: float | None = None
    """Global norm before clipping, of this iteration; left out of the line where there is none."""
    num_skipped: int = 0
    num_nan: int = 0

    def __str__(self) -> str:
        parts = [
            f" [{self.time:%Y-%m-%d %H:%M:%S}] iteration {self.iteration:8d}/{self.train_iters:8d}",
            f"consumed samples: {self.consumed_samples:12d}",
            f"elapsed time per iteration (ms): {self.elapsed_ms:.1f}",
            f"learning rate: {self.learning_rate:.6E}",
            f"global batch size: {self.global_batch_size:5d}",
            f"lm loss: {self.loss:.6E}",
            f"loss scale: {self.loss_scale:.1f}",
            None if self.grad_norm is None else f"grad norm: {self.grad_norm:.3f}",
            f"number of skipped iterations: {self.num_skipped:3d}",
            f"number of nan iterations: {self.num_nan:3d}",
        ]
        return " | ".join(part for part in parts if part is not None) + " |"


def perplexity(loss: float) -> float:
    """exp(loss), with the loss cut at 20 as Megatron does, so that a diverged run prints a number."""
    return math.exp(min(loss, 20.0))


def validation_line(iteration: int, loss: float, dataset: str = "validation") -> str:
    """The line of one evaluation; the validation set's is not named, as in Megatron."""
    place = f"iteration {iteration}" + ("" if dataset == "validation" else f" on {dataset} set")
    return f" validation loss at {place} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity(loss):.6E} |"


class TrainingLog:
    """Gathers what happened since the last log line, and writes lines, events and the bar."""

    def __init__(
        self,
        *,
        train_iters: int,
        log_interval: int,
        enabled: bool,
        tensorboard_dir: str | None = None,
        start_iteration: int = 0,
        stream: TextIO | None = None,
        terminal: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """The interval's time starts here.

        `enabled` is true on the one process that logs. Lines go to `stream` (stdout), the bar to `terminal` (stderr) if
        that is one. `clock` gives seconds; `start_iteration` is the iteration that a resumed run begins after.
        Raises ConfigError if TensorBoard is asked for and not installed.
        """
        self._train_iters = train_iters
        self._log_interval = log_interval
        self.enabled = enabled
        self._stream = stream or sys.stdout
        self._clock = clock
        self._now = now
        self._writer = open_summary_writer(tensorboard_dir) if enabled and tensorboard_dir is not None else None
        self._bar = _open_bar(terminal or sys.stderr, train_iters, start_iteration) if enabled else None
        self._interval = _Interval(start=clock())

    def iteration(
        self,
        iteration: int,
        *,
        loss: float,
        learning_rate: float,
        global_batch_size: int,
        consumed_samples: int,
        grad_norm: float | None = None,
        skipped: bool = False,
    ) -> None:
        """Book one finished iteration (counted from 1), and write a line where the log interval ends.

        `skipped`: the optimizer took no step. Such a loss, or one that is not finite, is counted and left out of the mean.
        """
        if not self.enabled:
            return
        self._interval.add(loss, skipped)
        self._scalars(
            iteration,
            {"lm loss": loss, "learning-rate": learning_rate, "grad-norm": grad_norm, "batch-size": global_batch_size},
        )
        if self._bar is not None:
            self._bar.set_postfix_str(f"lm loss {loss:.4f}", refresh=False)
            self._bar.update()
        if iteration % self._log_interval:
            return
        interval, self._interval = self._interval, _Interval(start=self._clock())
        elapsed_ms = 1000 * interval.seconds_until(self._interval.start) / interval.num_iterations
        self._scalars(iteration, {"iteration-time": elapsed_ms / 1000})
        record = IterationRecord(
            time=self._now(),
            iteration=iteration,
            train_iters=self._train_iters,
            consumed_samples=consumed_samples,
            elapsed_ms=elapsed_ms,
            learning_rate=learning_rate,
            global_batch_size=global_batch_size,
            loss=interval.mean_loss(),
            grad_norm=grad_norm,
            num_skipped=interval.num_skipped,
            num_nan=interval.num_nan,
        )
        self.line(str(record))

    def validation(self, iteration: int, loss: float, dataset: str = "validation") -> None:
        """Write the result of one evaluation, framed by dashes as Megatron's is."""
        if not self.enabled:
            return
        text = validation_line(iteration, loss, dataset)
        frame = "-" * len(text)
        self.line(f"{frame}\n{text}\n{frame}")
        self._scalars(iteration, {f"lm loss {dataset}": loss, f"lm loss {dataset} ppl": perplexity(loss)})

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what runs inside, such as an evaluation or a save, out of the elapsed time."""
        began = self._clock()
        try:
            yield
        finally:
            self._interval.paused_seconds += self._clock() - began

    def line(self, text: str) -> None:
        """Write a line of any kind, above the bar where there is one."""
        if not self.enabled:
            return
        if self._bar is None:
            print(text, file=self._stream)
        else:
            self._bar.write(text, file=self._stream)  # takes the bar off the terminal while it writes
        self._stream.flush()

    def close(self) -> None:
        """End the bar and write TensorBoard's events out; a second call does nothing."""
        bar, self._bar = self._bar, None
        writer, self._writer = self._writer, None
        if bar is not None:
            bar.close()
        if writer is not None:
            writer.close()

    def _scalars(self, iteration: int, values: dict[str, float | None]) -> None:
        if self._writer is None:
            return
        for tag, value in values.items():
            if value is not None:
                self._writer.add_scalar(tag, value, iteration)


@dataclass(kw_only=True)
class _Interval:
    """Sums since the last log line."""

    start: float
    paused_seconds: float = 0.0
    num_iterations: int = 0
    num_skipped: int = 0
    num_nan: int = 0
    loss_sum: float = 0.0
    num_losses: int = 0

    def add(self, loss: float, skipped: bool) -> None:
        self.num_iterations += 1
        self.num_skipped += skipped
        if not math.isfinite(loss):
            self.num_nan += 1
        elif not skipped:
            self.loss_sum += loss
            self.num_losses += 1

    def mean_loss(self) -> float:
        return self.loss_sum / self.num_losses if self.num_losses else math.nan

    def seconds_until(self, end: float) -> float:
        return end - self.start - self.paused_seconds


def open_summary_writer(folder: str) -> Any:
    """TensorBoard's writer of events into `folder`; ConfigError where the package is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # here: it is optional, and slow to import
    except ImportError:
        raise missing_package("tensorboard", "--tensorboard-dir") from None
    try:
        return SummaryWriter(log_dir=folder)
    except OSError as error:
        raise ConfigError(f"--tensorboard-dir {folder} can't be written ({error}): give another folder") from error


def _open_bar(terminal: TextIO, train_iters: int, start_iteration: int) -> Any:
    """tqdm's bar on a terminal, None anywhere else."""
    if not terminal.isatty():
        return None
    from tqdm import tqdm  # here: a run in a batch job has no use for it

    return tqdm(
        total=train_iters, initial=start_iteration, file=terminal, unit="iteration", desc="training", dynamic_ncols=True
    )
