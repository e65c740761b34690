"""The tokenizer of a run, made by megatron-core, and the vocabulary size that the model gets from it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from megatron.core.tokenizers import MegatronTokenizer
from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase

from megatron.pretrain.errors import ConfigError


class TokenizerFlags(Protocol):
    """What a tokenizer is made from: `DataConfig`, or the parsed flags of tools/preprocess_data.py."""

    tokenizer_type: str
    tokenizer_model: str | None
    vocab_size: int | None


def build_tokenizer(data_config: TokenizerFlags) -> MegatronTokenizerBase:
    """Return megatron-core's tokenizer of the configured type, with a valid end-of-document token (`.eod`).

    Raises ConfigError where the model file can't be read, lacks an end-of-document token, or has another
    number of tokens than --vocab-size says.
    """
    build = BUILDERS.get(data_config.tokenizer_type)
    if build is None:
        raise ConfigError(
            f"--tokenizer-type {data_config.tokenizer_type} is unknown: choose one of {', '.join(sorted(BUILDERS))}"
        )
    return build(data_config)


def _build_sentencepiece(data_config: TokenizerFlags) -> MegatronTokenizerBase:
    path = data_config.tokenizer_model
    if not path:
        raise ConfigError("--tokenizer-type SentencePieceTokenizer needs --tokenizer-model FILE: none was given")
    if not os.path.isfile(path):
        raise ConfigError(
            f"--tokenizer-model {path} is not a file: check the path, or make one with tools/train_tokenizer.py"
        )
    try:
        tokenizer = MegatronTokenizer.from_pretrained(tokenizer_path=path, metadata_path={"library": "sentencepiece"})
    except (RuntimeError, OSError) as error:
        raise ConfigError(
            f"--tokenizer-model {path} can't be read as a SentencePiece model ({error}): give a .model file, or make one "
            "with tools/train_tokenizer.py"
        ) from error
    if tokenizer.eod < 0:
        # Core takes the model's end-of-sentence token for the end of a document; -1 means that it has none.
        raise ConfigError(
            f"--tokenizer-model {path} has no end-of-sentence token, which marks the end of a document: train it with one, "
            "as tools/train_tokenizer.py does"
        )
    if data_config.vocab_size is not None and data_config.vocab_size != tokenizer.vocab_size:
        raise ConfigError(
            f"--vocab-size {data_config.vocab_size} is not the {tokenizer.vocab_size} tokens of --tokenizer-model {path}: "
            "leave --vocab-size out, or give the tokenizer that it belongs to"
        )
    return tokenizer


def _build_null(data_config: TokenizerFlags) -> MegatronTokenizerBase:
    if data_config.vocab_size is None:
        raise ConfigError("--tokenizer-type NullTokenizer needs --vocab-size N, the number of tokens in the data")
    if data_config.vocab_size < 1:
        raise ConfigError(f"--vocab-size {data_config.vocab_size} is too small: it must be at least 1")
    # As in Megatron, the end-of-document token comes on top: its id is N and the tokenizer has N + 1 tokens.
    return MegatronTokenizer.from_pretrained(metadata_path={"library": "null"}, vocab_size=data_config.vocab_size)


BUILDERS: dict[str, Callable[[TokenizerFlags], MegatronTokenizerBase]] = {
    "SentencePieceTokenizer": _build_sentencepiece,
    "NullTokenizer": _build_null,
}


def padded_vocab_size(vocab_size: int, make_divisible_by: int) -> int:
    """Round up to a multiple of `make_divisible_by`, the embedding's rows in Megatron."""
    return -(-vocab_size // make_divisible_by) * make_divisible_by
