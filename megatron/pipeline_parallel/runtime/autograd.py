"""One microbatch's graph through one chunk: entered by its inputs, left by its outputs, holding neither."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


class ChunkGraph:
    """What B needs of one F.

    A leaf input would live as long as its graph, so inputs enter through an identity Function that catches their
    gradients; of an output only its edge in the graph is kept. Both tensors can be freed while the graph waits for its B.
    """

    def __init__(self) -> None:
        self._edges: list[GradientEdge | None] = []
        self._output_meta: list[_Meta] = []
        self._input_gradients: dict[int, Tensor] = {}
        self._input_meta: list[_Meta] = []

    def enter(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors to compute with instead of `inputs`; floating-point ones carry gradients back to this graph."""
        self._input_meta = list(map(_Meta.of, inputs))
        anchor = torch.empty(0, requires_grad=True)
        return tuple(
            _CatchGradient.apply(anchor, self._input_gradients, index, tensor) if tensor.is_floating_point() else tensor
            for index, tensor in enumerate(inputs)
        )

    def leave(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Remember where `outputs` leave the graph; returns them detached."""
        self._edges = [get_gradient_edge(output) if output.requires_grad else None for output in outputs]
        self._output_meta = list(map(_Meta.of, outputs))
        return tuple(output.detach() for output in outputs)

    def backward(self, gradients: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
        """Run autograd once, free the graph, and return the gradient of each input (zeros where none reached it).

        `gradients` has one tensor an output, or is None where the outputs are losses.
        """
        if gradients is None:
            gradients = [meta.full(1) for meta in self._output_meta]
        if len(gradients) != len(self._edges):
            raise ValueError(f"the chunk has {len(self._edges)} outputs, but {len(gradients)} gradients came back")
        edges, self._edges = self._edges, []
        roots = [(edge, gradient) for edge, gradient in zip(edges, gradients) if edge is not None]
        if roots:
            torch.autograd.backward([edge for edge, _ in roots], [gradient for _, gradient in roots])
        caught = self._input_gradients
        return tuple(caught[index] if index in caught else meta.full(0) for index, meta in enumerate(self._input_meta))


class _Meta(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> "_Meta":
        return cls(tensor.shape, tensor.dtype, tensor.device)

    def full(self, value: float) -> Tensor:
        return torch.full(self.shape, value, dtype=self.dtype, device=self.device)


class _CatchGradient(torch.autograd.Function):
    """Identity whose backward stores the gradient in a dict and ends the graph there."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, caught: dict[int, Tensor], index: int, tensor: Tensor) -> Tensor:
        ctx.caught, ctx.index = caught, index
        # Detached, not a view: a chunk may begin with an in-place op.
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        ctx.caught[ctx.index] = gradient
        return None, None, None, None
