"""The B/W split for megatron-core's Column/RowParallelLinear: all that touches their insides is here.

The split is installed on instances, since GPTModel makes its output layer itself, whatever the layer spec says.
Tensor-parallel communication is expressed by core's own autograd mappings around a plain split linear, so that a deferred
W keeps its gathered input and never core's shared gather buffer.
"""

from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn

from megatron.pipeline_parallel.runtime.weight_grad import SplitLinear, WeightGradStore, can_split


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product as core computes it: bias added afterwards, not fused, for equal rounding."""
    output = torch.matmul(input, weight.t())
    return output if bias is None else output + bias


def _split_forward_impl(
    core_forward_impl: Any,
    store: WeightGradStore,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Any,
    **others: Any,
) -> Tensor:
    if not can_split(weight):
        return core_forward_impl(
            input=input,
            weight=weight,
            bias=bias,
            gradient_accumulation_fusion=gradient_accumulation_fusion,
            allreduce_dgrad=allreduce_dgrad,
            sequence_parallel=sequence_parallel,
            tp_group=tp_group,
            **others,
        )
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
    elif allreduce_dgrad:
        input = copy_to_tensor_model_parallel_region(input, group=tp_group)
    return SplitLinear.apply(input, weight, bias, store, _linear)


def split_parallel_linears(module: nn.Module, store: WeightGradStore) -> int:
    """Make every Column/RowParallelLinear in `module` defer its weight gradient to `store`; returns how many there are.

    Raises ValueError where a layer is split already.
    """
    linears = [layer for layer in module.modules() if isinstance(layer, (ColumnParallelLinear, RowParallelLinear))]
    for layer in linears:
        if "_forward_impl" in vars(layer):
            raise ValueError(f"{layer} has a _forward_impl of its own: it is split already")
        layer._forward_impl = partial(_split_forward_impl, layer._forward_impl, store)
    return len(linears)
