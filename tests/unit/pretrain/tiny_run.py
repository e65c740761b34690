"""A tiny GPT on megatron-core's local layers, one chunk a pipeline rank, and its training step: for tests in forked ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from megatron.pretrain import config as configuration
from megatron.pretrain.optimizer import build_optimizer

SEQ, VOCAB, BATCH = 16, 64, 2


def tiny_config(
    *, hidden_size: int = 32, num_layers: int = 4, bf16: bool = False, swiglu: bool = False, **settings: Any
) -> Any:
    """A configuration of `BATCH` samples an iteration; `settings` are the optimizer's."""
    return configuration.Config(
        model=configuration.ModelConfig(
            num_layers=num_layers, hidden_size=hidden_size, num_attention_heads=2, seq_length=SEQ, max_position_embeddings=SEQ,
            attention_dropout=0.0, hidden_dropout=0.0, swiglu=swiglu, ffn_hidden_size=64,
        ),
        training=configuration.TrainingConfig(micro_batch_size=BATCH, global_batch_size=BATCH, train_iters=10, bf16=bf16),
        optimizer=configuration.OptimizerSettings(**{"lr": 1e-2, "lr_warmup_iters": 1, **settings}),
        pipeline=configuration.PipelineConfig(),
        data=configuration.DataConfig(mock_data=True, tokenizer_type="NullTokenizer", vocab_size=VOCAB),
        checkpoint=configuration.CheckpointConfig(),
        logging=configuration.LoggingConfig(),
    )  # fmt: skip


class TinyRun:
    """Model, optimizer and schedule of this rank."""

    def __init__(self, config: Any, seed: int = 1234) -> None:
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
        self.config, self.groups = config, ProcessGroupCollection.use_mpu_process_groups()
        self.rank, self.ranks = self.groups.pp.rank(), self.groups.pp.size()
        self.model = _model(config, self.groups)
        module = Float16Module(self.model.config, self.model) if config.training.bf16 else self.model
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
        self.chunk = DistributedDataParallel(self.model.config, ddp_config, module)
        self.optimizer, self.scheduler = build_optimizer(config, [self.chunk])
        self.dtype = torch.bfloat16 if config.training.bf16 else torch.float32

    def backward(self, iteration: int) -> float:
        """Gradients of one iteration's batch, in main_grad and finalized; the loss, on every rank."""
        self.optimizer.zero_grad()
        self.chunk.zero_grad_buffer()
        loss = self._pipeline(iteration)
        finalize_model_grads([self.chunk], pg_collection=self.groups)
        losses = [torch.zeros(1) for _ in range(self.ranks)]
        dist.all_gather(losses, torch.tensor([loss]))
        return losses[-1].item()

    def step(self, iteration: int) -> tuple[float, float]:
        """One iteration: its loss and gradient norm."""
        loss = self.backward(iteration)
        done, grad_norm, _ = self.optimizer.step()
        assert done
        self.scheduler.step(increment=BATCH)
        return loss, grad_norm

    def parts(self) -> dict[str, Any]:
        """What checkpoint.save and checkpoint.load take."""
        return {"model_chunks": [self.model], "optimizer": self.optimizer, "scheduler": self.scheduler}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of weights and optimizer state, by global name."""
        sharded = self.model.sharded_state_dict(metadata={"non_homogeneous_layers": True}).values()
        names = {id(item.data): item.key for item in sharded if getattr(item, "data", None) is not None}
        found = {names[id(param)]: param for param in self.model.parameters()}
        names |= {
            id(param.main_param): names[id(param)] for param in self.model.parameters() if hasattr(param, "main_param")
        }
        for param, entry in self.optimizer.chained_optimizers[0].optimizer.state.items():
            found |= {f"{names[id(param)]} {field}": value for field, value in {"main": param, **entry}.items()}
        return {name: value.detach().clone() for name, value in found.items()}

    def _pipeline(self, iteration: int) -> float:
        drawn = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(iteration))
        positions = torch.arange(SEQ).expand(BATCH, SEQ)
        mask = torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool).triu(1)
        received = None
        if self.rank > 0:
            received = torch.empty(SEQ, BATCH, self.config.model.hidden_size, dtype=self.dtype)
            dist.recv(received, self.rank - 1)
            self.model.set_input_tensor(received.requires_grad_())
        labels = drawn[:, 1:] if self.rank == self.ranks - 1 else None
        output = self.chunk(drawn[:, :-1], positions, mask, labels=labels)
        if labels is None:
            dist.send(output.detach(), self.rank + 1)
            gradient = torch.empty_like(output)
            dist.recv(gradient, self.rank + 1)
            output.backward(gradient)
        else:
            output = output.float().mean()
            output.backward()
        if received is not None:
            dist.send(received.grad, self.rank - 1)
        return output.item() if labels is not None else 0.0


def _model(config: Any, groups: ProcessGroupCollection) -> GPTModel:
    dtype = torch.bfloat16 if config.training.bf16 else torch.float32
    model = config.model
    transformer = TransformerConfig(
        num_layers=model.num_layers, hidden_size=model.hidden_size, num_attention_heads=2, ffn_hidden_size=64,
        attention_dropout=0.0, hidden_dropout=0.0, use_cpu_initialization=True, pipeline_model_parallel_size=groups.pp.size(),
        pipeline_dtype=dtype, params_dtype=dtype, bf16=config.training.bf16, batch_p2p_sync=False,
        gated_linear_unit=model.swiglu, add_bias_linear=not model.swiglu,
        activation_func=torch.nn.functional.silu if model.swiglu else torch.nn.functional.gelu,
    )  # fmt: skip
    return GPTModel(
        transformer, get_gpt_layer_local_spec(), VOCAB, SEQ,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True, pg_collection=groups,
    )  # fmt: skip
