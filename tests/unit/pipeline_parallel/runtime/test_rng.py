"""Dropout masks are functions of their key."""

import itertools

import torch
from torch import nn

from megatron.pipeline_parallel.runtime.rng import DropoutKeys, keyed_seed, seed_default_generator


def mask(*, seed=1, iteration=0, microbatch=0, split=0, layer=3, **ranks):
    """Which of 64 values a guarded layer keeps."""
    keys, dropout = DropoutKeys(seed, **ranks), nn.Dropout(0.5)
    keys.guard(dropout, layer)
    keys.enter(iteration, microbatch, split)
    return tuple((dropout(torch.ones(64)) != 0).tolist())


def test_a_mask_is_drawn_again_from_an_equal_key_whatever_ran_before():
    first = mask(iteration=2, microbatch=5, layer=7)
    torch.rand(100)
    assert mask(iteration=2, microbatch=5, layer=7) == first
    assert 10 < sum(first) < 54


def test_every_part_of_the_key_changes_the_mask():
    changes = [
        {}, {"seed": 2}, {"iteration": 1}, {"microbatch": 1}, {"split": 1}, {"layer": 4}, {"layer": "embedding"},
        {"tensor_parallel_rank": 1}, {"data_parallel_rank": 2, "data_parallel_size": 3},
    ]  # fmt: skip
    masks = [mask(**change) for change in changes]
    assert all(one != other for one, other in itertools.combinations(masks, 2))


def test_microbatches_are_counted_over_data_parallel_ranks():
    one_rank = [mask(microbatch=microbatch) for microbatch in range(6)]
    three_ranks = [
        mask(microbatch=microbatch, data_parallel_rank=rank, data_parallel_size=3)
        for microbatch in range(2)
        for rank in range(3)
    ]
    assert three_ranks == one_rank


def test_evaluation_leaves_the_generator_alone():
    keys, dropout = DropoutKeys(1), nn.Dropout(0.5).eval()
    keys.guard(dropout, 0)
    before = torch.get_rng_state()
    dropout(torch.ones(3))
    assert torch.equal(torch.get_rng_state(), before)


def test_keys_do_not_run_together():
    assert keyed_seed("a,b") != keyed_seed("a", "b")
    assert keyed_seed(1, 23) != keyed_seed(12, 3)
    assert (
        len({keyed_seed(iteration, microbatch) & 0xFFFFFFFF for iteration in range(100) for microbatch in range(100)})
        > 9990
    )


def test_seeding_reaches_the_generator_that_weights_are_drawn_from_also_beside_a_gpu(monkeypatch):
    """With CUDA present the model is still initialised on the CPU."""
    seeded = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "manual_seed", seeded.append)
    draws = []
    for _ in range(2):
        seed_default_generator("key")
        draws.append(torch.rand(4))
    assert torch.equal(*draws)
    assert seeded == [keyed_seed("key")] * 2
