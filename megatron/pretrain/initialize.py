"""Process groups: torch.distributed and megatron-core's, for one run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megatron.pipeline_parallel.planning.op import Placement
from megatron.pretrain.config import Config
from megatron.pretrain.cpu import prepare_megatron_core
from megatron.pretrain.embedding import embedding_ranks


def this_device() -> torch.device:
    """The CUDA device of this process, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


@contextmanager
def process_groups(config: Config, placement: Placement) -> Iterator[None]:
    """Initialise torch.distributed and megatron-core's groups, seed core's random states, and undo it all on leaving."""
    device = this_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    prepare_megatron_core()
    _start_distributed(device, timedelta(minutes=config.training.distributed_timeout_minutes))
    try:
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=config.pipeline.pipeline_model_parallel_size,
            get_embedding_ranks=embedding_ranks(placement),
            create_gloo_process_groups=False,
            distributed_timeout_minutes=config.training.distributed_timeout_minutes,
        )
        # Core's parallel layers expect named random states; dropout itself is keyed by the engine.
        model_parallel_cuda_manual_seed(config.training.seed)
        yield
    finally:
        parallel_state.destroy_model_parallel()
    # Not in `finally`: after a failure the peers may never come, and the process must still be able to end.
    dist.destroy_process_group()


def _start_distributed(device: torch.device, timeout: timedelta) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        # One process, started by hand: no rendezvous needed.
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
