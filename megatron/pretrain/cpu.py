"""What stock megatron-core needs to run where there is no CUDA; on a CUDA machine nothing here does anything.

megatron-core 0.16 asks CUDA for a device in a few places even when every tensor lives on the CPU. Each replacement
below says what fails without it. Nothing is patched on import: `prepare_megatron_core` does it, once a process, before
the first model is built.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer import optimizer as optimizers
from megatron.core.tensor_parallel import random
from torch.overrides import TorchFunctionMode


def prepare_megatron_core() -> None:
    """Let megatron-core run on this machine's CPU; does nothing with CUDA, or when called again."""
    if torch.cuda.is_available() or random.CudaRNGStatesTracker is CpuRNGStatesTracker:
        return
    _replace_device_calls()
    _replace_random_states()
    _replace_cuda_literals()


def _replace_device_calls() -> None:
    # "Torch not compiled with CUDA enabled" from rotary embeddings, gradient buffers and checkpoints, which all
    # allocate on `device=torch.cuda.current_device()`.
    torch.cuda.current_device = lambda: torch.device("cpu")
    # The same error from core's Timers and from its checkpoint writer; work on a CPU is done when the call returns.
    torch.cuda.synchronize = lambda device=None: None


def _replace_random_states() -> None:
    # Parallel layers and recomputation fork a tracker that reads and writes CUDA's generator. The class is replaced,
    # not an instance, because core makes a new one whenever it is seeded with `force_reset_rng`.
    random.CudaRNGStatesTracker = CpuRNGStatesTracker
    random._get_cuda_rng_state = _get_rng_state
    random._set_cuda_rng_state = _set_rng_state


def _replace_cuda_literals() -> None:
    # "Torch not compiled with CUDA enabled" from the scale tensor with device="cuda" in both constructors, and in bf16
    # "Wrapped parameters must be one of torch.cuda.FloatTensor, …" for parameters of the type torch.BFloat16Tensor.
    for optimizer_class in (optimizers.FP32Optimizer, optimizers.Float16OptimizerWithFloat16Params):
        optimizer_class.__init__ = _as_on_cuda(optimizer_class.__init__)
    # A buffer with device="cuda" in all three, and an AssertionError in clipping unless a gradient's type is
    # 'torch.cuda.FloatTensor'. `optimizers` imported the functions by name, so they are replaced there.
    for name in ("get_grad_norm_fp32", "clip_grad_by_total_norm_fp32", "count_zeros_fp32"):
        setattr(optimizers, name, _as_on_cuda(getattr(clip_grads, name)))
    # `weight.data.cuda()` when tied embeddings are made equal over pipeline ranks.
    LanguageModule.setup_embeddings_and_output_layer = _as_on_cuda(LanguageModule.setup_embeddings_and_output_layer)


class _CudaMeansCpu(TorchFunctionMode):
    """Reads a literal "cuda" as the CPU, and shows CPU tensors' types as CUDA's, in the calls under `with`."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def _as_on_cuda(function: Callable) -> Callable:
    """`function`, run so that what it takes for a CUDA device is the CPU; what it computes is untouched."""

    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        with _CudaMeansCpu():
            return function(*args, **kwargs)

    return on_cpu


class CpuRNGStatesTracker(random.CudaRNGStatesTracker):
    """Core's named random states, kept for the CPU's default generator."""

    def add(self, name: str, seed: int) -> None:
        """Keep under `name` the state that `seed` gives; the generator in use does not move."""
        if seed in self.seeds_:
            raise ValueError(f"seed {seed} already exists")
        if name in self.states_:
            raise ValueError(f"rng state {name} already exists")
        self._is_initialized = True
        self.seeds_.add(seed)
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        """Draw from the state `name` under `with`, then go on with the state that was in use before."""
        if name not in self.states_:
            raise KeyError(f"rng state {name} is not added")
        outer_name, outer_state = self._current_state_name, torch.get_rng_state()
        if outer_name in self.states_:
            self.states_[outer_name] = outer_state
        torch.set_rng_state(self.states_[name])
        self._current_state_name = name
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            # Nested forks of one name go on where the inner one stopped, as core's tracker does.
            torch.set_rng_state(self.states_.get(outer_name, outer_state))
            self._current_state_name = outer_name


def _get_rng_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)
