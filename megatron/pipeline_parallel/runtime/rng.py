"""Dropout that does not depend on the schedule.

Before a layer runs, the default generator is seeded from (seed, iteration, microbatch, sequence split, layer), microbatches being
counted over all data parallel ranks in the order of their samples. Masks are then the same for any schedule, number of pipeline
or data parallel ranks and placement, and a recomputed or resumed forward draws them again.
"""

import hashlib
from typing import Any

import torch
from torch import nn


def keyed_seed(*key: int | str) -> int:
    """A seed of 63 well-mixed bits for a key: the CPU's generator uses only the low 32 of them."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1


def seed_default_generator(*key: int | str) -> None:
    """Seed the CPU's default generator, which initial weights are drawn from, and the current CUDA device's where there is one."""
    seed = keyed_seed(*key)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)


class DropoutKeys:
    """Seeds the dropout of guarded layers; the runtime says where it is with `enter` before each forward and backward."""

    def __init__(
        self, seed: int, *, data_parallel_rank: int = 0, data_parallel_size: int = 1, tensor_parallel_rank: int = 0
    ) -> None:
        self.seed = seed
        self._tensor_parallel_rank = tensor_parallel_rank
        self._data_parallel = (data_parallel_rank, data_parallel_size)
        self._where = (0, 0, 0)

    def enter(self, iteration: int, microbatch: int, sequence_split: int = 0) -> None:
        """Say which microbatch of this rank runs next; in its backward, layers may be recomputed."""
        rank, size = self._data_parallel
        self._where = (iteration, microbatch * size + rank, sequence_split)

    def guard(self, module: nn.Module, layer: int | str) -> None:
        """Key `module`'s dropout by `layer`, its global number or name in the whole model."""

        def seed(module: nn.Module, *_: Any) -> None:
            if module.training:
                seed_default_generator(self.seed, *self._where, layer, self._tensor_parallel_rank)

        module.register_forward_pre_hook(seed, with_kwargs=True)
