"""The command line: made from the dataclasses, and one line for each mistake."""

import argparse
import io
import os
import subprocess
import sys
from dataclasses import Field, fields
from pathlib import Path
from typing import get_type_hints

import pytest

from megatron.pretrain.config import Config, DataConfig, ModelConfig
from megatron.pretrain.errors import ConfigError, flag_name
from megatron.pretrain.failure import run_rank
from megatron.pretrain.fit import check
from megatron.pretrain.flags import KNOWN_ELSEWHERE, build_parser, field_docs, parse

ROOT = Path(__file__).resolve().parents[3]
REQUIRED = {
    "--num-layers": "4",
    "--hidden-size": "128",
    "--num-attention-heads": "4",
    "--seq-length": "64",
    "--max-position-embeddings": "64",
    "--micro-batch-size": "2",
    "--train-iters": "20",
    "--lr": "1e-3",
}
SMALL = [word for pair in REQUIRED.items() for word in pair]
SMALL += ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]
ALL_FIELDS = [(group, field) for group in get_type_hints(Config).values() for field in fields(group)]


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return build_parser()


@pytest.fixture(scope="module")
def docs() -> dict[type, dict[str, str]]:
    return {group: field_docs(group) for group in get_type_hints(Config).values()}


def test_values_arrive_with_their_types() -> None:
    config = parse(
        [*SMALL, "--bf16", "--min-lr=1e-5", "--lr-decay-style", "cosine", "--save", "out", "--save-interval", "5"]
    )
    assert config.model == ModelConfig(
        num_layers=4, hidden_size=128, num_attention_heads=4, seq_length=64, max_position_embeddings=64
    )
    assert (config.training.train_iters, config.training.bf16) == (20, True)
    assert (config.optimizer.lr, config.optimizer.min_lr, config.optimizer.lr_decay_style) == (1e-3, 1e-5, "cosine")
    assert (config.checkpoint.save, config.checkpoint.save_interval) == ("out", 5)
    assert config.data == DataConfig(mock_data=True, tokenizer_type="NullTokenizer", vocab_size=100)


def test_defaults_are_the_dataclasses_own() -> None:
    values = parse(SMALL).to_dict()
    given = {"mock_data": True, "tokenizer_type": "NullTokenizer", "vocab_size": 100}
    for name, group in get_type_hints(Config).items():
        for field in fields(group):
            if flag_name(field.name) not in REQUIRED:
                assert values[name][field.name] == given.get(field.name, field.default), field.name


def test_a_list_takes_several_values_and_the_last_of_a_repeated_flag_counts() -> None:
    without_mock = [word for word in SMALL if word != "--mock-data"]
    config = parse([*without_mock, "--data-path", "0.3", "a", "0.7", "b", "--split", "8,1,1", "--lr", "2e-3"])
    assert config.data.data_path == ["0.3", "a", "0.7", "b"]
    assert config.data.split == "8,1,1"
    assert config.optimizer.lr == 2e-3


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (["--num-layer", "4"], "unknown flag --num-layer (did you mean --num-layers?): --help lists the flags"),
        (["--num_layers", "4"], "unknown flag --num_layers (did you mean --num-layers?): --help lists the flags"),
        (["--sve=out"], "unknown flag --sve (did you mean --save?): --help lists the flags"),
        (["--xyzzy"], "unknown flag --xyzzy: --help lists the flags"),
        (["-n", "4"], "unknown flag -n: --help lists the flags"),
        (["--fp16"], "--fp16 is not built yet in this program: leave it out (--help lists what is)"),
        (
            ["--tensor-model-parallel-size=2"],
            "--tensor-model-parallel-size is not built yet in this program: leave it out (--help lists what is)",
        ),
        (["--lr", "fast"], "--lr: invalid float value: 'fast'"),
        (["--train-iters", "1.5"], "--train-iters: invalid int value: '1.5'"),
        (["--train-iters"], "--train-iters: expected one argument"),
        (["--lr", "1", "2"], "unexpected argument '2': --lr takes one value"),
        (["--lr=1", "2"], "unexpected argument '2': --lr takes one value"),
        (["--bf16", "true"], "unexpected argument 'true': --bf16 takes no value"),
        (["--bf16=true"], "--bf16: ignored explicit argument 'true'"),
        (["--save", ""], "--save: the value is empty: give one, or leave the flag out"),
        (["--lr", "-1"], "--lr is -1.0: it must be above 0 and finite"),
        (["--pipeline-model-parallel-size", "3"], "--pipeline-model-parallel-size 3 does not divide --num-layers 4"),
        (["--global-batch-size", "3"], "--global-batch-size 3 does not divide by --micro-batch-size 2"),
        (
            ["--pipeline-schedule", "dualpipe-v"],
            "--pipeline-schedule dualpipe-v is not built yet in this program: choose one of ",
        ),
        (["--load", "no/such/folder"], "--load no/such/folder does not exist"),
        (["--data-path", "a"], "--data-path a and --mock-data exclude each other: give one of them"),
    ],
)
def test_a_bad_command_line_gives_one_line_that_names_the_flag(extra: list[str], expected: str) -> None:
    stderr = io.StringIO()
    with pytest.raises(SystemExit) as ended:
        run_rank(lambda: check(parse([*SMALL, *extra]), 1), {}, stderr=stderr)
    assert ended.value.code == 2
    line = stderr.getvalue()
    assert line.startswith(f"pretrain_gpt.py: error: {expected}")
    assert line.count("\n") == 1 and line.endswith("\n")


def test_bad_choices_are_listed() -> None:
    with pytest.raises(ConfigError, match="^--normalization: invalid choice: .*LayerNorm.*RMSNorm"):
        parse([*SMALL, "--normalization", "BatchNorm"])


def test_missing_flags_are_named_all_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        parse(["--lr", "1"])
    missing = [flag for flag in REQUIRED if flag != "--lr"]
    assert str(error.value) == f"the following arguments are required: {', '.join(missing)}"


def test_an_unknown_flag_comes_before_missing_ones() -> None:
    with pytest.raises(ConfigError, match="^unknown flag --lrr"):
        parse(["--lrr", "1"])


def test_a_value_without_a_flag() -> None:
    with pytest.raises(ConfigError, match="^unexpected argument 'text': flags begin with --$"):
        parse(["text", *SMALL])


@pytest.mark.parametrize(("group", "field"), ALL_FIELDS, ids=[field.name for _, field in ALL_FIELDS])
def test_help_is_the_string_under_the_field(
    group: type, field: Field, parser: argparse.ArgumentParser, docs: dict[type, dict[str, str]]
) -> None:
    text = docs[group][field.name]
    assert text.endswith(".") and len(text) > 10
    (action,) = [action for action in parser._actions if flag_name(field.name) in action.option_strings]
    assert action.help.replace("%%", "%").startswith(text)


def test_each_flag_exists_once() -> None:
    names = [field.name for _, field in ALL_FIELDS]
    assert len(names) == len(set(names))
    assert not {flag_name(name) for name in names} & KNOWN_ELSEWHERE


def test_help_prints(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    for group in get_type_hints(Config).values():
        assert f"\n{group.__doc__}:\n" in printed
    assert "(default: 969, 30, 1)" in printed


def test_reading_the_command_line_imports_no_torch() -> None:
    code = (
        "import sys, megatron.pretrain.log\n"
        "from megatron.pretrain.flags import parse\n"
        "from megatron.pretrain.fit import check\n"
        "check(parse(sys.argv[1:]), 1)\n"
        "print(any(name.partition('.')[0] == 'torch' for name in sys.modules))\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, *SMALL], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("False\n", "", 0)
