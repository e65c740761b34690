"""The B/W split on single layers, against plain autograd."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.pipeline_parallel.runtime.weight_grad import WeightGradStore, split_linears


def pair(*sizes, **options):
    """The same layers twice: plain, and split into a store."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(*(nn.Linear(a, b, **options) for a, b in zip(sizes, sizes[1:]))))
    store = WeightGradStore()
    assert split_linears(models[1], store) == len(sizes) - 1
    return *models, store


def assert_equal_gradients(plain, split):
    for (name, one), (_, other) in zip(plain.named_parameters(), split.named_parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name


def test_b_leaves_weight_gradients_to_w():
    plain, split, store = pair(4, 6, 3)
    inputs = [torch.randn(2, 5, 4).requires_grad_() for _ in range(3)]
    for key, sample in enumerate(inputs):
        plain(sample).square().sum().backward()
        expected, sample.grad = sample.grad, None
        output = split(sample).square().sum()
        with store.collect(key):
            output.backward()
        assert torch.equal(sample.grad, expected)
    assert store.num_waiting() == 6 and store.num_computed == 0
    assert all(layer.weight.grad is None and layer.bias.grad is not None for layer in split)
    for key in range(3):
        store.compute(key)
    assert_equal_gradients(plain, split)
    assert store.num_waiting() == 0 and store.num_computed == 6


def test_without_a_schedule_a_split_model_trains_as_ever():
    plain, split, store = pair(4, 6, 3)
    for model in (plain, split):
        model(torch.ones(2, 4)).sum().backward()
    assert_equal_gradients(plain, split)
    assert store.num_computed == 2


class TestSavedTensorHooks:
    """Recompute and offload give back other tensors than were saved; the gradient must still reach the parameter."""

    def run(self, call):
        plain, split, store = pair(4, 6, 3)
        sample = torch.randn(2, 4)
        plain(sample).square().sum().backward()
        with store.collect("key"):
            call(split, sample).square().sum().backward()
        store.compute("key")
        assert_equal_gradients(plain, split)
        assert store.num_computed == 2

    def test_detaching_hooks(self):
        def call(model, sample):
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor.detach()):
                return model(sample)

        self.run(call)

    def test_save_on_cpu(self):
        def call(model, sample):
            with torch.autograd.graph.save_on_cpu():
                return model(sample)

        self.run(call)

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_checkpoint(self, reentrant):
        self.run(lambda model, sample: checkpoint(model, sample.clone().requires_grad_(), use_reentrant=reentrant))


def test_one_weight_used_twice_counts_each_use():
    plain, split, store = pair(4, 4)
    sample = torch.randn(3, 4)
    plain(plain(sample)).sum().backward()
    with store.collect("key"):
        split(split(sample)).sum().backward()
    store.compute("key")
    assert_equal_gradients(plain, split)
    assert store.num_computed == 2


def test_main_grad_is_accumulated_into_where_there_is_one():
    plain, split, store = pair(4, 3, bias=False)
    split[0].weight.main_grad = torch.ones(3, 4)
    for model in (plain, split):
        model(torch.ones(2, 4)).sum().backward()
    assert split[0].weight.grad is None
    assert torch.equal(split[0].weight.main_grad, 1 + plain[0].weight.grad)


def test_frozen_weights_have_no_gradient_and_pass_theirs_on():
    plain, split, store = pair(4, 6, 3)
    for model in (plain, split):
        model[1].requires_grad_(False)
        model(torch.ones(2, 4)).sum().backward()
    assert torch.equal(split[0].weight.grad, plain[0].weight.grad)
    assert split[1].weight.grad is None and store.num_computed == 1


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
def test_a_computed_weight_gets_its_gradient_through_the_graph():
    plain, split, store = pair(4, 3)
    for model in (plain, split):
        nn.utils.weight_norm(model[0])
        model(torch.ones(2, 4)).square().sum().backward()
    assert_equal_gradients(plain, split)
    assert store.num_computed == 0


def test_a_single_vector():
    plain, split, _ = pair(4, 3)
    for model in (plain, split):
        model(torch.ones(4)).square().sum().backward()
    assert_equal_gradients(plain, split)


def test_autocast():
    plain, split, store = pair(4, 6, 3)
    for model in (plain, split):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(torch.ones(2, 4)).float().square().sum()
        output.backward()
    for (name, one), (_, other) in zip(plain.named_parameters(), split.named_parameters()):
        assert other.grad.dtype == torch.float32
        torch.testing.assert_close(other.grad, one.grad, rtol=2e-2, atol=2e-2, msg=name)


def test_a_weight_changed_between_forward_and_backward_is_noticed():
    _, split, _ = pair(4, 3)
    output = split(torch.ones(2, 4)).sum()
    with torch.no_grad():
        split[0].weight.add_(1)
    with pytest.raises(RuntimeError, match="changed in place between its forward and its backward"):
        output.backward()


def test_a_layer_is_split_once():
    _, split, _ = pair(4, 3)
    with pytest.raises(ValueError, match="split already"):
        split_linears(split, WeightGradStore())


def test_subclasses_keep_their_own_forward():
    class Doubled(nn.Linear):
        def forward(self, sample):
            return 2 * super().forward(sample)

    assert split_linears(nn.Sequential(Doubled(4, 3)), WeightGradStore()) == 0


def test_keys_are_used_once():
    store = WeightGradStore()
    with store.collect("key"):
        pass
    with pytest.raises(ValueError, match="waiting already"), store.collect("key"):
        pass
    # An empty W is legal: a stage may have nothing to split.
    store.compute("key")
    with pytest.raises(KeyError):
        store.compute("key")
