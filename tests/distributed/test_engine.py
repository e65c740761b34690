"""The engine on real ranks over gloo, on plain modules, against plain autograd: equal bit for bit."""

import gc
import random
import weakref

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from random_schedules import random_placement, random_schedule
from toy import NUM_SPLIT, Piped, Plain

from megatron.pipeline_parallel.planning.builders import Problem, build, names
from megatron.pipeline_parallel.planning.op import Op, OpKind, Placement
from megatron.pipeline_parallel.planning.passes.communication import forward_only
from megatron.pipeline_parallel.runtime.iteration import Loss

NUM_V = 5
"""Schedules on the V placement."""


def whole_sequences(name, p, m):
    """A schedule at its default number of chunks; the engine does not split sequences yet."""
    return build(name, Problem(pp_size=p, num_microbatches=m, num_sequence_splits=1, effort=0))


def microbatch_counts(p):
    return sorted({1, p - 1, p, 2 * p + 1} - {0})


def every_schedule(p):
    """Iterations under each schedule and microbatch count, one after another on the same ranks."""
    counts, models = [], {}
    for iteration, (name, m) in enumerate((name, m) for name in names() for m in microbatch_counts(p)):
        schedule = whole_sequences(name, p, m)
        placement = schedule.placement
        if placement.stages not in models:
            models[placement.stages] = Plain(placement.num_stages), Piped(placement)
        plain, piped = models[placement.stages]
        for model in (*plain.stages, *piped.stages.values()):
            model.zero_grad()
        before = piped.store.num_computed
        step = piped.iteration(schedule)
        reports = piped.run(step, iteration)
        piped.assert_equals(plain, reports, plain.run(iteration, m))
        assert step.num_live() == 0
        counts.append((m * placement.chunks_per_rank, piped.store.num_computed - before))
    return counts


@pytest.mark.parametrize("p", [1, 2, 3, 4, *(pytest.param(p, marks=pytest.mark.full) for p in (5, 6, 8))])
def test_losses_and_gradients_equal_the_plain_model_at_any_microbatch_count(p, tmp_path):
    """Reported elsewhere as hangs or wrong sums at m = 1, m = p - 1 and m = p."""
    for counts in run_ranks(every_schedule, p, tmp_path, p):
        assert len(counts) == len(names()) * len(microbatch_counts(p))
        # One weight-gradient computation a layer and microbatch.
        assert all(computed == NUM_SPLIT * chunks for chunks, computed in counts)


def random_placements(p, seed):
    rng = random.Random(seed)
    for iteration in range(8):
        placement = random_placement(rng, max_ranks=p)
        while placement.pp_size != p:
            placement = random_placement(rng, max_ranks=p)
        schedule = random_schedule(rng, placement, rng.randint(1, 4))
        plain, piped = Plain(placement.num_stages), Piped(placement)
        reports = piped.run(piped.iteration(schedule), iteration)
        piped.assert_equals(plain, reports, plain.run(iteration, schedule.num_microbatches))


MANY_SEEDS = [pytest.param(p, seed, marks=pytest.mark.full) for p in (1, 2, 3, 4) for seed in range(10, 20)]


@pytest.mark.parametrize("p, seed", [(1, 0), (2, 1), (2, 2), (3, 3), *MANY_SEEDS])
def test_any_valid_order_on_any_placement_runs(p, seed, tmp_path):
    """Several chunks a rank, local hand-over wherever two stages share one, next and previous rank being one peer."""
    run_ranks(random_placements, p, tmp_path, p, seed)


def evaluate_between(p):
    losses = []
    for iteration, name in enumerate(names()):
        schedule = whole_sequences(name, p, 3)
        plain, piped = Plain(schedule.placement.num_stages), Piped(schedule.placement)
        for training in (False, True):
            for stage in (*plain.stages, *piped.stages.values()):
                stage.train(training)
            if training:
                reports = piped.run(piped.iteration(schedule), iteration)
                piped.assert_equals(plain, reports, plain.run(iteration, 3))
            else:
                before = {key: None if grad is None else grad.clone() for key, grad in piped.gradients().items()}
                step = piped.iteration(forward_only(schedule))
                evaluated = piped.run(step, iteration)
                assert step.num_live() == 0
                for key, grad in piped.gradients().items():
                    assert (grad is None and before[key] is None) or torch.equal(grad, before[key])
                with torch.no_grad():
                    expected = plain.forward_losses(iteration, 3)
                assert [loss.item() for loss in evaluated] in ([], [loss.item() for loss in expected])
                assert not any(loss.requires_grad for loss in evaluated)
                losses.append([loss.item() for loss in evaluated])
    return losses


