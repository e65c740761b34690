"""megatron-core on a machine without CUDA: random states, device literals, tied embeddings."""

from __future__ import annotations

import pytest
import torch
from forked_ranks import run_ranks
from tiny_run import TinyRun, tiny_config


def test_fork_draws_from_its_own_state_and_leaves_the_generator_alone(tmp_path):
    assert run_ranks(_tracker, 1, tmp_path) == [None]


def _tracker() -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(7)
    torch.manual_seed(0)
    plain = [torch.rand(1).item() for _ in range(3)]

    torch.manual_seed(0)
    tracker, forked = get_cuda_rng_tracker(), []
    around = [torch.rand(1).item()]
    with tracker.fork():
        forked.append(torch.rand(1).item())
        with tracker.fork("data-parallel-rng"):
            torch.rand(5)
        forked.append(torch.rand(1).item())
    around.append(torch.rand(1).item())
    with pytest.raises(RuntimeError, match="inside"), tracker.fork():
        forked.append(torch.rand(1).item())
        raise RuntimeError("inside")
    around.append(torch.rand(1).item())

    expected = torch.Generator().manual_seed(7 + 2718)
    assert forked == [torch.rand(1, generator=expected).item() for _ in range(3)]
    assert around == plain
    with pytest.raises(KeyError):
        tracker.fork("unknown").__enter__()


def test_recomputation_repeats_dropout(tmp_path):
    assert run_ranks(_recompute, 1, tmp_path) == [None]


def _recompute() -> None:
    from megatron.core.tensor_parallel.random import checkpoint, get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(7)

    def layer(value: torch.Tensor) -> torch.Tensor:
        with get_cuda_rng_tracker().fork():
            return torch.nn.functional.dropout(value, 0.5) * value

    value = torch.ones(64, requires_grad=True)
    output = checkpoint(layer, False, value)
    with get_cuda_rng_tracker().fork():
        torch.rand(9)  # moves the state between forward and recomputation
    output.sum().backward()
    assert torch.equal(value.grad, 2 * output.detach())


def test_preparing_twice_changes_nothing(tmp_path):
    assert run_ranks(_prepare_again, 1, tmp_path) == [None]


def _prepare_again() -> None:
    from megatron.core.optimizer import optimizer as optimizers

    from megatron.pretrain.cpu import prepare_megatron_core

    before = optimizers.FP32Optimizer.__init__, optimizers.get_grad_norm_fp32, torch.cuda.current_device
    prepare_megatron_core()
    assert before == (optimizers.FP32Optimizer.__init__, optimizers.get_grad_norm_fp32, torch.cuda.current_device)
    # What core takes for CUDA is the CPU only inside core's own functions.
    assert torch.zeros(1).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_nothing_is_replaced_where_there_is_cuda(monkeypatch):
    from megatron.core.tensor_parallel import random

    from megatron.pretrain import cpu

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = random.CudaRNGStatesTracker, torch.cuda.current_device
    cpu.prepare_megatron_core()
    assert before == (random.CudaRNGStatesTracker, torch.cuda.current_device)


def test_tied_embeddings_start_equal_and_stay_bit_equal_over_pipeline_ranks(tmp_path):
    first, last = run_ranks(_tied, 2, tmp_path)
    for before, after in zip(first, last, strict=True):
        assert torch.equal(before, after)
    assert not torch.equal(first[0], first[-1])


def _tied() -> list[torch.Tensor]:
    run = TinyRun(tiny_config())
    weight = run.model.shared_embedding_or_output_weight()
    copies = [weight.detach().clone()]
    for iteration in range(5):
        run.step(iteration)
        copies.append(weight.detach().clone())
    return copies
