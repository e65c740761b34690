"""Whether a configuration fits: its groups each other, the processes, the disk, and the checkpoint that it resumes.

Nothing here imports torch, so that a mistake is answered at once.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from megatron.pretrain.checks import divisors, listed, nearest_multiples
from megatron.pretrain.config import (
    Config,
    data_parallel_size,
    decay_iters,
    global_batch_size,
    split_blend,
    warmup_iters,
)
from megatron.pretrain.errors import ConfigError, did_you_mean, flag_name, missing_package


def check(config: Config, world_size: int) -> None:
    """Raise ConfigError where groups do not fit each other, `world_size` processes, or the disk."""
    _check_schedule(config.pipeline.pipeline_schedule)
    _check_layers(config)
    _check_batch(config, world_size)
    _check_lengths(config)
    _check_files(config)


TRAINED_SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-h2")
"""What the training program runs so far: one chunk a rank, whole sequences, no memory limit to be given."""


def _check_schedule(name: str) -> None:
    # Here, so that reading a configuration needs no engine.
    from megatron.pipeline_parallel.planning.names import DESIGNED

    if name in TRAINED_SCHEDULES:
        return
    if name in DESIGNED:
        raise ConfigError(
            f"--pipeline-schedule {name} is not built yet in this program: choose one of {listed(TRAINED_SCHEDULES)}"
        )
    raise ConfigError(
        f"--pipeline-schedule {name} is unknown{did_you_mean(name, TRAINED_SCHEDULES)}: "
        f"choose one of {listed(TRAINED_SCHEDULES)}"
    )


def _check_layers(config: Config) -> None:
    layers, ranks = config.model.num_layers, config.pipeline.pipeline_model_parallel_size
    if layers % ranks == 0:
        return
    working = f"{layers} layers run on {listed(divisors(layers))} pipeline ranks, {ranks} ranks on "
    given = f"--pipeline-model-parallel-size {ranks}"
    if ranks > layers:
        raise ConfigError(
            f"{given} is larger than --num-layers {layers}, and each rank needs a layer: {working}a multiple of {ranks} layers"
        )
    raise ConfigError(
        f"{given} does not divide --num-layers {layers}, and each rank takes the same number of layers: "
        f"{working}{nearest_multiples(layers, ranks)} layers"
    )


def _check_batch(config: Config, world_size: int) -> None:
    ranks, training = config.pipeline.pipeline_model_parallel_size, config.training
    if world_size % ranks:
        processes = f"{world_size} process{'es' if world_size > 1 else ''}"
        raise ConfigError(
            f"--pipeline-model-parallel-size {ranks} does not divide {processes}: start a multiple of {ranks} in all, "
            f"on one machine torchrun --nproc-per-node {nearest_multiples(world_size, ranks)}"
        )
    copies = data_parallel_size(config, world_size)
    batch, a_round = global_batch_size(config, world_size), training.micro_batch_size * copies
    if batch % a_round:
        raise ConfigError(
            f"--global-batch-size {batch} does not divide by --micro-batch-size {training.micro_batch_size} * data parallel size "
            f"{copies} = {a_round}: try --global-batch-size {nearest_multiples(batch, a_round)}"
        )


def _check_lengths(config: Config) -> None:
    model = config.model
    if model.position_embedding_type == "learned_absolute" and model.seq_length > model.max_position_embeddings:
        raise ConfigError(
            f"--seq-length {model.seq_length} is above --max-position-embeddings {model.max_position_embeddings}: learned "
            "positions need a row a token; raise the latter, or use --position-embedding-type rope"
        )
    warmup, decay = warmup_iters(config), decay_iters(config)
    if warmup >= decay:
        source = "--train-iters" if config.optimizer.lr_decay_iters is None else "--lr-decay-iters"
        raise ConfigError(
            f"the learning rate warmup of {warmup:g} iterations must end before the decay does: lower --lr-warmup-iters, "
            f"or raise {source} {decay}"
        )


def _check_files(config: Config) -> None:
    data, checkpoint, tensorboard_dir = config.data, config.checkpoint, config.logging.tensorboard_dir
    if data.tokenizer_model is not None and not os.path.isfile(data.tokenizer_model):
        raise ConfigError(
            f"--tokenizer-model {data.tokenizer_model} is not a file: check the path, or make one with tools/train_tokenizer.py"
        )
    for prefix in split_blend(data.data_path)[0] if data.data_path else ():
        missing = [prefix + suffix for suffix in (".bin", ".idx") if not os.path.isfile(prefix + suffix)]
        if missing:
            raise ConfigError(
                f"--data-path {prefix} has no file {' and no file '.join(missing)}: give the prefix of both files without "
                ".bin and .idx, or make them with tools/preprocess_data.py"
            )
    folders = {"save": checkpoint.save, "load": checkpoint.load, "data_cache_path": data.data_cache_path,
               "tensorboard_dir": tensorboard_dir}  # fmt: skip
    for name, path in folders.items():
        if path is not None and os.path.exists(path) and not os.path.isdir(path):
            raise ConfigError(f"{flag_name(name)} {path} is a file, and a folder is needed: give another path")
    # A first run with --save and --load of one folder finds nothing there yet, and the same command then resumes.
    is_own_folder = checkpoint.save is not None and os.path.abspath(checkpoint.load or "") == os.path.abspath(
        checkpoint.save
    )
    if checkpoint.load is not None and not is_own_folder and not os.path.isdir(checkpoint.load):
        raise ConfigError(
            f"--load {checkpoint.load} does not exist: check the path, or leave --load out for a fresh start"
        )
    if tensorboard_dir is not None and importlib.util.find_spec("tensorboard") is None:
        raise missing_package("tensorboard", "--tensorboard-dir")


def compare_configs(given: dict[str, dict[str, Any]], saved: dict[str, dict[str, Any]], folder: str) -> list[str]:
    """What to say about a checkpoint whose run was told other things than this one.

    Raises ConfigError where it is of another model: tensors of equal shapes can still mean something else.
    """
    differences = {
        (group, name): f"{flag_name(name)} was {saved[group][name]}, is {value}"
        for group in ("model", "training", "data")
        for name, value in given[group].items()
        if saved.get(group, {}).get(name, value) != value
    }
    models = [text for (group, name), text in differences.items() if group == "model" and name not in _OF_ONE_RUN]
    if models:
        raise ConfigError(
            f"the checkpoint in --load {folder} is of another model: {'; '.join(models)}: give these flags as when it was "
            "saved, or another --load folder"
        )
    told = [text for (_, name), text in differences.items() if name not in _SILENT]
    return [f"other than when the checkpoint was saved: {'; '.join(told)}"] if told else []


_OF_ONE_RUN = {"attention_dropout", "hidden_dropout", "init_method_std", "max_position_embeddings"}
"""Model flags that a resumed run may change; shapes are compared apart from these."""

_SILENT = {"train_iters", "eval_interval", "eval_iters", "exit_interval", "distributed_timeout_minutes", "num_workers"}
"""Flags that say how a run is run, not what it computes."""
