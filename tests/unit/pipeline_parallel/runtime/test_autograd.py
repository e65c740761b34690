"""One microbatch's graph through one chunk."""

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.pipeline_parallel.runtime.autograd import ChunkGraph


def test_gradients_of_inputs_equal_autograds():
    weight = torch.randn(4, 4, requires_grad=True)
    sample, gradient = torch.randn(3, 4), torch.randn(3, 4)
    leaf = sample.clone().requires_grad_()
    (leaf @ weight).tanh().backward(gradient)
    expected, weight.grad = weight.grad, None
    graph = ChunkGraph()
    (entered,) = graph.enter([sample])
    (output,) = graph.leave([(entered @ weight).tanh()])
    assert not output.requires_grad
    (input_gradient,) = graph.backward([gradient])
    assert torch.equal(input_gradient, leaf.grad) and torch.equal(weight.grad, expected)


def test_neither_input_nor_output_lives_as_long_as_the_graph():
    graph, layer = ChunkGraph(), nn.Dropout(0.0)
    sample = torch.randn(8, 8)
    (entered,) = graph.enter([sample])
    (output,) = graph.leave([layer(entered) + 1])
    inside, outside = StorageWeakRef(sample.untyped_storage()), StorageWeakRef(output.untyped_storage())
    del sample, entered, output
    assert inside.expired() and outside.expired()
    (gradient,) = graph.backward([torch.ones(8, 8)])
    assert torch.equal(gradient, torch.ones(8, 8))


def test_losses_start_from_one_in_their_own_type():
    graph = ChunkGraph()
    (entered,) = graph.enter([torch.ones(3, dtype=torch.bfloat16)])
    graph.leave([(entered * 2).sum()])
    (gradient,) = graph.backward(None)
    assert gradient.dtype == torch.bfloat16 and gradient.tolist() == [2.0] * 3


@pytest.mark.parametrize(
    "compute, expected",
    [
        (lambda x: x.t(), [[1.0, 3.0], [2.0, 4.0]]),
        (lambda x: x[:, :1], [[1.0, 0.0], [2.0, 0.0]]),
        (lambda x: x.view(4)[::2], [[1.0, 0.0], [2.0, 0.0]]),
        (lambda x: x.add_(1), [[1.0, 2.0], [3.0, 4.0]]),
    ],
)
def test_views_transposes_and_an_in_place_first_op(compute, expected):
    graph = ChunkGraph()
    (entered,) = graph.enter([torch.ones(2, 2)])
    (output,) = graph.leave([compute(entered)])
    gradient = torch.tensor([1.0, 2.0, 3.0, 4.0])[: output.numel()].reshape(output.shape)
    assert graph.backward([gradient])[0].tolist() == expected


def test_what_needs_no_gradient_gets_zeros():
    graph = ChunkGraph()
    used, unused, index = graph.enter([torch.ones(2), torch.ones(3), torch.tensor([1])])
    assert not index.requires_grad
    graph.leave([used * 2, torch.ones(1)])
    gradients = graph.backward([torch.ones(2), torch.ones(1)])
    assert [gradient.tolist() for gradient in gradients] == [[2.0, 2.0], [0.0, 0.0, 0.0], [0]]


def test_a_frozen_chunk_has_an_empty_backward():
    graph = ChunkGraph()
    graph.leave([torch.ones(2)])
    assert graph.backward([torch.ones(2)]) == ()


def test_a_wrong_number_of_gradients_is_refused():
    graph = ChunkGraph()
    graph.leave([torch.ones(2)])
    with pytest.raises(ValueError, match="1 outputs, but 2 gradients"):
        graph.backward([torch.ones(2), torch.ones(2)])
