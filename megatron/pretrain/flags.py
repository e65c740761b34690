"""The command line, made from the dataclasses in megatron/pretrain/config.py.

`parse` turns flags into a Config or raises ConfigError with one line; `failure.run_rank` prints that line once for all ranks.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from megatron.pretrain.checks import is_number
from megatron.pretrain.config import Config
from megatron.pretrain.errors import PROGRAM, ConfigError, did_you_mean, flag_name

KNOWN_ELSEWHERE = frozenset(
    """
    --reset-attention-mask --tensor-model-parallel-size --sequence-parallel --context-parallel-size --expert-model-parallel-size
    --num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank --pipeline-model-parallel-layout
    --decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers --account-for-embedding-in-pipeline-split
    --account-for-loss-in-pipeline-split --overlap-p2p-communication --no-overlap-p2p-communication
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --use-torch-fsdp2 --use-megatron-fsdp
    --fp16 --loss-scale --initial-loss-scale --min-loss-scale --loss-scale-window --hysteresis --fp8-format --fp8-recipe
    --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 --transformer-impl --use-flash-attn --attention-backend
    --recompute-granularity --recompute-activations --recompute-method --recompute-num-layers --recompute-modules
    --distribute-saved-activations --cpu-offloading-num-layers --fine-grained-activation-offloading --offload-modules
    --cpu-offload --offload-chunk-num --offload-time --offload-duplex --offload-link-groups --offload-host-memory-limit
    --activation-memory-limit --interleave-group-size --num-seq-splits --costs --search-seconds --optimizer-cpu-offload
    --rampup-batch-size --train-samples --lr-decay-samples --lr-warmup-samples --lr-wsd-decay-iters --lr-wsd-decay-style
    --optimizer --sgd-momentum --start-weight-decay --end-weight-decay --weight-decay-incr-style --decoupled-lr
    --exit-duration-in-mins --exit-signal-handler --manual-gc --skip-train --full-validation
    --train-data-path --valid-data-path --test-data-path --data-args-path --per-split-data-args-path --dataloader-type
    --vocab-file --merge-file --tokenizer-metadata --no-create-attention-mask-in-dataloader --fim-data --sft
    --async-save --ckpt-format --dist-ckpt-format --use-dist-ckpt --ckpt-step --pretrained-checkpoint --no-save-optim
    --no-save-rng
    --no-load-rng --use-checkpoint-args --exit-on-missing-checkpoint --save-retain-interval --non-persistent-save-interval
    --override-opt-param-scheduler --use-checkpoint-opt-param-scheduler --ckpt-convert-format
    --num-experts --moe-router-topk --moe-grouped-gemm --moe-layer-freq --moe-token-dispatcher-type --mtp-num-layers
    --multi-latent-attention --qk-layernorm --add-qkv-bias --squared-relu --apply-layernorm-1p
    --apply-query-key-layer-scaling
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
    --no-gradient-accumulation-fusion --cross-entropy-loss-fusion --use-cpu-initialization --no-persist-layer-norm
    --use-rotary-position-embeddings --use-rope-scaling --no-position-embedding --rotary-interleaved
    --rotary-seq-len-interpolation-factor
    --log-throughput --log-params-norm --log-num-zeros-in-grad --log-timers-to-tensorboard --log-memory-to-tensorboard
    --log-validation-ppl-to-tensorboard --tensorboard-log-interval --tensorboard-queue-size --timing-log-level
    --wandb-project --wandb-exp-name --wandb-save-dir --one-logger-project --profile --profile-step-start --profile-step-end
    --distributed-backend --data-parallel-random-init --deterministic-mode --spec
    """.split()
)
"""Flags of Megatron-LM, and of this project's design, that nothing here acts on yet: refused by name."""


def parse(argv: Sequence[str]) -> Config:
    """Read flags (without the program's name) into a Config; ConfigError is one line that names the flag."""
    parser = build_parser()
    _check_tokens(parser, argv)
    values = vars(parser.parse_args(argv))
    groups = {}
    for name, group_class in get_type_hints(Config).items():
        groups[name] = group_class(**{field.name: values[field.name] for field in fields(group_class)})
    return Config(**groups)


