"""The engine on real ranks over gloo, on plain modules, against plain autograd: equal bit for bit."""

import gc
import random
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from toy import NUM_SPLIT, Piped, Plain

from megatron.pipeline_parallel.planning.builders import Problem, build, names
from megatron.pipeline_parallel.planning.op import Op, OpKind, Placement
from megatron.pipeline_parallel.planning.passes.communication import forward_only

sys.path.append(str(Path(__file__).parents[1] / "unit" / "pipeline_parallel" / "planning"))
from random_schedules import random_placement, random_schedule  # noqa: E402


def every_schedule(p):
    """Iterations under each schedule and microbatch count, one after another on the same ranks."""
    placement = Placement.loop(p)
    plain, piped = Plain(p), Piped(placement)
    counts = []
    for iteration, (name, m) in enumerate(
        (name, m) for name in names() for m in sorted({1, p - 1, p, 2 * p + 1} - {0})
    ):
        for model in (*plain.stages, *piped.stages.values()):
            model.zero_grad()
        before = piped.store.num_computed
        step = piped.iteration(build(name, Problem(pp_size=p, num_microbatches=m)))
        reports = piped.run(step, iteration)
        piped.assert_equals(plain, reports, plain.run(iteration, m))
        assert step.num_live() == 0
        counts.append((m, piped.store.num_computed - before))
    return counts


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_losses_and_gradients_equal_the_plain_model_at_any_microbatch_count(p, tmp_path):
    """Reported elsewhere as hangs or wrong sums at m = 1, m = p - 1 and m = p."""
    for counts in run_ranks(every_schedule, p, tmp_path, p):
        assert len(counts) == len(names()) * len({1, p - 1, p, 2 * p + 1} - {0})
        # One weight-gradient computation a layer and microbatch.
        assert all(computed == NUM_SPLIT * m for m, computed in counts)


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
        kinds = {op.kind for op in schedule.ranks[dist.get_rank()]}
        assert OpKind.F in kinds


@pytest.mark.parametrize("p, seed", [(1, 0), (2, 1), (2, 2), (3, 3)])
def test_any_valid_order_on_any_placement_runs(p, seed, tmp_path):
    """Several chunks a rank, local hand-over wherever two stages share one, next and previous rank being one peer."""
    run_ranks(random_placements, p, tmp_path, p, seed)


def evaluate_between(p):
    placement = Placement.loop(p)
    plain, piped = Plain(p), Piped(placement)
    orders = {name: build(name, Problem(pp_size=p, num_microbatches=3)) for name in names()}
    losses = []
    for iteration, schedule in enumerate(orders.values()):
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
                losses.append([loss.item() for loss in evaluated])
    return losses


def test_evaluation_leaves_no_gradients_and_changes_no_training(tmp_path):
    results = run_ranks(evaluate_between, 2, tmp_path, 2)
    assert results[0] == [[]] * len(names())
    assert all(len(losses) == 3 and all(loss > 0 for loss in losses) for losses in results[1])


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
    piped = Piped(Placement.loop(p))
    step = piped.iteration(build(name, Problem(pp_size=p, num_microbatches=m)))
    saved = Saved([parameter for stage in piped.stages.values() for parameter in stage.parameters()])
    per_microbatch, alive = None, []
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        for op in step.ops:
            step.handlers[op.kind](op)
            if op.kind == OpKind.F and per_microbatch is None:
                per_microbatch = saved.num_alive()
            alive.append((str(op), saved.num_alive()))
    step._channels.finish()
    return per_microbatch, alive, saved.num_alive()


@pytest.mark.parametrize("name", names())
def test_activations_are_held_as_long_as_the_plan_says_and_freed_after_w(name, tmp_path):
    p, m = 2, 5
    for per_microbatch, alive, left in run_ranks(saved_storages, p, tmp_path, name, p, m):
        assert per_microbatch > 0 and left == 0
        units = {}
        for text, num_alive in alive:
            op = Op.parse(text)
            if op.kind == OpKind.F:
                units[op.unit] = per_microbatch
            elif op.kind == OpKind.B:
                # Only inputs of the linears that split stay for W.
                units[op.unit] = NUM_SPLIT
            elif op.kind in (OpKind.W, OpKind.BW):
                units[op.unit] = 0
            assert num_alive == sum(units.values()), (text, units)


def graph_of_a_failed_run():
    piped = Piped(Placement.loop(1))
    step = piped.iteration(build("zb-h1", Problem(pp_size=1, num_microbatches=2)))
    chunk = step._chunks[0]

    def fail_in_the_second(microbatch, inputs):
        if microbatch == 1:
            raise RuntimeError("broken microbatch")
        return chunk(microbatch, inputs)

    step._chunks[0] = fail_in_the_second
    with pytest.raises(RuntimeError, match="broken microbatch"):
        step.run(0)
    return step.num_live()


def test_a_failed_run_lets_go_of_what_it_held(tmp_path):
    assert run_ranks(graph_of_a_failed_run, 1, tmp_path) == [0]


def make_a_wrong_shape():
    piped = Piped(Placement.loop(2))
    step = piped.iteration(build("1f1b", Problem(pp_size=2, num_microbatches=1)))
    if dist.get_rank() == 0:
        step._chunks[0] = lambda microbatch, inputs: (torch.zeros(5, 8),)
        with pytest.raises(
            ValueError,
            match=r"stage 0 made \[\(\(5, 8\), torch.float32\)\] for stage 1 \(microbatch 0\), which expects",
        ):
            step.run(0)
    # The peer sees nothing of it: no half message, and no crash of its transport.
    dist.barrier()


def test_a_wrong_shape_is_an_error_of_the_rank_that_made_it(tmp_path):
    run_ranks(make_a_wrong_shape, 2, tmp_path)