def test_evaluation_leaves_no_gradients_and_changes_no_training(tmp_path):
    first, last = run_ranks(evaluate_between, 2, tmp_path, 2)
    # The loss is made on the rank of the last stage: rank 0 where the stages come back in a V.
    assert sorted(map(len, first)) == [0] * (len(names()) - NUM_V) + [3] * NUM_V
    assert [len(losses) for losses in last] == [3 - len(losses) for losses in first]


def accumulate(p):
    plain, piped = Plain(p), Piped(Placement.loop(p))
    for iteration in range(2):
        reports = piped.run(piped.iteration(build("zb-h1", Problem(pp_size=p, num_microbatches=4))), iteration)
        piped.assert_equals(plain, reports, plain.run(iteration, 4))


def test_gradients_add_up_over_iterations_until_zeroed(tmp_path):
    run_ranks(accumulate, 2, tmp_path, 2)


def stay_flat(name, p):
    piped = Piped(Placement.loop(p))
    step = piped.iteration(build(name, Problem(pp_size=p, num_microbatches=2 * p + 1)))
    kept, sizes = [], []
    for iteration in range(20):
        piped.zero()
        kept += piped.run(step, iteration)
        gc.collect()
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in gc.get_objects()
            if isinstance(t, torch.Tensor)
        }
        kept_bytes = sum(loss.untyped_storage().nbytes() for loss in kept)
        sizes.append(sum(storages.values()) - kept_bytes)
        assert step.num_live() == 0
        assert not any(loss.requires_grad for loss in kept)
    return sizes


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_live_bytes_are_flat_while_returned_losses_are_kept(name, tmp_path):
    for sizes in run_ranks(stay_flat, 2, tmp_path, name, 2):
        # The first iteration makes gradients and channels; from then on nothing may grow.
        assert len(set(sizes[1:])) == 1, sizes


class Saved:
    """Counts the bytes that autograd holds for the backward, storage by storage, parameters aside."""

    def __init__(self, parameters):
        self.pointers = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self.held = []

    def pack(self, tensor):
        if tensor.untyped_storage().data_ptr() not in self.pointers:
            self.held.append(torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage()))
        return tensor

    def num_alive(self):
        return sum(not reference.expired() for reference in self.held)


def saved_storages(name, p, m):
    """Microbatches whose activations are alive after each compute op, as the ops of the schedule say and as counted."""
    schedule = whole_sequences(name, p, m)
    piped = Piped(schedule.placement)
    step = piped.iteration(schedule)
    saved = Saved([parameter for stage in piped.stages.values() for parameter in stage.parameters()])
    per_stage, alive = {}, []
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        for op in step.ops:
            before = saved.num_alive()
            step.handlers[op.kind](step, op)
            if op.kind == OpKind.F:
                # The last stage saves its loss, too.
                per_stage.setdefault(op.stage, saved.num_alive() - before)
            alive.append((str(op), saved.num_alive()))
    step._channels.finish()
    return per_stage, alive, saved.num_alive()


@pytest.mark.parametrize("name", names())
def test_activations_are_held_as_long_as_the_plan_says_and_freed_after_w(name, tmp_path):
    p, m = 2, 5
    for per_stage, alive, left in run_ranks(saved_storages, p, tmp_path, name, p, m):
        assert min(per_stage.values()) > NUM_SPLIT and left == 0
        units = {}
        for text, num_alive in alive:
            op = Op.parse(text)
            if op.kind == OpKind.F:
                units[op.unit] = per_stage[op.stage]
            elif op.kind == OpKind.B:
                # Only inputs of the linears that split stay for W.
                units[op.unit] = NUM_SPLIT
            elif op.kind in (OpKind.W, OpKind.BW):
                units[op.unit] = 0
            assert num_alive == sum(units.values()), (text, units)


def fail_in(kind):
    """GPipe holds a graph when its second forward fails, and the second one's when the first backward does."""
    piped = Piped(Placement.loop(1))
    step = piped.iteration(build("gpipe" if kind == "forward" else "zb-h1", Problem(pp_size=1, num_microbatches=2)))
    chunk = step._chunks[0]

    def broken(microbatch, inputs):
        if kind == "forward" and microbatch == 1:
            assert step.num_live() == 1
            raise RuntimeError("broken microbatch")
        loss = chunk(microbatch, inputs)
        if kind == "backward":
            loss.value.register_hook(lambda gradient: {}["broken microbatch"])
        return loss

    step._chunks[0] = broken
    with pytest.raises((RuntimeError, KeyError), match="broken microbatch"):
        step.run(0)
    return step.num_live()


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_failed_run_lets_go_of_what_it_held(kind, tmp_path):
    assert run_ranks(fail_in, 1, tmp_path, kind) == [0]


