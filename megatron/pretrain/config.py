"""What a training run is told: frozen dataclasses, one a group of flags.

A field is a flag (`num_layers` is `--num-layers`) and the string under it is the flag's `--help` text;
megatron/pretrain/flags.py makes the command line from this file, so each flag is written once. A group checks itself when
it is made; megatron/pretrain/fit.py checks what needs several groups, the number of processes, or the disk. Nothing here imports torch, so
that a mistake is answered in a fraction of a second, before any process group exists.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from megatron.pretrain.checks import above_zero, at_least, divisors, is_number, listed, nearest_multiples, share
from megatron.pretrain.errors import ConfigError, flag_name


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """model: the GPT that is trained"""

    num_layers: int
    """Number of transformer layers, over all pipeline ranks."""
    hidden_size: int
    """Width of a token's hidden state."""
    num_attention_heads: int
    """Number of attention heads a layer."""
    seq_length: int
    """Tokens a sample."""
    max_position_embeddings: int
    """Longest sequence that the model can place; rows of the table of learned position embeddings."""
    ffn_hidden_size: int | None = None
    """Width of the feed-forward layer. Without it 4 * hidden size; under --swiglu 2/3 of that, rounded down to a
    multiple of 64."""
    kv_channels: int | None = None
    """Width of one attention head. Without it hidden size / number of attention heads."""
    group_query_attention: bool = False
    """Let several query heads share one key and value head (GQA); their number is --num-query-groups."""
    num_query_groups: int = 1
    """Number of key and value heads under --group-query-attention."""
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    """How positions enter: a learned table, rotation of queries and keys (rope), or not at all."""
    rotary_base: int = 10000
    """Base of the rope angles; a larger one turns more slowly, for longer sequences."""
    rotary_percent: float = 1.0
    """Share of a head's channels that rope turns, above 0 and up to 1."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Kind of every norm in the model."""
    norm_epsilon: float = 1e-5
    """Added to the variance in every norm."""
    swiglu: bool = False
    """Gate the feed-forward layer with SiLU (SwiGLU) in place of GELU."""
    disable_bias_linear: bool = False
    """Leave out the biases of linear layers."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output layer a weight of its own, apart from the word embedding's."""
    attention_dropout: float = 0.1
    """Dropout probability on attention weights, from 0 to below 1."""
    hidden_dropout: float = 0.1
    """Dropout probability on hidden states, from 0 to below 1."""
    init_method_std: float = 0.02
    """Standard deviation of the normal distribution that weights are drawn from."""
    make_vocab_size_divisible_by: int = 128
    """Round the vocabulary up to a multiple of this, in rows of the embedding."""

    def __post_init__(self) -> None:
        at_least(self, 1, "num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings")
        at_least(
            self, 1, "ffn_hidden_size", "kv_channels", "num_query_groups", "make_vocab_size_divisible_by", "rotary_base"
        )
        above_zero(self, "norm_epsilon", "init_method_std")
        share(self, "attention_dropout", "hidden_dropout")
        self._check_heads()
        self._check_rotary()
        if self.feedforward_size < 1:
            raise ConfigError(
                f"--swiglu with --hidden-size {self.hidden_size} leaves no feed-forward layer (2/3 of 4 * hidden size, rounded "
                "down to a multiple of 64): give --ffn-hidden-size"
            )

    @property
    def head_size(self) -> int:
        """Channels of one attention head: `kv_channels`, or what follows from the hidden size."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def feedforward_size(self) -> int:
        """Width of the feed-forward layer: `ffn_hidden_size`, or Megatron's rule without it."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.swiglu:
            return int((4 * self.hidden_size * 2 / 3) / 64) * 64
        return 4 * self.hidden_size

    def _check_heads(self) -> None:
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"--hidden-size {self.hidden_size} does not divide by --num-attention-heads {self.num_attention_heads}: "
                f"try --hidden-size {nearest_multiples(self.hidden_size, self.num_attention_heads)}, or give --kv-channels"
            )
        if not self.group_query_attention and self.num_query_groups != 1:
            raise ConfigError(f"--num-query-groups {self.num_query_groups} needs --group-query-attention: add it")
        if self.group_query_attention and self.num_attention_heads % self.num_query_groups:
            raise ConfigError(
                f"--num-attention-heads {self.num_attention_heads} does not divide by --num-query-groups "
                f"{self.num_query_groups}: try --num-query-groups {listed(divisors(self.num_attention_heads))}"
            )

    def _check_rotary(self) -> None:
        if self.position_embedding_type != "rope":
            for name, default in (("rotary_base", 10000), ("rotary_percent", 1.0)):
                if getattr(self, name) != default:
                    raise ConfigError(
                        f"{flag_name(name)} {getattr(self, name)} needs --position-embedding-type rope: add it"
                    )
            return
        if not 0 < self.rotary_percent <= 1:
            raise ConfigError(f"--rotary-percent is {self.rotary_percent}: it must be above 0 and at most 1")
        turned = int(self.head_size * self.rotary_percent)
        if turned < 2 or turned % 2:
            raise ConfigError(
                f"--position-embedding-type rope turns pairs of channels, but {turned} of a head's {self.head_size} channels are "
                "turned: choose --hidden-size, --num-attention-heads, --kv-channels or --rotary-percent so that it is even"
            )


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """training: batches, iterations, evaluation"""

    micro_batch_size: int
    """Samples in one microbatch, on each data parallel rank."""
    global_batch_size: int | None = None
    """Samples in one iteration, over all data parallel ranks. Without it micro batch size * data parallel size."""
    train_iters: int
    """Iterations to train in all, those before a resume included."""
    eval_interval: int = 1000
    """Iterations between two evaluations on the validation set."""
    eval_iters: int = 100
    """Iterations of one evaluation, each of a global batch; 0 turns evaluation off."""
    seed: int = 1234
    """Seed of weights, data order and dropout."""
    bf16: bool = False
    """Compute in bfloat16; the optimizer keeps float32 copies."""
    exit_interval: int | None = None
    """Stop after an iteration that is a multiple of this, saving first where --save is given."""
    distributed_timeout_minutes: int = 10
    """Minutes that a process waits for the others in a collective before it gives up."""

    def __post_init__(self) -> None:
        at_least(self, 1, "micro_batch_size", "global_batch_size", "train_iters", "eval_interval", "exit_interval")
        at_least(self, 0, "eval_iters")
        at_least(self, 1, "seed", "distributed_timeout_minutes")
        if self.seed >= 2**32:
            raise ConfigError(f"--seed is {self.seed}: it must be below 2**32 ({2**32})")


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """optimizer: Adam with decoupled weight decay, and its learning rate"""

    lr: float
    """Highest learning rate, reached at the end of the warmup."""
    min_lr: float = 0.0
    """Learning rate that the decay ends at and never goes below."""
    lr_decay_style: Literal["linear", "cosine", "constant", "inverse-square-root"] = "linear"
    """Shape of the decay after the warmup."""
    lr_decay_iters: int | None = None
    """Iterations until the decay reaches --min-lr. Without it --train-iters."""
    lr_warmup_iters: int = 0
    """Iterations in which the learning rate rises to --lr."""
    lr_warmup_fraction: float | None = None
    """The warmup as a share of the decay iterations, from 0 to below 1, in place of --lr-warmup-iters."""
    lr_warmup_init: float = 0.0
    """Learning rate that the warmup starts from."""
    weight_decay: float = 0.01
    """Decoupled weight decay; norms and biases have none."""
    clip_grad: float = 1.0
    """Highest global norm of the gradient, scaled down to it where above; 0 turns clipping off."""
    adam_beta1: float = 0.9
    """Adam's decay of the mean of gradients, from 0 to below 1."""
    adam_beta2: float = 0.999
    """Adam's decay of the mean of squared gradients, from 0 to below 1."""
    adam_eps: float = 1e-8
    """Added to the denominator of Adam's step."""

    def __post_init__(self) -> None:
        above_zero(self, "lr", "adam_eps")
        at_least(self, 0, "min_lr", "lr_warmup_iters", "lr_warmup_init", "weight_decay", "clip_grad")
        at_least(self, 1, "lr_decay_iters")
        share(self, "lr_warmup_fraction", "adam_beta1", "adam_beta2")
        for name in ("min_lr", "lr_warmup_init"):
            if getattr(self, name) > self.lr:
                raise ConfigError(
                    f"{flag_name(name)} {getattr(self, name)} is above --lr {self.lr}: it must be at most that"
                )
        if self.lr_warmup_fraction is not None and self.lr_warmup_iters:
            raise ConfigError(
                f"--lr-warmup-fraction {self.lr_warmup_fraction} and --lr-warmup-iters {self.lr_warmup_iters} both set the "
                "warmup: give one of them"
            )
        if self.lr_warmup_init and not self.lr_warmup_iters and not self.lr_warmup_fraction:
            raise ConfigError(
                f"--lr-warmup-init {self.lr_warmup_init} needs a warmup: give --lr-warmup-iters or --lr-warmup-fraction"
            )


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """pipeline: how the layers are spread over ranks, and in which order ranks work"""

    pipeline_model_parallel_size: int = 1
    """Number of pipeline ranks (p) that share the layers; the rest of the processes are data parallel copies."""
    pipeline_schedule: str = "1f1b"
    """Name of the order in which each rank runs its forwards, backwards and weight gradients, such as gpipe, 1f1b or zb-h1; a name
    that is not built is answered with those that are."""

    def __post_init__(self) -> None:
        at_least(self, 1, "pipeline_model_parallel_size")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """data: text and tokenizer"""

    data_path: list[str] | None = None
    """Indexed datasets to train on, as path prefixes without .bin and .idx: one PREFIX, WEIGHT PREFIX pairs to mix
    several, or several PREFIX to mix them by their sizes."""
    split: str = "969, 30, 1"
    """Shares of the documents for training, validation and test, comma-separated; they need not sum to 1."""
    mock_data: bool = False
    """Train on generated tokens in place of --data-path."""
    data_cache_path: str | None = None
    """Folder for the index files of datasets. Without it a folder beside the first dataset."""
    tokenizer_type: Literal["SentencePieceTokenizer", "NullTokenizer"] = "SentencePieceTokenizer"
    """What turned the text into tokens: a SentencePiece model, or nothing at all (numbers only)."""
    tokenizer_model: str | None = None
    """File of the SentencePiece model (.model)."""
    vocab_size: int | None = None
    """Number of tokens. NullTokenizer needs it; with SentencePieceTokenizer it must equal the model's own where given."""
    num_workers: int = 0
    """Processes a rank that load data ahead; 0 loads in the training process."""
    reset_position_ids: bool = False
    """Count positions from 0 again after each end of document."""
    eod_mask_loss: bool = False
    """Leave end-of-document tokens out of the loss."""

    def __post_init__(self) -> None:
        at_least(self, 1, "vocab_size")
        at_least(self, 0, "num_workers")
        if self.mock_data and self.data_path is not None:
            raise ConfigError(
                f"--data-path {' '.join(self.data_path)} and --mock-data exclude each other: give one of them"
            )
        if not self.mock_data and not self.data_path:
            raise ConfigError(
                "no data to train on: give --data-path PREFIX (made by tools/preprocess_data.py), or --mock-data"
            )
        if self.data_path:
            split_blend(self.data_path)
        _check_split(self.split)
        self._check_tokenizer()

    def _check_tokenizer(self) -> None:
        if self.tokenizer_type == "SentencePieceTokenizer" and self.tokenizer_model is None:
            raise ConfigError(
                "--tokenizer-type SentencePieceTokenizer needs --tokenizer-model FILE (made by tools/train_tokenizer.py); "
                "without a tokenizer: --tokenizer-type NullTokenizer --vocab-size N"
            )
        if self.tokenizer_type == "NullTokenizer" and self.vocab_size is None:
            raise ConfigError("--tokenizer-type NullTokenizer needs --vocab-size N, the number of tokens in the data")
        if self.tokenizer_type == "NullTokenizer" and self.tokenizer_model is not None:
            raise ConfigError(
                f"--tokenizer-model {self.tokenizer_model} has no use with --tokenizer-type NullTokenizer: leave one of them out"
            )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """checkpoint: saving and resuming"""

    save: str | None = None
    """Folder that checkpoints are written to, the last iteration's included; made where it does not exist."""
    load: str | None = None
    """Folder to resume from, at its latest checkpoint; one without any is a fresh start, so that the same command resumes."""
    save_interval: int | None = None
    """Iterations between two checkpoints. Without it only the last iteration is saved."""
    no_load_optim: bool = False
    """Load the weights and the iteration without the optimizer's state; the learning rate goes on where it was."""
    finetune: bool = False
    """Load the weights alone and begin again at iteration 0, with a fresh optimizer."""

    def __post_init__(self) -> None:
        at_least(self, 1, "save_interval")
        if self.save_interval is not None and self.save is None:
            raise ConfigError(f"--save-interval {self.save_interval} needs a folder to save to: give --save DIR")
        for name in ("no_load_optim", "finetune"):
            if getattr(self, name) and self.load is None:
                raise ConfigError(f"{flag_name(name)} needs a checkpoint to load: give --load DIR")


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """logging: what is printed and recorded"""

    log_interval: int = 100
    """Iterations between two log lines."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard events; made where it does not exist."""

    def __post_init__(self) -> None:
        at_least(self, 1, "log_interval")


