"""One stage of a GPT on stock megatron-core: the layer spec, and a chunk built for any placement."""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor, nn

from megatron.pipeline_parallel.planning.op import Placement
from megatron.pipeline_parallel.runtime.rng import DropoutKeys, seed_default_generator
from megatron.pretrain.config import Config, ModelConfig


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dimension, with parameters of the model's own type.

    torch's norms, which core falls back to, keep fp32 parameters in a bf16 model and refuse sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        if self.bias is None:
            return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(hidden, self.weight.shape, self.weight, self.bias, self.eps)


class SdpaCoreAttention(MegatronModule):
    """Attention core on `scaled_dot_product_attention`.

    query [sq, b, np, hn], key and value [sk, b, ng, hn] -> context [sq, b, np * hn].
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: object = None,
    ) -> Tensor:
        """Causal when `attention_mask` is None; a mask is True where attention is forbidden, as everywhere in Megatron."""
        if attention_bias is not None or packed_seq_params is not None:
            raise ValueError("this attention core takes neither an attention bias nor packed sequences")
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        context = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if attention_mask is None else ~attention_mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=attention_mask is None,
            scale=self.softmax_scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        return context.permute(2, 0, 1, 3).flatten(2)


class KeyedInitLayer(TransformerLayer):
    """core's layer, with initial weights that depend on its global number alone, not on which rank makes it."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        *,
        seed: int,
        layer_number: int = 1,
        **others: object,
    ) -> None:
        stage = others["pg_collection"].pp.rank()
        number = layer_number + get_transformer_layer_offset(config, others.get("vp_stage"), stage)
        seed_default_generator(seed, "layer", number)
        super().__init__(config, submodules, layer_number=layer_number, **others)
        _seed_for_output_layer(seed)


def _seed_for_output_layer(seed: int) -> None:
    # GPTModel makes its output layer right after its last layer, whichever that is.
    seed_default_generator(seed, "output layer")


def gpt_block_spec(config: TransformerConfig, num_layers: int, seed: int) -> TransformerBlockSubmodules:
    """`num_layers` decoder layers of core's local linears with our norm and attention core."""
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear, core_attention=SdpaCoreAttention, linear_proj=RowParallelLinear
        ),
    )
    mlp = ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )
    layer = ModuleSpec(
        module=KeyedInitLayer,
        params={"seed": seed},
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=Norm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=Norm)


def transformer_config(model: ModelConfig, *, num_stages: int, bf16: bool) -> TransformerConfig:
    """megatron-core's configuration for a straight pipeline of `num_stages` ranks, whatever the placement is."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.feedforward_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups if model.group_query_attention else None,
        kv_channels=model.head_size,
        attention_dropout=model.attention_dropout,
        hidden_dropout=model.hidden_dropout,
        normalization=model.normalization,
        layernorm_epsilon=model.norm_epsilon,
        gated_linear_unit=model.swiglu,
        activation_func=F.silu if model.swiglu else F.gelu,
        add_bias_linear=not model.disable_bias_linear,
        init_method_std=model.init_method_std,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        # Initial weights are drawn on the CPU, from keyed seeds, so that they depend on neither device nor layout.
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=bf16,
        pipeline_model_parallel_size=num_stages,
        batch_p2p_sync=False,
        cuda_graph_scope=[],
    )


class StandInGroup:
    """Stands in for a process group where core only asks for a rank and a size, to decide what to do."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def build_stage(config: Config, *, stage: int, placement: Placement, vocab_size: int) -> GPTModel:
    """The GPT layers of one stage, with the embedding on the first and the head on the last.

    Built as rank `stage` of a straight pipeline, since core can't be told of other placements; `vocab_size` is padded.
    Initial weights depend on the seed and the global layer number alone.
    """
    num_stages, seed = placement.num_stages, config.training.seed
    first, last = stage == 0, stage == num_stages - 1
    core_config = transformer_config(config.model, num_stages=num_stages, bf16=config.training.bf16)
    groups = copy.copy(ProcessGroupCollection.use_mpu_process_groups())
    groups.pp = StandInGroup(stage, num_stages)
    # Core's own tying assumes a straight placement; `megatron.pretrain.embedding` does it for any.
    groups.embd = None
    spec = gpt_block_spec(core_config, get_num_layers_to_build(core_config, pp_rank=stage), seed)
    if first:
        seed_default_generator(seed, "embedding")
    else:
        _seed_for_output_layer(seed)
    model = GPTModel(
        config=core_config,
        transformer_layer_spec=spec,
        vocab_size=vocab_size,
        max_sequence_length=config.model.max_position_embeddings,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=not config.model.untie_embeddings_and_output_weights,
        position_embedding_type=config.model.position_embedding_type,
        rotary_percent=config.model.rotary_percent,
        rotary_base=config.model.rotary_base,
        pg_collection=groups,
    )
    if last and not first and not config.model.untie_embeddings_and_output_weights:
        _copy_embedding(model.output_layer.weight, seed, core_config.init_method)
    return model


def _copy_embedding(weight: nn.Parameter, seed: int, init_method: Callable[[Tensor], None]) -> None:
    """Give the head's copy of a tied embedding the values that the first stage's has: the same draw from the same seed."""
    seed_default_generator(seed, "embedding")
    master = torch.empty(weight.shape, dtype=torch.float32)
    init_method(master)
    with torch.no_grad():
        weight.copy_(master)


def guard_dropout(model: GPTModel, keys: DropoutKeys) -> None:
    """Key the dropout of each layer by its global number, and the embedding's by name."""
    if model.pre_process:
        keys.guard(model.embedding, "embedding")
    for layer in model.decoder.layers:
        keys.guard(layer, layer.layer_number)


def groups_without_embedding() -> ProcessGroupCollection:
    """Core's groups for reducing gradients, where tied embeddings, which core ties for a straight placement only, seem to be alone."""
    groups = copy.copy(ProcessGroupCollection.use_mpu_process_groups())
    groups.embd = groups.pos_embd = StandInGroup(0, 1)
    return groups
