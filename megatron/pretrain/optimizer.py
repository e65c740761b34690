"""The optimizer and the learning rate schedule: megatron-core's own, made from the configuration."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.pretrain.config import Config, decay_iters, global_batch_size, warmup_iters


def build_optimizer(
    config: Config, model_chunks: list[DistributedDataParallel]
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """AdamW over this rank's chunks, and the schedule that sets its learning rate.

    Every rank calls it together: core aligns the parameter groups over all ranks. An iteration zeroes gradients
    (`optimizer.zero_grad()` and each chunk's `zero_grad_buffer()`), runs, calls core's `finalize_model_grads`, then
    `optimizer.step()`, which returns (done, global gradient norm before clipping, None), then
    `scheduler.step(increment=global batch size)`: the schedule counts samples, as Megatron's does.
    """
    optimizer = get_megatron_optimizer(
        optimizer_config(config),
        model_chunks,
        # Gloo copies of the groups serve only the distributed optimizer's checkpoints.
        use_gloo_process_groups=False,
    )
    return optimizer, build_scheduler(config, optimizer)


def optimizer_config(config: Config) -> OptimizerConfig:
    """Core's settings for AdamW; in bf16 it keeps float32 main parameters beside the model's."""
    settings = config.optimizer
    return OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_eps,
        clip_grad=settings.clip_grad,
        bf16=config.training.bf16,
        params_dtype=torch.bfloat16 if config.training.bf16 else torch.float32,
        use_distributed_optimizer=False,
    )


def build_scheduler(config: Config, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Warmup and decay in samples. A resumed run must be told the same schedule as the run that saved."""
    settings = config.optimizer
    batch = global_batch_size(config, torch.distributed.get_world_size())
    return OptimizerParamScheduler(
        optimizer,
        init_lr=settings.lr_warmup_init,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=warmup_iters(config) * batch,
        lr_decay_steps=decay_iters(config) * batch,
        lr_decay_style=settings.lr_decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        # Unused by a constant weight decay, but compared on resume: train_iters here would refuse a longer run.
        wd_incr_steps=decay_iters(config) * batch,
        wd_incr_style="constant",
        # The checkpoint's values must equal the flags': neither silently replaces the other.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=False,
    )