@dataclass(frozen=True, kw_only=True)
class Config:
    """All groups of one run."""

    model: ModelConfig
    training: TrainingConfig
    optimizer: OptimizerSettings
    pipeline: PipelineConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The values as given, group by group: plain types, for checkpoints and logs."""
        return asdict(self)


def world_size(environ: Mapping[str, str]) -> int:
    """Number of processes of this run: what torchrun says, 1 without it. ConfigError where that is no number."""
    text = environ.get("WORLD_SIZE", "1")
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(
            f"WORLD_SIZE is {text!r} in the environment: it must be the number of processes; start with torchrun"
        )
    return int(text)


def data_parallel_size(config: Config, world_size: int) -> int:
    """Number of copies of the pipeline among `world_size` processes."""
    return world_size // config.pipeline.pipeline_model_parallel_size


def global_batch_size(config: Config, world_size: int) -> int:
    """Samples in one iteration: as given, or one microbatch on each data parallel rank."""
    return config.training.global_batch_size or config.training.micro_batch_size * data_parallel_size(
        config, world_size
    )


def num_microbatches(config: Config, world_size: int) -> int:
    """Microbatches (m) that each data parallel rank runs in one iteration."""
    a_round = config.training.micro_batch_size * data_parallel_size(config, world_size)
    return global_batch_size(config, world_size) // a_round


def decay_iters(config: Config) -> int:
    """Iterations until the learning rate has decayed."""
    return config.optimizer.lr_decay_iters or config.training.train_iters


def warmup_iters(config: Config) -> float:
    """Iterations of learning rate warmup; a fraction need not give a whole number, as in Megatron."""
    fraction = config.optimizer.lr_warmup_fraction
    return config.optimizer.lr_warmup_iters if fraction is None else fraction * decay_iters(config)


def split_blend(data_path: list[str]) -> tuple[list[str], list[float] | None]:
    """The prefixes and, where given, the weights in `--data-path`; weights and prefixes alternate."""
    if not any(is_number(item) for item in data_path):
        return list(data_path), None
    weights, prefixes = data_path[::2], data_path[1::2]
    given = f"--data-path {' '.join(data_path)}"
    if len(weights) != len(prefixes) or not all(is_number(weight) for weight in weights):
        raise ConfigError(f"{given} does not alternate weights and prefixes: give one PREFIX, or WEIGHT PREFIX pairs")
    if not all(0 < float(weight) < math.inf for weight in weights):
        raise ConfigError(
            f"{given} has a weight that is not above 0: leave its prefix out, or give it a positive weight"
        )
    return prefixes, [float(weight) for weight in weights]


def _check_split(split: str) -> None:
    shares = split.split(",")
    if len(shares) > 3 or not all(is_number(part) and 0 <= float(part) < math.inf for part in shares):
        raise ConfigError(
            f"--split {split!r} is not one to three shares from 0 up, comma-separated: for example --split 969,30,1"
        )
    if float(shares[0]) == 0:
        raise ConfigError(f"--split {split!r} leaves no documents for training: its first share must be above 0")
