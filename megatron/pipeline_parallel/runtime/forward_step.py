"""Model chunks from a Megatron-style `forward_step_func`."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megatron.pipeline_parallel.runtime.iteration import Loss

LossFunction = Callable[[Tensor], tuple]
"""Output of the last stage -> (loss, report), or (summed loss, number of tokens, report)."""

ForwardStep = Callable[[Iterator | None, nn.Module], tuple[Tensor, LossFunction]]
"""(data iterator, model) -> (output, loss function), as megatron-core's schedules call it."""


class ForwardStepChunk:
    """Calls `forward_step_func(data_iterator, model)` for one chunk, and on the last stage its loss function.

    `model` is whatever `forward_step_func` wants; `set_input_tensor` is looked for through wrappers' `module`s.
    The loss is divided by the number of microbatches (and by the number of tokens where the loss function returns that), so
    that gradients are those of the mean. Raises ValueError where no module has `set_input_tensor`, and when called out of
    microbatch order, since the data iterator can only go on.
    """

    def __init__(
        self,
        forward_step_func: ForwardStep,
        data_iterator: Iterator | None,
        model: nn.Module,
        *,
        is_last: bool,
        num_microbatches: int,
    ) -> None:
        self._forward_step = forward_step_func
        self._data_iterator = data_iterator
        self._model = model
        self._set_input_tensor = _find(model, "set_input_tensor")
        self._is_last = is_last
        self._num_microbatches = num_microbatches
        self._next_microbatch = 0

    def __call__(self, microbatch: int, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | Loss:
        if microbatch != self._next_microbatch:
            raise ValueError(f"forward of microbatch {microbatch}, but the data iterator is at {self._next_microbatch}")
        self._next_microbatch = (microbatch + 1) % self._num_microbatches
        self._set_input_tensor(list(inputs) or [None])
        output, loss_function = self._forward_step(self._data_iterator, self._model)
        # The model would keep the last input alive until its next forward.
        self._set_input_tensor([None])
        return self._loss(loss_function(output)) if self._is_last else (output,)

    def _loss(self, result: tuple) -> Loss:
        value, *num_tokens, report = result
        if num_tokens:
            value = value / torch.as_tensor(num_tokens[0]).clamp(min=1)
        return Loss(value=value / self._num_microbatches, report=_detached(report))


def _find(module: Any, name: str) -> Callable:
    while not hasattr(module, name):
        if not hasattr(module, "module"):
            raise ValueError(f"model chunk {type(module).__name__} has no {name}(), and wraps no module that has")
        module = module.module
    return getattr(module, name)


def _detached(report: Any) -> Any:
    """Reports outlive the iteration: one that held a graph would keep its activations."""
    if isinstance(report, Tensor):
        return report.detach()
    if isinstance(report, dict):
        return {key: _detached(value) for key, value in report.items()}
    if isinstance(report, tuple) and hasattr(report, "_fields"):
        return type(report)(*map(_detached, report))
    if isinstance(report, (list, tuple)):
        return type(report)(map(_detached, report))
    return report