WRONG_RETURNS = [
    (1, lambda chunk, mb, inputs: (chunk(mb, inputs).value,), TypeError, "must return a Loss, got tuple"),
    (1, lambda chunk, mb, inputs: Loss(value=torch.ones(3)), ValueError, r"must be a scalar, got shape \(3,\)"),
    (
        2,
        lambda chunk, mb, inputs: chunk(mb, inputs)[0],
        TypeError,
        "stage 0 must return a tuple of tensors, got Tensor",
    ),
    (2, lambda chunk, mb, inputs: Loss(value=torch.ones(())), TypeError, "must return a tuple of tensors, got Loss"),
]


def return_something_else(index):
    chunks_per_rank, call, error, message = WRONG_RETURNS[index]
    placement = Placement.loop(1, chunks_per_rank)
    piped = Piped(placement)
    step = piped.iteration(random_schedule(random.Random(0), placement, 1))
    first = step._chunks[0]
    step._chunks[0] = lambda microbatch, inputs: call(first, microbatch, inputs)
    with pytest.raises(error, match=message):
        step.run(0)


@pytest.mark.parametrize("index", range(len(WRONG_RETURNS)))
def test_what_a_chunk_returns_is_checked(index, tmp_path):
    run_ranks(return_something_else, 1, tmp_path, index)


def recompute_a_guarded_layer(use_reentrant):
    """The layer runs again in B, after other microbatches' forwards, and must draw its own masks."""
    plain, piped = Plain(1), Piped(Placement.loop(1))
    stage = piped.stages[0]
    keys, inner, calls = piped.keys, stage.dropout, []
    keys.guard(inner, "inner")
    plain.keys.guard(plain.stages[0].dropout, "inner")

    def forward(hidden):
        def block(hidden):
            calls.append(1)
            return inner(torch.nn.functional.gelu(stage.up(stage.norm(hidden))))

        again = torch.utils.checkpoint.checkpoint(block, hidden.requires_grad_(), use_reentrant=use_reentrant)
        return hidden + stage.fixed(stage.down(again))

    stage.forward = forward
    for name in ("gpipe", "zb-h1"):
        calls.clear()
        step = piped.iteration(build(name, Problem(pp_size=1, num_microbatches=3)))
        reports = piped.run(step, 0)
        piped.assert_equals(plain, reports, plain.run(0, 3))
        # One forward and one recompute a microbatch.
        assert len(calls) == 6


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputed_layer_draws_its_masks_again(use_reentrant, tmp_path):
    run_ranks(recompute_a_guarded_layer, 1, tmp_path, use_reentrant)


def drop_an_iteration():
    piped = Piped(Placement.loop(1))
    gc.disable()
    step = piped.iteration(build("zb-h1", Problem(pp_size=1, num_microbatches=2)))
    piped.run(step, 0)
    reference = weakref.ref(step)
    del step
    return reference() is None


def test_a_dropped_iteration_is_gone_at_once_with_its_data_iterators(tmp_path):
    assert run_ranks(drop_an_iteration, 1, tmp_path) == [True]


def make_a_wrong_shape():
    piped = Piped(Placement.loop(2))
    step = piped.iteration(build("1f1b", Problem(pp_size=2, num_microbatches=1)))
    if dist.get_rank() == 0:
        chunk, step._chunks[0] = step._chunks[0], lambda microbatch, inputs: (torch.zeros(5, 8),)
        with pytest.raises(
            ValueError,
            match=r"stage 0 made \[\(\(5, 8\), torch.float32\)\] for stage 1 \(microbatch 0\), which expects",
        ):
            step.run(0)
        step._chunks[0] = chunk
        # Messages of the failed run may be under way, and the next one must not take them for its own.
        with pytest.raises(RuntimeError, match="an iteration failed before"):
            step.run(1)
    # The peer sees nothing of it: no half message, and no crash of its transport.
    dist.barrier()


def test_a_wrong_shape_is_an_error_of_the_rank_that_made_it_and_ends_its_channels(tmp_path):
    run_ranks(make_a_wrong_shape, 2, tmp_path)
