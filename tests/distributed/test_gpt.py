"""A GPT of megatron-core's on pipeline ranks equals the same GPT on one rank: losses, gradients, weights."""

import pytest
import torch
from forked_ranks import run_ranks
from gpt_runs import train

SCHEDULES = ("gpipe", "1f1b", "zb-h1")
MICRO_BATCH = 2
LINEARS_A_LAYER = 4


def run(world_size, tmp_path, *changes, p=None):
    p = p or world_size
    changes = [{"pipeline_model_parallel_size": p, **change} for change in changes]
    return run_ranks(train, world_size, tmp_path, changes, initialised=False, timeout_s=240)


def merged(results, run_index, key):
    """What all ranks hold, by name: of tensors that several hold, the first one's."""
    pieces = [rank[run_index][key] for rank in results]
    if key == "gradients":
        return [{name: t for piece in reversed(pieces) for name, t in piece[i].items()} for i in range(len(pieces[0]))]
    return {name: tensor for piece in reversed(pieces) for name, tensor in piece.items()}


def losses(results, run_index):
    """(loss, gradient norm) of each iteration, from the rank that has the last stage."""
    return results[-1][run_index]["losses"]


def assert_bit_equal(results, expected, run_index):
    assert [loss for loss, _ in losses(results, run_index)] == [loss for loss, _ in losses(expected, run_index)]
    for ours, plain in zip(
        merged(results, run_index, "gradients"), merged(expected, run_index, "gradients"), strict=True
    ):
        assert ours.keys() == plain.keys()
        assert [name for name in ours if not torch.equal(ours[name], plain[name])] == []
    ours, plain = (merged(part, run_index, "weights") for part in (results, expected))
    assert [name for name in ours if not torch.equal(ours[name], plain[name])] == []


def assert_close(results, expected, run_index, **tolerance):
    ours, plain = (torch.tensor(losses(part, run_index)) for part in (results, expected))
    torch.testing.assert_close(ours, plain, **tolerance)
    ours, plain = (merged(part, run_index, "weights") for part in (results, expected))
    # Under tying, one rank has no weight of the output layer's own.
    assert ours.keys() - {"output_layer.weight"} == plain.keys() - {"output_layer.weight"}
    for name in plain:
        torch.testing.assert_close(ours[name], plain[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance)


@pytest.mark.parametrize("p", [2, 4])
def test_every_schedule_equals_one_rank_bit_for_bit(p, tmp_path):
    """Dropout on, three steps of AdamW, untied and unclipped: no sum is taken in another order."""
    counts = sorted({1, p - 1, p, 2 * p + 1})
    runs = [{"pipeline_schedule": name, "global_batch_size": MICRO_BATCH * m} for m in counts for name in SCHEDULES]
    plain = run(1, tmp_path, *runs)
    piped = run(p, tmp_path, *runs)
    for index, change in enumerate(runs):
        assert_bit_equal(piped, plain, index)
        m = change["global_batch_size"] // MICRO_BATCH
        for rank, results in enumerate(piped):
            # One computation a linear, microbatch and iteration, the output layer included.
            linears = 4 // p * LINEARS_A_LAYER + (rank == p - 1)
            assert results[index]["computed"] == 3 * m * linears
            assert results[index]["waiting"] == 0


def test_losses_fall_and_differ_by_seed(tmp_path):
    """That the equalities above compare something that lives."""
    first, other = run(1, tmp_path, {"train_iters": 8}, {"train_iters": 8, "seed": 7})[0]
    series = [loss for loss, _ in first["losses"]]
    assert series[-1] < series[0] - 0.1
    assert series != [loss for loss, _ in other["losses"]]


LLAMA = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "group_query_attention": True,
    "num_query_groups": 1, "disable_bias_linear": True, "global_batch_size": 6,
}  # fmt: skip


def test_a_llama_shaped_model_equals_one_rank_bit_for_bit(tmp_path):
    runs = [{**LLAMA, "pipeline_schedule": name} for name in ("1f1b", "zb-h1")]
    piped, plain = run(2, tmp_path, *runs), run(1, tmp_path, *runs)
    for index in range(len(runs)):
        assert_bit_equal(piped, plain, index)


@pytest.mark.parametrize("clip", [0.1, 1.0])
def test_tied_embeddings_and_clipping_equal_one_rank(clip, tmp_path):
    """Close, not equal: the embedding's gradient has two sources, added on one rank by autograd and on two by an all-reduce,
    and the norm is summed rank by rank."""
    change = {"untie_embeddings_and_output_weights": None, "clip_grad": clip, "global_batch_size": 6, "train_iters": 5}
    change["pipeline_schedule"] = "zb-h1"
    plain = run(1, tmp_path, change)
    for p in (2, 4):
        piped = run(p, tmp_path, change)
        assert_close(piped, plain, 0, rtol=2e-4, atol=2e-5)
        first, last = piped[0][0]["weights"], piped[-1][0]["weights"]
        # The two copies stay one weight, bit for bit.
        assert torch.equal(first["embedding.word_embeddings.weight"], last["output_layer.weight"])
        # Both cases happen: a clip that always triggers, and one that sometimes does.
        assert any(norm > clip for _, norm in losses(piped, 0))


def test_bf16_equals_one_rank_too(tmp_path):
    change = {"bf16": True, "pipeline_schedule": "zb-h1", "global_batch_size": 8}
    piped, plain = run(2, tmp_path, change), run(1, tmp_path, change)
    assert_bit_equal(piped, plain, 0)
    assert next(iter(piped[0][0]["weights"].values())).dtype == torch.bfloat16


def test_data_parallel_copies_equal_one_rank(tmp_path):
    """Close, not equal: each copy sums its own microbatches before the copies are summed. Dropout masks go with the samples."""
    change = {"pipeline_schedule": "zb-h1", "global_batch_size": 8}
    plain = run(1, tmp_path, change)
    copies = run(4, tmp_path, change, p=2)
    for rank in (0, 1):
        here, there = copies[2 * rank], copies[2 * rank + 1]
        for name, weight in here[0]["weights"].items():
            assert torch.equal(weight, there[0]["weights"][name])
    ours, expected = merged(copies, 0, "weights"), merged(plain, 0, "weights")
    for name in expected:
        torch.testing.assert_close(ours[name], expected[name], rtol=2e-3, atol=2e-4)
