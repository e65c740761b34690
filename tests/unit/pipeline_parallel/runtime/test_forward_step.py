"""Chunks from Megatron-style forward steps."""

from collections import namedtuple

import pytest
import torch
from torch import nn

from megatron.pipeline_parallel.runtime.forward_step import ForwardStepChunk


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = []

    def set_input_tensor(self, tensors):
        self.inputs.append(tensors[0])


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


def chunk(loss_function, *, is_last=True, model=None, num_microbatches=4):
    output = torch.tensor([2.0, 4.0], requires_grad=True)
    step = lambda iterator, model: (output * next(iterator), loss_function)  # noqa: E731
    iterator = iter(range(1, 100))
    return ForwardStepChunk(step, iterator, model or Model(), is_last=is_last, num_microbatches=num_microbatches)


def test_a_mean_loss_is_divided_by_the_microbatches():
    loss = chunk(lambda output: (output.mean(), {"lm loss": output.mean()}))(0, ())
    assert loss.value.item() == 3.0 / 4
    assert loss.report["lm loss"].item() == 3.0


@pytest.mark.parametrize("num_tokens", [3, torch.tensor(3)])
def test_a_summed_loss_is_divided_by_its_tokens_too(num_tokens):
    loss = chunk(lambda output: (output.sum(), num_tokens, {}))(0, ())
    assert loss.value.item() == 6.0 / 3 / 4


def test_no_tokens_are_no_division_by_zero():
    assert chunk(lambda output: (output.sum() * 0, torch.tensor(0.0), {}))(0, ()).value.item() == 0.0


def test_reports_are_detached_whatever_they_are_made_of():
    Pair = namedtuple("Pair", "a b")
    loss = chunk(lambda output: (output.sum(), {"x": [output, (output, 1)], "y": Pair(output, "text")}))(0, ())
    flat = [loss.report["x"][0], loss.report["x"][1][0], loss.report["y"].a]
    assert loss.value.requires_grad and not any(tensor.requires_grad for tensor in flat)
    assert loss.report["y"].b == "text"


def test_a_stage_before_the_last_returns_its_output():
    (output,) = chunk(None, is_last=False)(0, ())
    assert output.tolist() == [2.0, 4.0]


def test_inputs_reach_the_wrapped_model_and_are_let_go():
    model = Model()
    received = torch.ones(1)
    chunk(None, is_last=False, model=Wrapper(Wrapper(model)))(0, (received,))
    assert model.inputs == [received, None]


def test_a_model_without_set_input_tensor_is_refused():
    with pytest.raises(ValueError, match="Linear has no set_input_tensor"):
        chunk(None, model=nn.Linear(1, 1))


def test_microbatches_come_in_order_since_the_iterator_can_only_go_on():
    made = chunk(None, is_last=False, num_microbatches=2)
    for microbatch in (0, 1, 0):
        made(microbatch, ())
    with pytest.raises(ValueError, match="forward of microbatch 0, but the data iterator is at 1"):
        made(0, ())
