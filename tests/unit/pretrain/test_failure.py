"""What a rank says and does when it fails before torch.distributed runs; tests/distributed/test_program.py has the rest."""

import io

import pytest

from megatron.pretrain import failure
from megatron.pretrain.errors import ConfigError
from megatron.pretrain.failure import run_rank


def mistake():
    raise ConfigError("first line\nsecond line")


def fault():
    raise ValueError("ours")


@pytest.mark.parametrize("environ", [{}, {"RANK": "0"}, {"RANK": "3"}])
def test_a_mistake_is_one_line_and_status_2(environ):
    stderr = io.StringIO()
    with pytest.raises(SystemExit) as ended:
        run_rank(mistake, environ, stderr=stderr, patience_s=0)
    assert (ended.value.code, stderr.getvalue()) == (2, "pretrain_gpt.py: error: first line second line\n")


def test_a_fault_of_the_program_has_its_traceback_and_status_1():
    stderr = io.StringIO()
    with pytest.raises(SystemExit) as ended:
        run_rank(fault, {"RANK": "0"}, stderr=stderr)
    assert ended.value.code == 1
    assert "Traceback" in stderr.getvalue()
    assert stderr.getvalue().endswith("pretrain_gpt.py: rank 0 failed: ValueError: ours\n")


def test_rank_0_speaks_first_and_another_only_if_no_launcher_has_ended_it(monkeypatch):
    happened = []
    monkeypatch.setattr(failure.time, "sleep", happened.append)
    monkeypatch.setattr(failure, "_report", lambda error, environ, stderr: happened.append(environ["RANK"]))
    for rank in ("0", "1"):
        with pytest.raises(SystemExit):
            run_rank(mistake, {"RANK": rank}, patience_s=4.0)
    assert happened == ["0", 4.0, "1"]


def test_success_passes_through():
    run_rank(lambda: None, {})
