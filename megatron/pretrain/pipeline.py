"""This rank's part of the model, and the engine that runs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module

from megatron.pipeline_parallel.planning.builders import Problem
from megatron.pipeline_parallel.planning.dataflow import Message
from megatron.pipeline_parallel.planning.op import Placement, Schedule
from megatron.pipeline_parallel.planning.plan import make_plan
from megatron.pipeline_parallel.runtime.channels import DistributedChannels, TensorSpec, Transport
from megatron.pipeline_parallel.runtime.forward_step import ForwardStep, ForwardStepChunk
from megatron.pipeline_parallel.runtime.iteration import TrainingIteration
from megatron.pipeline_parallel.runtime.megatron_linear import split_parallel_linears
from megatron.pipeline_parallel.runtime.plan import share_plan
from megatron.pipeline_parallel.runtime.rng import DropoutKeys
from megatron.pipeline_parallel.runtime.weight_grad import WeightGradStore, split_linears
from megatron.pretrain.config import Config
from megatron.pretrain.embedding import add_tied_gradients
from megatron.pretrain.initialize import this_device
from megatron.pretrain.model import groups_without_embedding, guard_dropout


@dataclass(kw_only=True)
class Pipeline:
    """The chunks of one rank, ready to run any number of microbatches under the configured schedule."""

    config: Config
    placement: Placement
    rank: int
    models: list[GPTModel]
    """By chunk, without wrappers."""
    wrapped: list[DistributedDataParallel]
    """By chunk, as the forward step calls them."""
    transport: Transport
    weight_grads: WeightGradStore
    dropout_keys: DropoutKeys
    _plans: dict[tuple[int, bool], Schedule] = field(default_factory=dict)

    @classmethod
    def build(cls, config: Config, placement: Placement, models: Sequence[GPTModel]) -> Pipeline:
        """Wrap this rank's `models` (by chunk) and make its channels. Collective over the pipeline's ranks."""
        weight_grads, device = WeightGradStore(), this_device()
        dropout_keys = DropoutKeys(
            config.training.seed,
            data_parallel_rank=parallel_state.get_data_parallel_rank(),
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
            tensor_parallel_rank=parallel_state.get_tensor_model_parallel_rank(),
        )
        for model in models:
            model.to(device)
            split_parallel_linears(model, weight_grads)
            split_linears(model, weight_grads)
            guard_dropout(model, dropout_keys)
        return cls(
            config=config,
            placement=placement,
            rank=parallel_state.get_pipeline_model_parallel_rank(),
            models=list(models),
            wrapped=[_wrap(model, config.training.bf16) for model in models],
            transport=Transport(placement, parallel_state.get_pipeline_model_parallel_group(), device),
            weight_grads=weight_grads,
            dropout_keys=dropout_keys,
        )

    @property
    def stages(self) -> tuple[int, ...]:
        return self.placement.stages_of(self.rank)

    @property
    def has_last_stage(self) -> bool:
        return self.placement.num_stages - 1 in self.stages

    def plan(self, num_microbatches: int, *, trains: bool) -> Schedule:
        """The program of all ranks; made by rank 0 and shared, once for each number of microbatches. Collective."""
        key = (num_microbatches, trains)
        if key not in self._plans:
            problem = Problem(
                pp_size=self.placement.pp_size,
                num_microbatches=num_microbatches,
                chunks_per_rank=self.placement.chunks_per_rank,
            )
            name = self.config.pipeline.pipeline_schedule
            mine = make_plan(name, problem, evaluates=not trains) if dist.get_rank() == 0 else None
            plan = share_plan(mine, dist.group.WORLD)
            if plan.placement != self.placement:
                raise ValueError(
                    f"schedule {name!r} puts its stages at {plan.placement}, the model is at {self.placement}"
                )
            self._plans[key] = plan
        return self._plans[key]

    def iteration(
        self,
        forward_step: ForwardStep,
        data_iterators: Sequence[Iterator | None],
        num_microbatches: int,
        *,
        trains: bool,
    ) -> TrainingIteration:
        """What runs one iteration over `data_iterators`, one a chunk."""
        schedule = self.plan(num_microbatches, trains=trains)
        last = self.placement.num_stages - 1
        return TrainingIteration(
            schedule=schedule,
            rank=self.rank,
            chunks=[
                ForwardStepChunk(
                    forward_step, iterator, model, is_last=stage == last, num_microbatches=num_microbatches
                )
                for iterator, model, stage in zip(data_iterators, self.wrapped, self.stages)
            ],
            channels=DistributedChannels(schedule, self._message_spec, self.transport),
            weight_grads=self.weight_grads,
            dropout_keys=self.dropout_keys,
        )

    def _message_spec(self, message: Message) -> Sequence[TensorSpec]:
        """Hidden states or their gradient: [sequence, microbatch size, hidden size]."""
        model, training = self.config.model, self.config.training
        dtype = torch.bfloat16 if training.bf16 else torch.float32
        return (TensorSpec((model.seq_length, training.micro_batch_size, model.hidden_size), dtype),)

    def zero_gradients(self) -> None:
        for model in self.wrapped:
            model.zero_grad_buffer()

    def finish_gradients(self) -> None:
        """Reduce gradients over data parallel ranks, and those of tied embeddings over their two copies."""
        finalize_model_grads(self.wrapped, pg_collection=groups_without_embedding())
        add_tied_gradients(dict(zip(self.stages, self.models)), self.placement)

    def close(self) -> None:
        self.transport.close()

    def train_mode(self, trains: bool) -> None:
        for model in self.wrapped:
            model.train(trains)


def _wrap(model: GPTModel, bf16: bool) -> DistributedDataParallel:
    config = model.config
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    return DistributedDataParallel(config, settings, Float16Module(config, model) if bf16 else model)
