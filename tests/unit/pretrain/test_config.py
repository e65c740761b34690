"""The configuration: Megatron's derived values, and one clear line for each mistake."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from megatron.pipeline_parallel.planning import builders
from megatron.pipeline_parallel.planning.names import DESIGNED
from megatron.pretrain.checks import divisors, listed, nearest_multiples
from megatron.pretrain.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerSettings,
    PipelineConfig,
    TrainingConfig,
    data_parallel_size,
    decay_iters,
    global_batch_size,
    num_microbatches,
    split_blend,
    warmup_iters,
)
from megatron.pretrain.errors import ConfigError
from megatron.pretrain.fit import TRAINED_SCHEDULES, check

GROUPS = {
    "model": (
        ModelConfig,
        dict(num_layers=4, hidden_size=128, num_attention_heads=4, seq_length=64, max_position_embeddings=64),
    ),
    "training": (TrainingConfig, dict(micro_batch_size=2, train_iters=20)),
    "optimizer": (OptimizerSettings, dict(lr=1e-3)),
    "pipeline": (PipelineConfig, {}),
    "data": (DataConfig, dict(mock_data=True, tokenizer_type="NullTokenizer", vocab_size=100)),
    "checkpoint": (CheckpointConfig, {}),
    "logging": (LoggingConfig, {}),
}


def make(**changes: object) -> Config:
    """A small valid run, with fields replaced by name."""
    groups = {}
    for name, (group_class, required) in GROUPS.items():
        own = {
            field.name: changes.pop(field.name) for field in dataclasses.fields(group_class) if field.name in changes
        }
        groups[name] = group_class(**(required | own))
    assert not changes, f"no such fields: {changes}"
    return Config(**groups)


def message(error: pytest.ExceptionInfo[ConfigError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_megatron_derives() -> None:
    assert make().model.feedforward_size == 512
    assert make(swiglu=True).model.feedforward_size == 320  # 4 * 128 * 2/3 = 341.3, down to a multiple of 64
    assert make(ffn_hidden_size=77, swiglu=True).model.feedforward_size == 77
    assert make().model.head_size == 32
    assert make(kv_channels=20, hidden_size=130).model.head_size == 20


def test_batch_sizes() -> None:
    config = make(pipeline_model_parallel_size=2, micro_batch_size=3, global_batch_size=24)
    assert data_parallel_size(config, 8) == 4
    assert global_batch_size(config, 8) == 24
    assert num_microbatches(config, 8) == 2
    without = make(pipeline_model_parallel_size=2, micro_batch_size=3)
    assert global_batch_size(without, 8) == 12
    assert num_microbatches(without, 8) == 1


def test_learning_rate_iterations() -> None:
    assert (decay_iters(make()), warmup_iters(make())) == (20, 0)
    config = make(lr_decay_iters=50, lr_warmup_fraction=0.1)
    assert (decay_iters(config), warmup_iters(config)) == (50, 5.0)
    assert warmup_iters(make(lr_warmup_iters=7)) == 7


def test_to_dict_holds_every_field_in_plain_types() -> None:
    config = make(mock_data=False, data_path=["1", "a", "2", "b"])
    values = config.to_dict()
    assert json.loads(json.dumps(values)) == values
    assert values["data"]["data_path"] == ["1", "a", "2", "b"]
    for name, (group_class, _) in GROUPS.items():
        assert set(values[name]) == {field.name for field in dataclasses.fields(group_class)}


def test_groups_are_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().training.seed = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        LoggingConfig(10)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(num_layers=0), "--num-layers is 0: it must be at least 1"),
        (dict(hidden_size=-128), "--hidden-size is -128: it must be at least 1"),
        (dict(train_iters=0), "--train-iters is 0: it must be at least 1"),
        (dict(micro_batch_size=0), "--micro-batch-size is 0: it must be at least 1"),
        (dict(global_batch_size=0), "--global-batch-size is 0: it must be at least 1"),
        (dict(eval_iters=-1), "--eval-iters is -1: it must be at least 0"),
        (dict(eval_interval=0), "--eval-interval is 0: it must be at least 1"),
        (dict(seed=0), "--seed is 0: it must be at least 1"),
        (dict(seed=2**32), "--seed is 4294967296: it must be below 2**32 (4294967296)"),
        (dict(log_interval=0), "--log-interval is 0: it must be at least 1"),
        (dict(pipeline_model_parallel_size=0), "--pipeline-model-parallel-size is 0: it must be at least 1"),
        (dict(num_workers=-1), "--num-workers is -1: it must be at least 0"),
        (dict(lr=math.nan), "--lr is nan: it must be above 0 and finite"),
        (dict(lr=0.0), "--lr is 0.0: it must be above 0 and finite"),
        (dict(clip_grad=math.inf), "--clip-grad is inf: it must be at least 0 and finite"),
        (dict(weight_decay=-0.1), "--weight-decay is -0.1: it must be at least 0 and finite"),
        (dict(hidden_dropout=1.0), "--hidden-dropout is 1.0: it must be from 0 to below 1"),
        (dict(attention_dropout=-0.1), "--attention-dropout is -0.1: it must be from 0 to below 1"),
        (dict(adam_beta2=1.0), "--adam-beta2 is 1.0: it must be from 0 to below 1"),
        (
            dict(hidden_size=100, num_attention_heads=3),
            "--hidden-size 100 does not divide by --num-attention-heads 3: try --hidden-size 99 or 102, or give --kv-channels",
        ),
        (
            dict(group_query_attention=True, num_query_groups=3),
            "--num-attention-heads 4 does not divide by --num-query-groups 3: try --num-query-groups 1, 2 or 4",
        ),
        (dict(num_query_groups=2), "--num-query-groups 2 needs --group-query-attention: add it"),
        (dict(rotary_percent=0.5), "--rotary-percent 0.5 needs --position-embedding-type rope: add it"),
        (
            dict(position_embedding_type="rope", rotary_percent=1.5),
            "--rotary-percent is 1.5: it must be above 0 and at most 1",
        ),
        (
            dict(position_embedding_type="rope", hidden_size=132),
            "--position-embedding-type rope turns pairs of channels, but 33 of a head's 33 channels are turned: choose "
            "--hidden-size, --num-attention-heads, --kv-channels or --rotary-percent so that it is even",
        ),
        (
            dict(hidden_size=16, swiglu=True),
            "--swiglu with --hidden-size 16 leaves no feed-forward layer (2/3 of 4 * hidden size, rounded down to a multiple "
            "of 64): give --ffn-hidden-size",
        ),
        (dict(min_lr=0.1), "--min-lr 0.1 is above --lr 0.001: it must be at most that"),
        (
            dict(lr_warmup_iters=5, lr_warmup_fraction=0.1),
            "--lr-warmup-fraction 0.1 and --lr-warmup-iters 5 both set the warmup: give one of them",
        ),
        (
            dict(lr_warmup_init=1e-4),
            "--lr-warmup-init 0.0001 needs a warmup: give --lr-warmup-iters or --lr-warmup-fraction",
        ),
        (dict(data_path=["a"]), "--data-path a and --mock-data exclude each other: give one of them"),
        (
            dict(mock_data=False),
            "no data to train on: give --data-path PREFIX (made by tools/preprocess_data.py), or --mock-data",
        ),
        (
            dict(mock_data=False, data_path=[]),
            "no data to train on: give --data-path PREFIX (made by tools/preprocess_data.py), or --mock-data",
        ),
        (
            dict(mock_data=False, data_path=["0.3", "a", "0.7"]),
            "--data-path 0.3 a 0.7 does not alternate weights and prefixes: give one PREFIX, or WEIGHT PREFIX pairs",
        ),
        (
            dict(mock_data=False, data_path=["0", "a", "1", "b"]),
            "--data-path 0 a 1 b has a weight that is not above 0: leave its prefix out, or give it a positive weight",
        ),
        (
            dict(split="8, x"),
            "--split '8, x' is not one to three shares from 0 up, comma-separated: for example --split 969,30,1",
        ),
        (
            dict(split="1,1,1,1"),
            "--split '1,1,1,1' is not one to three shares from 0 up, comma-separated: for example --split 969,30,1",
        ),
        (dict(split="0,1"), "--split '0,1' leaves no documents for training: its first share must be above 0"),
        (
            dict(vocab_size=None),
            "--tokenizer-type NullTokenizer needs --vocab-size N, the number of tokens in the data",
        ),
        (
            dict(tokenizer_type="SentencePieceTokenizer"),
            "--tokenizer-type SentencePieceTokenizer needs --tokenizer-model FILE (made by tools/train_tokenizer.py); "
            "without a tokenizer: --tokenizer-type NullTokenizer --vocab-size N",
        ),
        (
            dict(tokenizer_model="m.model"),
            "--tokenizer-model m.model has no use with --tokenizer-type NullTokenizer: leave one of them out",
        ),
        (dict(save_interval=5), "--save-interval 5 needs a folder to save to: give --save DIR"),
        (dict(finetune=True), "--finetune needs a checkpoint to load: give --load DIR"),
        (dict(no_load_optim=True), "--no-load-optim needs a checkpoint to load: give --load DIR"),
    ],
)
def test_a_group_refuses(changes: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        make(**changes)
    assert message(error) == expected


@pytest.mark.parametrize(
    ("changes", "world_size", "expected"),
    [
        (
            dict(num_layers=7, pipeline_model_parallel_size=2),
            2,
            "--pipeline-model-parallel-size 2 does not divide --num-layers 7, and each rank takes the same number of layers: "
            "7 layers run on 1 or 7 pipeline ranks, 2 ranks on 6 or 8 layers",
        ),
        (
            dict(num_layers=4, pipeline_model_parallel_size=8),
            8,
            "--pipeline-model-parallel-size 8 is larger than --num-layers 4, and each rank needs a layer: 4 layers run on "
            "1, 2 or 4 pipeline ranks, 8 ranks on a multiple of 8 layers",
        ),
        (
            dict(pipeline_model_parallel_size=4),
            6,
            "--pipeline-model-parallel-size 4 does not divide 6 processes: start a multiple of 4 in all, on one machine "
            "torchrun --nproc-per-node 4 or 8",
        ),
        (
            dict(pipeline_model_parallel_size=2),
            1,
            "--pipeline-model-parallel-size 2 does not divide 1 process: start a multiple of 2 in all, on one machine "
            "torchrun --nproc-per-node 2",
        ),
        (
            dict(global_batch_size=15, micro_batch_size=2),
            2,
            "--global-batch-size 15 does not divide by --micro-batch-size 2 * data parallel size 2 = 4: "
            "try --global-batch-size 12 or 16",
        ),
        (
            dict(global_batch_size=2, micro_batch_size=3),
            1,
            "--global-batch-size 2 does not divide by --micro-batch-size 3 * data parallel size 1 = 3: try --global-batch-size 3",
        ),
        (
            dict(seq_length=65),
            1,
            "--seq-length 65 is above --max-position-embeddings 64: learned positions need a row a token; raise the latter, "
            "or use --position-embedding-type rope",
        ),
        (
            dict(lr_warmup_iters=20),
            1,
            "the learning rate warmup of 20 iterations must end before the decay does: lower --lr-warmup-iters, or raise "
            "--train-iters 20",
        ),
        (
            dict(pipeline_schedule="zbv"),
            1,
            "--pipeline-schedule zbv is not built yet in this program: choose one of gpipe, 1f1b, zb-h1 or zb-h2",
        ),
        (
            dict(pipeline_schedule="1f2b"),
            1,
            "--pipeline-schedule 1f2b is unknown (did you mean 1f1b?): choose one of gpipe, 1f1b, zb-h1 or zb-h2",
        ),
    ],
)
def test_check_refuses(
    changes: dict[str, object], world_size: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builders, "names", lambda: ["gpipe", "1f1b"])
    with pytest.raises(ConfigError) as error:
        check(make(**changes), world_size)
    assert message(error) == expected


def test_every_size_named_in_a_refusal_works() -> None:
    for layers in range(1, 13):
        for ranks in divisors(layers):
            check(make(num_layers=layers, pipeline_model_parallel_size=ranks), ranks)
    check(make(seq_length=65, position_embedding_type="rope"), 1)


def test_only_schedules_that_the_program_runs_are_accepted() -> None:
    assert set(builders.names()) <= set(DESIGNED)
    for name in DESIGNED:
        if name in TRAINED_SCHEDULES:
            check(make(pipeline_schedule=name), 1)
            place = builders.placement(name, builders.Problem(pp_size=4, num_microbatches=4))
            assert place.chunks_per_rank == 1 and not builders.takes(name) & {"num_sequence_splits"}
        else:
            with pytest.raises(ConfigError, match=f"--pipeline-schedule {name} is not built yet in this program"):
                check(make(pipeline_schedule=name), 1)


def with_dataset(folder: Path, *suffixes: str) -> str:
    for suffix in suffixes:
        (folder / f"text{suffix}").write_bytes(b"")
    return str(folder / "text")


def test_missing_dataset_files_are_named(tmp_path: Path) -> None:
    prefix = with_dataset(tmp_path, ".bin")
    with pytest.raises(ConfigError) as error:
        check(make(mock_data=False, data_path=["1", prefix]), 1)
    assert message(error).startswith(f"--data-path {prefix} has no file {prefix}.idx: give the prefix")
    with pytest.raises(ConfigError, match=r"has no file other\.bin and no file other\.idx"):
        check(make(mock_data=False, data_path=["1", with_dataset(tmp_path, ".idx"), "2", "other"]), 1)
    check(make(mock_data=False, data_path=[prefix]), 1)


def test_missing_tokenizer_model(tmp_path: Path) -> None:
    model = str(tmp_path / "m.model")
    config = make(tokenizer_type="SentencePieceTokenizer", tokenizer_model=model, vocab_size=None)
    with pytest.raises(ConfigError) as error:
        check(config, 1)
    assert message(error).startswith(f"--tokenizer-model {model} is not a file")
    Path(model).write_bytes(b"")
    check(config, 1)


def test_load_folder(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    with pytest.raises(ConfigError) as error:
        check(make(load=folder), 1)
    assert message(error).startswith(f"--load {folder} does not exist")
    check(make(load=folder, save=folder), 1)  # the first run of a command that resumes
    Path(folder).mkdir()
    check(make(load=folder), 1)  # nothing in it: a fresh start


@pytest.mark.parametrize("name", ["save", "load", "data_cache_path", "tensorboard_dir"])
def test_a_file_where_a_folder_belongs(name: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(ConfigError) as error:
        check(make(**{name: str(path)}), 1)
    flag = "--" + name.replace("_", "-")
    assert message(error) == f"{flag} {path} is a file, and a folder is needed: give another path"


def test_missing_tensorboard_is_said_up_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        check(make(tensorboard_dir=str(tmp_path)), 1)
    assert message(error).startswith("--tensorboard-dir needs the Python package tensorboard")


def test_split_blend() -> None:
    assert split_blend(["a"]) == (["a"], None)
    assert split_blend(["a", "b"]) == (["a", "b"], None)
    assert split_blend(["30", "a", "0.7", "b"]) == (["a", "b"], [30.0, 0.7])


def test_words_of_messages() -> None:
    assert listed([1]) == "1"
    assert listed([1, 2, 3]) == "1, 2 or 3"
    assert nearest_multiples(3, 4) == "4"
    assert nearest_multiples(5, 4) == "4 or 8"
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
