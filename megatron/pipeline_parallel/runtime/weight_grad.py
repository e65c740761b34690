"""The B/W split: a linear layer's backward gives the input gradient at once and queues its weight gradient for W."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class PendingGrad(NamedTuple):
    """A weight gradient to be computed: `output_grad`^T `input`, accumulated into `weight`. Holds both tensors until then."""

    weight: Tensor
    input: Tensor
    output_grad: Tensor

    def compute(self) -> None:
        """One mm, then one add into the accumulator; addmm would round differently from the unsplit backward."""
        with torch.no_grad():
            output_grad = self.output_grad.reshape(-1, self.output_grad.size(-1))
            # Under autocast the product is taken in the output's type, whatever the saved input's is.
            input = self.input.reshape(-1, self.input.size(-1)).to(output_grad.dtype)
            accumulate(self.weight, output_grad.t().mm(input).to(self.weight.dtype))


def accumulate(weight: Tensor, gradient: Tensor) -> None:
    """Add into `weight.main_grad` where there is one (megatron-core's DDP), else into `weight.grad` as autograd does."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is not None:
        main_grad.add_(gradient)
    elif weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad.add_(gradient)


class WeightGradStore:
    """The weight gradients of one rank that wait for their W, a queue a unit of work.

    Inside `collect(key)` layers put theirs under that key, `compute(key)` empties it in the same order. Elsewhere a
    gradient is computed as soon as it is put, so that a model whose layers are split still trains without a schedule.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, list[PendingGrad]] = {}
        self._collecting: list[PendingGrad] | None = None
        self.num_computed = 0
        """Weight gradients computed so far, deferred or not."""

    @contextmanager
    def collect(self, key: Hashable) -> Iterator[None]:
        if key in self._waiting:
            raise ValueError(f"weight gradients of {key} are waiting already")
        self._collecting = self._waiting[key] = []
        try:
            yield
        finally:
            self._collecting = None

    def put(self, weight: Tensor, input: Tensor, output_grad: Tensor) -> None:
        pending = PendingGrad(weight, input, output_grad)
        if self._collecting is None:
            self._compute(pending)
        else:
            self._collecting.append(pending)

    def compute(self, key: Hashable) -> None:
        """Compute what waits under `key`, dropping each layer's tensors as it is done. KeyError for a key never collected."""
        queue = self._waiting.pop(key)
        queue.reverse()
        while queue:
            self._compute(queue.pop())

    def _compute(self, pending: PendingGrad) -> None:
        self.num_computed += 1
        pending.compute()

    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def clear(self) -> None:
        """Drop everything that waits, as after a failed iteration."""
        self._waiting.clear()
        self._collecting = None


class SplitLinear(torch.autograd.Function):
    """`linear(input, weight, bias)` whose weight gradient goes to a store; the bias gradient is part of B."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, store: WeightGradStore, linear: Callable
    ) -> Tensor:
        ctx.save_for_backward(input)
        # Not saved for backward: W writes into this very parameter, and a saved-tensor hook (recompute, offload) gives back
        # another tensor. Its check for in-place changes is made here instead.
        ctx.weight, ctx.weight_version = weight, weight._version
        ctx.store = store
        return linear(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        (input,), weight = ctx.saved_tensors, ctx.weight
        if weight._version != ctx.weight_version:
            raise RuntimeError("a linear layer's weight was changed in place between its forward and its backward")
        input_grad = bias_grad = None
        if ctx.needs_input_grad[0]:
            input_grad = output_grad.matmul(weight.to(output_grad.dtype)).to(input.dtype)
        if ctx.needs_input_grad[2]:
            bias_grad = output_grad.reshape(-1, output_grad.size(-1)).sum(0)
        ctx.store.put(weight, input, output_grad)
        return input_grad, None, bias_grad, None, None


def can_split(weight: Tensor) -> bool:
    """Whether a weight's gradient can be accumulated by W.

    It needs one now, and it is the parameter itself: one that is computed (weight norm, pruning) gets its gradient through
    the graph, in B.
    """
    return weight.requires_grad and weight.is_leaf and torch.is_grad_enabled()


def _split_forward(module: nn.Linear, store: WeightGradStore, input: Tensor) -> Tensor:
    if not can_split(module.weight):
        return nn.functional.linear(input, module.weight, module.bias)
    return SplitLinear.apply(input, module.weight, module.bias, store, nn.functional.linear)


def split_linears(module: nn.Module, store: WeightGradStore) -> int:
    """Make every `nn.Linear` in `module` defer its weight gradient to `store`; returns how many there are.

    Each instance's `forward` is replaced, nothing global. Subclasses of `nn.Linear` keep their own forward, and so their
    whole backward in B, since they may compute something else. Raises ValueError where a layer is split already.
    """
    linears = [layer for layer in module.modules() if type(layer) is nn.Linear]
    for layer in linears:
        if "forward" in vars(layer):
            raise ValueError(f"{layer} has a forward of its own: it is split already, or was changed by someone else")
        layer.forward = partial(_split_forward, layer, store)
    return len(linears)