def build_parser() -> argparse.ArgumentParser:
    """One argparse group a dataclass of Config, one flag a field; its mistakes are raised as ConfigError."""
    parser = _Parser(
        prog=PROGRAM,
        description="Pre-train a GPT on pipeline ranks. Flags are Megatron-LM's where it has them.",
        allow_abbrev=False,
    )
    for group_class in get_type_hints(Config).values():
        group = parser.add_argument_group(inspect.getdoc(group_class))
        annotations, texts = get_type_hints(group_class), field_docs(group_class)
        for field in fields(group_class):
            options = _argument_options(field, annotations[field.name])
            group.add_argument(flag_name(field.name), help=_help(field, texts[field.name]), **options)
    return parser


def field_docs(group_class: type) -> dict[str, str]:
    """The string literal under each field of a class, by field name, as one line of text."""
    body = ast.parse(textwrap.dedent(inspect.getsource(group_class))).body[0].body
    docs = {}
    for statement, following in zip(body, body[1:]):
        is_field = isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if is_field and is_text and isinstance(following.value.value, str):
            docs[statement.target.id] = " ".join(following.value.value.split())
    return docs


class _Parser(argparse.ArgumentParser):
    """argparse, except that a mistake is raised as ConfigError in place of a usage text and an exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def _argument_options(field: Field, annotation: Any) -> dict[str, Any]:
    """What argparse needs to know of a field, from its annotation and default."""
    if annotation is bool:
        assert field.default is False, f"{field.name}: a flag without a value can only turn something on"
        return {"action": "store_true"}
    options: dict[str, Any] = {"required": True} if field.default is MISSING else {"default": field.default}
    value_type = _without_none(annotation)
    if get_origin(value_type) is Literal:
        return options | {"choices": get_args(value_type)}
    if get_origin(value_type) is list:
        (item_type,) = get_args(value_type)
        return options | {"type": _VALUE_READERS[item_type], "nargs": "*", "metavar": "VALUE"}
    return options | {"type": _VALUE_READERS[value_type], "metavar": _METAVARS[value_type]}


def _without_none(annotation: Any) -> Any:
    """`X` of `X | None`; anything else as it is."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation
    (value_type,) = (member for member in get_args(annotation) if member is not type(None))
    return value_type


def _text(value: str) -> str:
    # An empty value is nearly always a shell variable that was not set.
    if not value.strip():
        raise argparse.ArgumentTypeError("the value is empty: give one, or leave the flag out")
    return value


_VALUE_READERS = {int: int, float: float, str: _text}
_METAVARS = {int: "N", float: "X", str: "TEXT"}


def _help(field: Field, text: str) -> str:
    if field.default is MISSING:
        text += " (required)"
    elif field.default is not None and field.default is not False:
        text += f" (default: {field.default})"
    return _escaped(text)


def _escaped(text: str) -> str:
    return text.replace("%", "%%")  # argparse formats help texts


def _check_tokens(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Refuse unknown flags and stray values, ahead of argparse: it would report missing flags first."""
    known = dict(_flags_of(parser))
    flag, values_left = "", 0.0
    for token in argv:
        if token.startswith("-") and not is_number(token):
            flag, has_value, _ = token.partition("=")
            if flag not in known:
                raise _unknown_flag(flag, known)
            values_left = known[flag] - bool(has_value)
        elif values_left > 0:
            values_left -= 1
        else:
            takes = f"{flag} takes {'one value' if known[flag] else 'no value'}" if flag else "flags begin with --"
            raise ConfigError(f"unexpected argument {token!r}: {takes}")


def _flags_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, float]]:
    """Each flag and how many values it takes at most."""
    for action in parser._actions:  # argparse has no public way to list them
        most = float("inf") if action.nargs == "*" else float(action.nargs is None)
        for flag in action.option_strings:
            yield flag, most


def _unknown_flag(flag: str, known: Mapping[str, float]) -> ConfigError:
    if flag in KNOWN_ELSEWHERE:
        return ConfigError(f"{flag} is not built yet in this program: leave it out (--help lists what is)")
    return ConfigError(f"unknown flag {flag}{did_you_mean(flag, known)}: --help lists the flags")
