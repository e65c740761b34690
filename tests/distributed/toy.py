"""A small model in stages of plain modules, run by the engine on forked ranks and by plain autograd."""

import torch
import torch.distributed as dist
from torch import nn

from megatron.pipeline_parallel.planning.costs import CostModel
from megatron.pipeline_parallel.planning.passes.communication import add_communication
from megatron.pipeline_parallel.planning.validate import validate
from megatron.pipeline_parallel.runtime.channels import DistributedChannels, TensorSpec, Transport
from megatron.pipeline_parallel.runtime.iteration import Loss, TrainingIteration
from megatron.pipeline_parallel.runtime.rng import DropoutKeys
from megatron.pipeline_parallel.runtime.weight_grad import WeightGradStore, split_linears

BATCH, WIDTH, SEED = 3, 8, 11


class Stage(nn.Module):
    """Two linears, one without a bias, a norm, dropout, and a frozen linear."""

    def __init__(self, stage):
        super().__init__()
        torch.manual_seed(1000 + stage)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.dropout = nn.Dropout(0.3)

    def forward(self, hidden):
        inner = self.dropout(torch.nn.functional.gelu(self.up(self.norm(hidden))))
        return hidden + self.fixed(self.down(inner))


NUM_SPLIT = 2
"""Linears of a stage that defer their weight gradient: `fixed` has none."""


def data(iteration, microbatch):
    generator = torch.Generator().manual_seed(iteration * 100 + microbatch)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, WIDTH, generator=generator)


class StageChunk:
    """One stage as a chunk of the engine."""

    def __init__(self, stage, is_first, is_last, num_microbatches):
        self.module, self.is_first, self.is_last = stage, is_first, is_last
        self.num_microbatches = num_microbatches
        self.iteration = 0

    def __call__(self, microbatch, inputs):
        sample, target = data(self.iteration, microbatch)
        output = self.module(sample if self.is_first else inputs[0])
        if not self.is_last:
            return (output,)
        loss = (output - target).square().mean() / self.num_microbatches
        return Loss(value=loss, report=loss.detach())


class Plain:
    """The whole model, trained by autograd alone."""

    def __init__(self, num_stages):
        self.stages = [Stage(stage) for stage in range(num_stages)]
        self.keys = DropoutKeys(SEED)
        for number, stage in enumerate(self.stages):
            self.keys.guard(stage, number)

    def loss(self, iteration, microbatch, num_microbatches):
        hidden, target = data(iteration, microbatch)
        self.keys.enter(iteration, microbatch)
        for stage in self.stages:
            hidden = stage(hidden)
        return (hidden - target).square().mean() / num_microbatches

    def forward_losses(self, iteration, num_microbatches):
        return [self.loss(iteration, microbatch, num_microbatches) for microbatch in range(num_microbatches)]

    def run(self, iteration, num_microbatches):
        losses = []
        for microbatch in range(num_microbatches):
            loss = self.loss(iteration, microbatch, num_microbatches)
            loss.backward()
            losses.append(loss.detach())
        return losses

    def gradients(self):
        return {
            (number, name): parameter.grad
            for number, stage in enumerate(self.stages)
            for name, parameter in stage.named_parameters()
            if parameter.requires_grad
        }


class Piped:
    """This rank's stages under a schedule."""

    def __init__(self, placement):
        self.placement, self.rank = placement, dist.get_rank()
        self.stages = {stage: Stage(stage) for stage in placement.stages_of(self.rank)}
        self.keys, self.store = DropoutKeys(SEED), WeightGradStore()
        for number, stage in self.stages.items():
            self.keys.guard(stage, number)
            split_linears(stage, self.store)
        self.transport = Transport(placement, dist.group.WORLD, torch.device("cpu"))
        self.chunks = []

    def iteration(self, schedule, channels=None):
        """What runs `schedule`, a compute order or a program."""
        if not schedule.lowered:
            schedule = add_communication(schedule, CostModel.uniform(self.placement))
        validate(schedule)
        last = self.placement.num_stages - 1
        self.chunks = [
            StageChunk(module, stage == 0, stage == last, schedule.num_microbatches)
            for stage, module in self.stages.items()
        ]
        spec = (TensorSpec((BATCH, WIDTH), torch.float32),)
        return TrainingIteration(
            schedule=schedule,
            rank=self.rank,
            chunks=self.chunks,
            channels=channels or DistributedChannels(schedule, lambda message: spec, self.transport),
            weight_grads=self.store,
            dropout_keys=self.keys,
        )

    def run(self, step, iteration):
        for chunk in self.chunks:
            chunk.iteration = iteration
        return step.run(iteration)

    def gradients(self):
        return {
            (number, name): parameter.grad
            for number, stage in self.stages.items()
            for name, parameter in stage.named_parameters()
            if parameter.requires_grad
        }

    def zero(self):
        for stage in self.stages.values():
            stage.zero_grad()

    def assert_equals(self, plain, reports, losses):
        """Bit for bit: gradients of this rank's stages, and the losses where the last stage is."""
        expected = plain.gradients()
        for key, gradient in self.gradients().items():
            assert torch.equal(gradient, expected[key]), (
                f"gradient of {key} differs by {(gradient - expected[key]).abs().max()}"
            )
        if self.placement.num_stages - 1 in self.stages:
            assert [loss.item() for loss in reports] == [loss.item() for loss in losses]
        else:
            assert reports == []
