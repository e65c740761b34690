"""The house rules that a machine can check: which way imports go, and what must not exist."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "megatron" / "pipeline_parallel"
TOP_LEVEL = {"megatron", "pretrain_gpt.py", "examples", "tests", "tools", "setup.py", "README.md", "LICENSE"}


def imported(path):
    """Every module that a file imports, wherever in it and in whichever way, and every name imported from one."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (above, node.module)))
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def importing(folder, *modules):
    """Files under `folder` that import one of `modules` or a part of it."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        names = [name for name in imported(path) if any(f"{name}.".startswith(f"{module}.") for module in modules)]
        found += [f"{path.relative_to(ROOT)}: {name}" for name in names]
    return found


def test_the_checks_below_see_imports():
    assert importing(ENGINE / "runtime", "torch") and importing(ROOT / "megatron" / "pretrain", "argparse")
    path = ROOT / "megatron" / "pipeline_parallel" / "planning" / "x.py"
    lines = [
        "import a.b",
        "from megatron import pretrain",
        "from ..runtime import channels",
        "from . import op",
        "from c import d as e",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(path), "read_text", lambda self: "\n".join(lines))
        found = set(imported(path))
    assert {
        "a.b",
        "megatron.pretrain",
        "megatron.pipeline_parallel.runtime.channels",
        "megatron.pipeline_parallel.planning.op",
        "c.d",
    } <= found


def test_planning_imports_neither_torch_nor_the_runtime():
    assert (
        importing(
            ENGINE / "planning", "torch", "numpy", "megatron.core", "importlib", "megatron.pipeline_parallel.runtime"
        )
        == []
    )


def test_planning_has_no_clock_no_print_and_no_random_numbers():
    assert importing(ENGINE / "planning", "time", "datetime", "random", "secrets") == []
    for path in (ENGINE / "planning").rglob("*.py"):
        calls = {
            node.func.id
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert "print" not in calls, path


def test_the_engine_imports_neither_flags_nor_the_program():
    assert importing(ENGINE, "argparse", "megatron.pretrain") == []


def test_the_planner_works_where_torch_is_not_installed():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from megatron.pipeline_parallel.planning.builders import Problem, build\n"
        "print(*map(len, build('zb-h1', Problem(pp_size=2, num_microbatches=2)).ranks))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "6 6\n", done.stderr


def test_nothing_hides_or_adds_to_megatron_core():
    assert not (ROOT / "megatron" / "__init__.py").exists()
    assert not (ROOT / "megatron" / "core").exists()
    import megatron.core

    import megatron.pipeline_parallel

    assert Path(megatron.core.__file__).parents[1] != Path(megatron.pipeline_parallel.__file__).parents[1]


def test_the_top_level_holds_what_it_should():
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if files.returncode:
        pytest.skip("not a git checkout")
    names = {name.split("/")[0] for name in files.stdout.splitlines()}
    assert {name for name in names if not name.startswith(".")} <= TOP_LEVEL


def test_the_entry_script_is_short():
    assert len((ROOT / "pretrain_gpt.py").read_text().splitlines()) < 150
