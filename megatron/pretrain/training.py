"""The training loop: set up, train, evaluate, save."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron.pipeline_parallel.planning import builders
from megatron.pipeline_parallel.planning.builders import Problem
from megatron.pipeline_parallel.planning.costs import CostModel
from megatron.pipeline_parallel.planning.op import Placement
from megatron.pipeline_parallel.planning.simulate import simulate
from megatron.pipeline_parallel.runtime.forward_step import ForwardStep
from megatron.pipeline_parallel.runtime.iteration import TrainingIteration
from megatron.pretrain import checkpoint
from megatron.pretrain.config import Config, global_batch_size, num_microbatches, world_size
from megatron.pretrain.data import batch_iterator
from megatron.pretrain.errors import ConfigError, TrainingError
from megatron.pretrain.fit import compare_configs
from megatron.pretrain.initialize import process_groups
from megatron.pretrain.log import TrainingLog
from megatron.pretrain.optimizer import build_optimizer
from megatron.pretrain.pipeline import Pipeline

ModelProvider = Callable[[Config, int, Placement], Any]
"""(config, stage, placement) -> the model of that stage."""

DatasetsProvider = Callable[[Config, Sequence[int], Callable[[], bool]], Sequence[Any]]
"""(config, samples wanted of (train, valid, test), whether this rank needs data) -> three datasets."""


def pretrain(
    config: Config,
    *,
    model_provider: ModelProvider,
    datasets_provider: DatasetsProvider,
    forward_step: ForwardStep,
) -> None:
    """Train as `config` says, on all ranks of this run; each rank calls it."""
    problem = Problem(
        pp_size=config.pipeline.pipeline_model_parallel_size,
        num_microbatches=num_microbatches(config, world_size(os.environ)),
    )
    placement = builders.placement(config.pipeline.pipeline_schedule, problem)
    with process_groups(config, placement):
        trainer = Trainer(config, placement, model_provider, datasets_provider, forward_step)
        try:
            trainer.train()
        finally:
            trainer.log.close()
        trainer.pipeline.close()


class Trainer:
    """One rank of a run."""

    def __init__(
        self,
        config: Config,
        placement: Placement,
        model_provider: ModelProvider,
        datasets_provider: DatasetsProvider,
        forward_step: ForwardStep,
    ) -> None:
        self.config = config
        self.forward_step = forward_step
        self.world_size = dist.get_world_size()
        self.batch_size = global_batch_size(config, self.world_size)
        self.num_microbatches = num_microbatches(config, self.world_size)
        self.placement = placement
        self.stages = placement.stages_of(parallel_state.get_pipeline_model_parallel_rank())
        # What is wrong with files shows before the model is built.
        if config.checkpoint.save is not None:
            checkpoint.check_writable(config.checkpoint.save)
        self.datasets = datasets_provider(
            config, self._samples_wanted(), lambda: any(map(self._reads_data, self.stages))
        )
        self.pipeline = Pipeline.build(
            config, placement, [model_provider(config, stage, placement) for stage in self.stages]
        )
        self.optimizer, self.scheduler = build_optimizer(config, self.pipeline.wrapped)
        self.iteration = 0
        self.consumed_samples = 0
        notes = self._load()
        self.log = self._open_log()
        for note in notes:
            self.log.line(f" {note}")

    def _reads_data(self, stage: int) -> bool:
        """The first stage embeds tokens, the last one compares with labels."""
        return stage in (0, self.placement.num_stages - 1)

    def _samples_wanted(self) -> tuple[int, int, int]:
        """Samples for training in all, and for one evaluation on the validation and on the test set."""
        evaluation = self.config.training.eval_iters * self.batch_size
        shares = [float(share) for share in self.config.data.split.split(",")]
        has_test = len(shares) > 2 and shares[2] > 0
        return self.config.training.train_iters * self.batch_size, evaluation, evaluation if has_test else 0

    def _open_log(self) -> TrainingLog:
        is_logger = self.pipeline.has_last_stage and parallel_state.get_data_parallel_rank() == 0
        settings = self.config.logging
        return TrainingLog(
            train_iters=self.config.training.train_iters,
            log_interval=settings.log_interval,
            enabled=is_logger,
            tensorboard_dir=settings.tensorboard_dir,
            start_iteration=self.iteration,
        )

    def _load(self) -> list[str]:
        """Continue from the newest checkpoint in --load, where there is one; returns what to say about it.

        Raises ConfigError where the checkpoint is of another model, or where there is none to take weights from.
        """
        settings = self.config.checkpoint
        if settings.load is None:
            return []
        takes_optimizer = not (settings.no_load_optim or settings.finetune)
        state = checkpoint.load(
            settings.load,
            model_chunks=self.pipeline.models,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            load_optim=takes_optimizer,
        )
        if state is None:
            if not takes_optimizer:
                flag = "--finetune" if settings.finetune else "--no-load-optim"
                raise ConfigError(f"{flag} needs weights to begin with, and --load {settings.load} holds no checkpoint")
            return [f"no checkpoint in {settings.load}: a fresh start"]
        others = compare_configs(self.config.to_dict(), state["config"], settings.load)
        if settings.finetune:
            return [f"loaded the weights of iteration {state['iteration']} from {settings.load}", *others]
        self.iteration, self.consumed_samples = state["iteration"], state["consumed_train_samples"]
        if not takes_optimizer:
            self.scheduler.step(increment=self.consumed_samples)
        return [f"resumed at iteration {self.iteration} from {settings.load}", *others]

    def _save(self) -> None:
        checkpoint.save(
            self.config.checkpoint.save,
            iteration=self.iteration,
            model_chunks=self.pipeline.models,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            state={
                "iteration": self.iteration,
                "consumed_train_samples": self.consumed_samples,
                "config": self.config.to_dict(),
            },
        )
        self.log.line(f" saved checkpoint of iteration {self.iteration} to {self.config.checkpoint.save}")

    def _iterators(self, dataset: Any, consumed_samples: int) -> list[Iterator | None]:
        """One iterator a chunk, each over the same batches; None where a stage needs no data."""
        return [self._batches(dataset, consumed_samples) if self._reads_data(stage) else None for stage in self.stages]

    def _batches(self, dataset: Any, consumed_samples: int) -> Iterator:
        return batch_iterator(
            dataset,
            consumed_samples=consumed_samples,
            micro_batch_size=self.config.training.micro_batch_size,
            data_parallel_rank=parallel_state.get_data_parallel_rank(),
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
            num_workers=self.config.data.num_workers,
        )

    def train(self) -> None:
        """All iterations that are left, evaluations and checkpoints between them, and a last evaluation."""
        training = self.config.training
        with self.log.paused():
            self._introduce()
        if self.iteration < training.train_iters:
            self._train_to(training.train_iters)
        if self.iteration >= training.train_iters and training.eval_iters:
            for name, wanted, dataset in zip(("validation", "test"), self._samples_wanted()[1:], self.datasets[1:]):
                if wanted:
                    self._evaluate(name, dataset)

    def _train_to(self, last_iteration: int) -> None:
        training = self.config.training
        with self.log.paused():
            iterators = self._iterators(self.datasets[0], self.consumed_samples)
            step = self.pipeline.iteration(self.forward_step, iterators, self.num_microbatches, trains=True)
        while self.iteration < last_iteration:
            self._train_step(step)
            done = self.iteration == last_iteration
            leaves = training.exit_interval is not None and self.iteration % training.exit_interval == 0
            if not done and training.eval_iters and self.iteration % training.eval_interval == 0:
                self._evaluate("validation", self.datasets[1])
            if self._saves_now(done or leaves):
                with self.log.paused():
                    self._save()
            if leaves and not done:
                self.log.line(f" stopping after iteration {self.iteration}, as --exit-interval says")
                return

    def _saves_now(self, stops: bool) -> bool:
        settings = self.config.checkpoint
        due = settings.save_interval is not None and self.iteration % settings.save_interval == 0
        return settings.save is not None and (stops or due)

    def _train_step(self, step: TrainingIteration) -> None:
        self.pipeline.train_mode(True)
        self.pipeline.zero_gradients()
        self.optimizer.zero_grad()
        reports = step.run(self.iteration)
        loss = None
        if self.pipeline.has_last_stage:
            loss = mean_loss([report["lm loss"] for report in reports])
            # Raised where it is seen, which ends all ranks: no step is taken and nothing saved.
            self._check_finite("loss", loss)
        self.pipeline.finish_gradients()
        learning_rate = max(group["lr"] for group in self.optimizer.param_groups)
        updated, grad_norm, _ = self.optimizer.step()
        if grad_norm is not None:
            # The same on all ranks.
            self._check_finite("gradient norm", grad_norm)
        if updated:
            self.scheduler.step(increment=self.batch_size)
        self.iteration += 1
        self.consumed_samples += self.batch_size
        if loss is not None:
            self.log.iteration(
                self.iteration,
                loss=loss,
                learning_rate=learning_rate,
                global_batch_size=self.batch_size,
                consumed_samples=self.consumed_samples,
                grad_norm=grad_norm,
                skipped=not updated,
            )

    def _check_finite(self, what: str, value: float) -> None:
        if math.isfinite(value):
            return
        folder = self.config.checkpoint.save
        way_out = f"checkpoints in {folder} are from before" if folder else "nothing was saved (--save)"
        raise TrainingError(
            f"the {what} of iteration {self.iteration + 1} is {value}: {way_out}; try a lower --lr, a longer warmup "
            "(--lr-warmup-iters) or a smaller --clip-grad"
        )

    def _evaluate(self, name: str, dataset: Any) -> None:
        """Loss over --eval-iters global batches, the same samples each time."""
        with self.log.paused():
            self.pipeline.train_mode(False)
            iterators = self._iterators(dataset, consumed_samples=0)
            step = self.pipeline.iteration(self.forward_step, iterators, self.num_microbatches, trains=False)
            losses = [
                report["lm loss"] for _ in range(self.config.training.eval_iters) for report in step.run(self.iteration)
            ]
            if self.pipeline.has_last_stage:
                self.log.validation(self.iteration, mean_loss(losses), name)

    def _introduce(self) -> None:
        """Say what is about to run."""
        schedule = self.pipeline.plan(self.num_microbatches, trains=True)
        if not self.log.enabled:
            return
        timeline = simulate(schedule, CostModel.uniform(schedule.placement))
        peaks = ", ".join(f"{timeline.peak(rank):g}" for rank in range(schedule.pp_size))
        self.log.line(
            f" schedule {schedule.name}: p = {schedule.pp_size} pipeline ranks, m = {self.num_microbatches} microbatches; planned for "
            f"equal times: bubble rate {timeline.bubble_rate:.4f} (span bubble rate {timeline.span_bubble_rate:.4f}), "
            f"peak activations in microbatches, by rank: {peaks}"
        )


def mean_loss(losses: Sequence[Tensor]) -> float:
    """Mean over tokens of [sum, tokens] pairs, one a microbatch, over all data parallel ranks; on ranks with the last stage."""
    total = torch.stack(list(losses)).sum(dim=0)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return (total[0] / total[1]).item()
