"""tools/schedule.py: what show, export, check and compare print, and one line for each mistake."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.pipeline_parallel.planning import builders, request
from megatron.pipeline_parallel.planning.formats import read_schedule
from megatron.pipeline_parallel.planning.greedy import MemoryLimitError
from megatron.pipeline_parallel.planning.names import DESIGNED
from megatron.pipeline_parallel.planning.op import Placement
from megatron.pipeline_parallel.planning.request import Request
from megatron.pipeline_parallel.planning.simulate import simulate
from megatron.pipeline_parallel.planning.validate import validate

ROOT = Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools" / "schedule.py"
SIZES = ["--pipeline-model-parallel-size", "4", "--num-microbatches", "8"]


@pytest.fixture(scope="module")
def tool():
    sys.path.insert(0, str(TOOL.parent))
    import schedule

    yield schedule
    sys.path.remove(str(TOOL.parent))


@pytest.fixture
def run(tool, capsys):
    """Runs a command line in this process: (exit status, stdout, stderr)."""

    def run(*argv):
        status = tool.main([str(word) for word in argv])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def prints(run):
    """Runs a command line that must succeed: its stdout."""

    def prints(*argv):
        status, out, err = run(*argv)
        assert (status, err) == (0, ""), err
        return out

    return prints


def in_a_process(*argv, **options):
    return subprocess.run([sys.executable, TOOL, *argv], capture_output=True, text=True, timeout=60, **options)


def figures(text):
    """The summary's rows, by their first words."""
    rows = [re.match(r"(\S+(?: \S+)*)  +(\S.*)", line) for line in text.splitlines()]
    return {row[1]: row[2] for row in rows if row}


def test_show_prints_what_is_planned_the_grid_and_the_figures(prints):
    out = prints("show", "--schedule", "zb-h1", *SIZES)
    head, grid, summary = out.strip().split("\n\n")
    assert figures(head)["schedule"] == "zb-h1"
    assert figures(head)["sizes"] == "p = 4, v = 1, m = 8, placement loop"
    assert figures(head)["memory a stage"] == "M_B 1, M_W 1, M_W/M_B 1"
    assert [f"rank {rank}" in grid for rank in range(5)] == [True] * 4 + [False]
    rows = figures(summary)
    assert rows["makespan"] == "27"
    assert rows["bubble rate"].startswith(f"{1 - 8 * 3 / 27:.4f} of the rectangle")
    assert rows["span bubble rate"].startswith(f"{1 - 8 * 3 / 27:.4f} of the longest span")
    assert rows["peak"] == "4 4 4 4 microbatches, a rank"
    assert rows["messages"].startswith("48, of unknown size")
    assert rows["lower bound"] == "27 for any schedule; this makespan is 1.0000 of it"


def test_streams_show_every_op_with_its_stream_and_what_it_waits_for(prints):
    out = prints("show", "--schedule", "1f1b", *SIZES, "--streams")
    body = out.split("\n\n")[1]
    assert "waits for" in body
    for op in ("F 0.0 mb7 s0", "SEND_FORWARD 2.0 mb3 s0", "RECV_BACKWARD 0.0 mb0 s0", "BW 3.0 mb0 s0"):
        assert op in body


def test_one_number_is_for_all_chunks_of_a_rank_and_a_list_is_for_each_stage(prints):
    out = prints("show", "--schedule", "1f1b", *SIZES, "--time-f", "1,2,3,4", "--time-b", "2", "--time-comm", "0.5")
    assert figures(out)["times a stage"] == "F (1 2 3 4), B 2, W 1, message 0.5"


def test_message_times_may_be_a_matrix(prints):
    flags = ["--schedule", "1f1b", "--pipeline-model-parallel-size", "2", "--num-microbatches", "1"]
    out = prints("show", *flags, "--time-comm", "0,5,7,0")
    assert figures(out)["times a stage"].endswith("message (0 5; 7 0)")
    assert figures(out)["makespan"] == f"{1 + 5 + 3 + 7 + 2}"


def test_a_limit_is_printed_as_memory_and_in_microbatches(prints):
    out = prints("show", "--schedule", "1f1b", *SIZES, "--activation-memory-limit", "1.5", "--memory-b", "2")
    assert figures(out)["limit"] == "12 a rank = 6 microbatches of M_B = 1.5 of what 1F1B holds"
    memory = ["--memory-b", "1.5GiB", "--memory-w", "1GiB", "--memory-message", "16MiB"]
    out = prints("show", "--schedule", "1f1b", *SIZES, *memory, "--activation-memory-limit", "9GiB")
    assert figures(out)["limit"] == "9 GiB a rank = 6 microbatches of M_B = 1.5 of what 1F1B holds"
    assert figures(out)["peak memory"] == "6 GiB 4.5 GiB 3 GiB 1.5 GiB, a rank"
    assert figures(out)["messages"] == "48, together 768 MiB"


@pytest.mark.parametrize("memory", [(), ("--memory-b", "1.7", "--memory-w", "0.3"), ("--memory-b", "3MB", "--memory-w", "5MB")])  # fmt: skip
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_the_smallest_limit_that_an_error_names_is_accepted_and_less_is_not(run, name, memory):
    flags = ["show", "--schedule", name, *SIZES, *memory, "--activation-memory-limit"]
    _, _, err = run(*flags, "0.001")
    smallest = re.search(r"the smallest that fits is ([^ ,]+)(?:, or (\S+) without a unit)?", err)
    for limit in filter(None, smallest.groups()):
        assert run(*flags, limit)[0] == 0
        number, unit = re.fullmatch(r"([\d.]+)(\w*)", limit).groups()
        status, _, err = run(*flags, f"{float(number) * 0.999}{unit}")
        assert status == 2 and "the smallest that fits" in err


def test_a_builder_that_finds_no_order_within_the_limit_names_the_smallest_in_the_flags_units(run, monkeypatch):
    def build(name, problem):
        raise MemoryLimitError(1, 0.0, (3.0 * 2**30, 4.0 * 2**30, 2.0 * 2**30, 0.0))

    monkeypatch.setattr(request, "build", build)
    memory = ["--memory-b", "1GiB", "--memory-w", "1GiB"]
    _, _, err = run("show", "--schedule", "1f1b", *SIZES, *memory, "--activation-memory-limit", "0.5")
    assert (
        "--activation-memory-limit 0.5 is less than schedule '1f1b' holds: the smallest that fits is 4GiB, or 1" in err
    )
    _, _, err = run("compare", *SIZES, *memory, "--activation-memory-limit", "2GiB")
    assert "no schedule fits --activation-memory-limit: the smallest that fits is 4GiB, or 1 without a unit" in err


def test_compare_lists_what_fits_by_makespan_and_says_why_others_do_not(prints):
    out = prints("compare", *SIZES, "--activation-memory-limit", "1")
    asked, table, legend, left_out = out.strip().split("\n\n")
    assert "p = 4, m = 8" in asked and "M_W/M_B 1" in asked and "4 microbatches of M_B = 1 of what 1F1B holds" in asked
    names = [line.split()[0] for line in table.splitlines()[1:]]
    assert {"1f1b", "zb-h1"} <= set(names) and "gpipe" not in names
    assert names.index("zb-h1") < names.index("1f1b")
    makespans = [float(re.split(r"  +", line)[4]) for line in table.splitlines()[1:]]
    assert makespans == sorted(makespans)
    assert "within the limit" in legend
    assert re.search(r"^  gpipe: .*the smallest that fits is 2 ", left_out, re.MULTILINE)


def test_compare_holds_every_built_schedule_once(prints):
    out = prints("compare", *SIZES)
    _, table, *others = out.strip().split("\n\n")
    named = [line.split()[0] for line in table.splitlines()[1:]]
    named += re.findall(r"^  (\S+): ", "\n".join(others), re.MULTILINE)
    assert sorted(named) == sorted(builders.names())


def test_compare_says_which_flags_hold_for_some_only(prints, tmp_path):
    file = tmp_path / "placement.json"
    file.write_text("[[0, 0], [1, 0], [0, 1], [1, 1]]")
    sizes = ("--pipeline-model-parallel-size", "2", "--num-microbatches", "3")
    out = prints("compare", *sizes, "--placement", str(file), "--num-seq-splits", "3", "--interleave-group-size", "2")
    assert "--placement holds for zb-auto, gpipe;" in out or "--placement holds for gpipe, zb-auto;" in out
    assert "--num-seq-splits holds for seq-1f1b;" in out and "--interleave-group-size holds for gis-h;" in out


def test_errors_of_a_file_name_the_file_and_no_planning_flag(run, tmp_path):
    """A truncated file was once blamed on the memory limit: its error spoke of a delimiter."""
    file = tmp_path / "schedule.json"
    for text in ('{"format": "megatron-pipeline-schedule" ', "schedule x\nplacement loop 0,0\nmicrobatches 0\n"):
        file.write_text(text)
        status, _, err = run("check", str(file))
        assert status == 2 and str(file) in err and "--" not in err, err


def test_text_without_costs_says_so(prints, tmp_path):
    file = tmp_path / "schedule.txt"
    prints("export", "--schedule", "1f1b", *SIZES, "--time-f", "5", "--format", "text", "--output", str(file))
    assert "A schedule as text has no costs" in prints("check", str(file))


def test_times_beyond_any_number_are_refused(run):
    for command in (["show"], ["export", "--format", "json"]):
        status, out, err = run(*command, "--schedule", "1f1b", *SIZES, "--time-f", "1e308", "--time-b", "1e308")
        assert (status, out) == (2, "") and "give --time-f" in err


def test_compare_shows_the_figures_that_show_prints(prints):
    row = next(line for line in prints("compare", *SIZES).splitlines() if line.startswith("1f1b "))
    _, v, bubble, span, makespan, peak, memory, messages, bound = re.split(r"  +", row)
    rows = figures(prints("show", "--schedule", "1f1b", *SIZES))
    assert (rows["makespan"], rows["lower bound"].split()[0]) == (makespan, bound)
    assert (rows["bubble rate"].split()[0], rows["span bubble rate"].split()[0]) == (bubble, span)
    assert (v, peak, memory, messages) == ("1", "4", "4", rows["messages"].split(",")[0])


def test_compare_names_the_smallest_limit_where_nothing_fits(run):
    status, out, err = run("compare", *SIZES, "--activation-memory-limit", "0.01")
    assert (status, out) == (2, "")
    smallest = re.search(r"smallest that fits is (\S+)", err)[1]
    assert run("compare", *SIZES, "--activation-memory-limit", smallest)[0] == 0


@pytest.mark.parametrize("format", ["json", "text"])
def test_an_export_is_a_program_with_messages_that_check_accepts(prints, tmp_path, format):
    path = tmp_path / "schedule"
    flags = ["--schedule", "zb-h1", *SIZES, "--time-f", "1.1"]
    assert prints("export", *flags, "--format", format, "--output", path) == ""
    assert prints("export", *flags, "--format", format) == path.read_text()
    schedule, costs = read_schedule(path.read_text())
    assert schedule.lowered and (schedule.name, schedule.num_microbatches) == ("zb-h1", 8)
    validate(schedule, costs)
    out = prints("check", path)
    assert out.endswith("schedule is valid\n")
    if format == "json":
        assert figures(out)["makespan"] == figures(prints("show", *flags))["makespan"]


def test_an_exported_summary_follows_from_order_and_costs(prints):
    data = json.loads(prints("export", "--schedule", "1f1b", *SIZES, "--format", "json", "--time-comm", "0.25"))
    schedule, costs = read_schedule(json.dumps(data))
    timeline = simulate(schedule, costs)
    assert data["summary"]["makespan"] == timeline.makespan == max(op["end"] for ops in data["ranks"] for op in ops)
    assert data["summary"]["bubble_rate"] == timeline.bubble_rate
    assert data["summary"]["span_bubble_rate"] == timeline.span_bubble_rate
    assert data["summary"]["peak"] == [4, 3, 2, 1]
    assert data["summary"]["lower_bound"] <= timeline.makespan


def test_check_prints_the_grid_of_a_broken_schedule_with_the_bad_cell_marked(prints, run, tmp_path):
    text = prints("export", "--schedule", "1f1b", *SIZES, "--format", "text")
    path = tmp_path / "broken"
    path.write_text(text.replace("F 3.0 mb0 s0; BW 3.0 mb0 s0", "BW 3.0 mb0 s0; F 3.0 mb0 s0"))
    status, out, err = run("check", path)
    assert status == 2 and err.count("\n") == 1
    assert err.startswith("schedule.py: error: ") and "BW 3.0 mb0 s0" in err
    assert ">BW3.0<" in out and "rank 3" in out


@pytest.mark.parametrize(
    ("key", "value"),
    [("makespan", 34.0), ("bubble_rate", 0.1), ("peak", [4, 3, 2, 2]), ("makespan", "33"), ("lower_bound", 99)],
)
def test_check_tells_a_summary_that_does_not_follow(prints, run, tmp_path, key, value):
    data = json.loads(prints("export", "--schedule", "1f1b", *SIZES, "--format", "json"))
    data["summary"][key] = value
    path = tmp_path / "schedule.json"
    path.write_text(json.dumps(data))
    status, _, err = run("check", path)
    assert status == 2 and f"summary.{key} is" in err and err.count("\n") == 1


def test_check_refuses_a_schedule_over_its_own_limit(prints, run, tmp_path):
    data = json.loads(prints("export", "--schedule", "1f1b", *SIZES, "--format", "json"))
    data["costs"]["limits"]["device"] = 3
    path = tmp_path / "schedule.json"
    path.write_text(json.dumps(data))
    status, out, err = run("check", path)
    assert status == 2 and "rank 0" in err and err.count("\n") == 1
    assert ">F0.3<" in out


def test_a_placement_comes_from_a_file(tool, tmp_path):
    path = tmp_path / "placement.json"
    path.write_text("[[1, 0], [0, 0], [0, 1], [1, 1]]")
    asked = Request(pp_size=2, num_microbatches=2)
    assert tool.read_placement(str(path), asked) == Placement(name="custom", stages=((1, 0), (0, 0), (0, 1), (1, 1)))
    assert tool.read_placement("v", asked) == Placement.v(2)
    assert tool.read_placement("loop", replace(asked, chunks_per_rank=3)) == Placement.loop(2, 3)


PLAN = "--schedule 1f1b --pipeline-model-parallel-size 4 --num-microbatches 8"
BAD = [
    ("", "a command is missing"),
    ("shwo", "unknown command 'shwo' (did you mean show?)"),
    ("--schedule 1f1b show", "unknown command '--schedule'"),
    (f"plot {PLAN} --output x.svg", "plot is not built yet"),
    ("show --schedule 1f1b --num-microbatches 8", "required: --pipeline-model-parallel-size"),
    ("compare --pipeline-model-parallel-size 8", "required: --num-microbatches"),
    (f"show {PLAN} --schedule gpipe", "--schedule is given 2 times"),
    ("show --schedule zb-h3 --pipeline-model-parallel-size 4 --num-microbatches 8", "--schedule: 'zb-h3' is unknown (did you mean zb-h"),  # fmt: skip
    ("show --schedule auto --pipeline-model-parallel-size 4 --num-microbatches 8", "--schedule: auto is not built yet"),
    ("show --schedule 1f1b --pipeline-model-parallel-size 4 --num-microbatches 0", "--num-microbatches: '0' is not a whole number of at least 1"),  # fmt: skip
    ("show --schedule 1f1b --pipeline-model-parallel-size -4 --num-microbatches 8", "--pipeline-model-parallel-size: '-4' is not"),  # fmt: skip
    ("show --schedule 1f1b --pipeline-model-parallel-size 4 --num-microbatches 1e3", "'1e3' is not a whole number"),
    ("show --schedule 1f1b --pipeline-model-parallel-size 1000000000 --num-microbatches 8", "at most 4000000 are planned"),  # fmt: skip
    ("compare --pipeline-model-parallel-size 4 --num-microbatches 1000000000", "at most 4000000 are planned"),
    ("show --schedule 1f1b --pipeline-model-parallel-size 4 --num-microbatches 99999999999999999", "15 digits"),
    ("show --schedule 1f1b --pipeline-model-parallel-size 1000000000 --num-microbatches 8 --placement loop", "at most 4000000"),
    (f"show {PLAN} --placement loop", "--placement loop goes with any number of chunks: give --num-virtual"),
    (f"show {PLAN} --placement v", "(see --placement)"),
    (f"show {PLAN} --placement v --num-virtual-stages-per-pipeline-rank 1", "(see "),  # fmt: skip
    (f"show {PLAN} --num-virtual-stages-per-pipeline-rank 2", "one chunk a rank, got 2 chunks (see --num-virtual-stages-per-pipeline-rank)"),  # fmt: skip
    (f"show {PLAN} --num-seq-splits 2", "no sequence splits, got num_sequence_splits 2 (see --num-seq-splits)"),
    (f"show {PLAN} --interleave-group-size 2", "(see --interleave-group-size)"),
    (f"show {PLAN} --num-microbatch 9", "show has no flag --num-microbatch (did you mean --num-microbatches?)"),
    (f"show {PLAN} extra", "unrecognized arguments: extra"),
    (f"show {PLAN} --streams=yes", "--streams: ignored explicit argument 'yes'"),
    (f"show {PLAN} --time-f", "--time-f: expected one argument"),
    (f"show {PLAN} --time-f fast", "--time-f: 'fast' is not a number"),
    (f"show {PLAN} --time-f 1,2,3", "--time-f has 3 numbers: needs 1, or 4 (p * v = 4 * 1), one a stage"),
    (f"show {PLAN} --time-b nan", "--time-b: 'nan' is not a finite number"),
    (f"show {PLAN} --time-w=-1", "--time-w: '-1' is not a finite number of at least 0"),
    (f"show {PLAN} --time-comm 1,2", "--time-comm has 2 numbers: needs 1, or 16 (p * p)"),
    (f"show {PLAN} --memory-b 1.5GiB", "--memory-w has no unit (its default is 1, without one) where other memory has bytes"),  # fmt: skip
    (f"show {PLAN} --memory-b 1.5GiB,2 --memory-w 1GiB", "--memory-b: '1.5GiB,2' mixes bytes and numbers"),
    (f"show {PLAN} --memory-b 1.5gb --memory-w 1GiB", "--memory-b: '1.5gb' has the unknown unit 'gb'; known: B, kB"),
    (f"show {PLAN} --memory-message 1MiB", "--memory-message has bytes where other memory has no unit"),
    (f"show {PLAN} --activation-memory-limit 40GiB", "--activation-memory-limit 40GiB is in bytes: give --memory-b and"),
    (f"show {PLAN} --activation-memory-limit 1,2", "--activation-memory-limit: '1,2' is 2 amounts: needs one"),
    (f"show {PLAN} --activation-memory-limit 0.5", "the smallest that fits is 1 (4 in the unit of --memory-b)"),
    ("show --schedule zb-h1 --pipeline-model-parallel-size 4 --num-microbatches 8 --memory-b 0 --activation-memory-limit 9", "no multiple of what 1F1B holds does, as --memory-b is 0 on a rank"),
    (f"show {PLAN} --placement no/such/file", "--placement is loop, v or a file; the file 'no/such/file' can't be read"),  # fmt: skip
    (f"show {PLAN} --time-comm 1e9", "of its shortest ops wide: show it with --streams"),
    (f"show {PLAN} --output x", "show has no flag --output"),
    (f"export {PLAN}", "required: --format"),
    (f"export {PLAN} --format chrome-trace", "--format: chrome-trace is not built yet: choose one of json or text"),
    (f"export {PLAN} --format torch-csv", "--format: torch-csv is not built yet"),
    (f"export {PLAN} --format jsn", "--format: 'jsn' is unknown (did you mean json?)"),
    (f"export {PLAN} --format json --output no/such/folder/x", "--output 'no/such/folder/x' can't be written (No such file or directory)"),  # fmt: skip
    ("check", "required: FILE"),
    ("check no/such/file", "'no/such/file' can't be read (No such file or directory)"),
    ("check .", "'.' can't be read (Is a directory)"),
    ("check /dev/null", "the file is empty"),
    ("check x --time-f 1", "check has no flag --time-f"),
]  # fmt: skip
BAD += [
    (f"show {PLAN} {flag} 1", f"{flag} is not built yet in this program: leave it out")
    for flag in (
        "--cpu-offload", "--offload-chunk-num", "--offload-time", "--offload-duplex", "--offload-link-groups",
        "--offload-host-memory-limit", "--recompute-method", "--recompute-num-layers", "--costs", "--search-seconds",
    )
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), BAD)
def test_a_bad_command_line_is_one_line_and_status_2(run, line, message):
    status, out, err = run(*line.split())
    assert (status, out) == (2, "")
    assert err.startswith("schedule.py: error: ") and err.count("\n") == 1 and err.endswith("\n")
    assert message in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"\x80\x04\x95", "is not UTF-8 text (byte 0)"),
        (b"hello", "the file begins with 'hello'"),
        (b"{", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"0F0,0F1\n", "PyTorch's CSV of a schedule, which is not built yet"),
        (b",0F0\n", "PyTorch's CSV"),
        (b'{"traceEvents": []}', "key 'format' is null"),
        (b"schedule x\nplacement y 0,0 99999999,0\n", "fill ranks and chunks from 0"),
        (b"schedule x\nplacement y 0,0\nmicrobatches 999999999999\nsequence_splits 1\nlowered 0\nrank F 0.0 mb0 s0", "are read"),
        (b"schedule x\nplacement y 0,0\nmicrobatches 1\nsequence_splits 1\nlowered 0\nrank Q 0.0 mb0 s0", "line 6"),
        (b"schedule x\nplacement y 0,0\nmicrobatches 1\nsequence_splits 0\nlowered 0\nrank F 0.0 mb0 s0", "sequence splits"),
        (b"schedule x\nplacement y 0,0\nmicrobatches 1\nsequence_splits 1\nlowered 0", "programs for 0 ranks"),
    ],
)  # fmt: skip
def test_a_broken_file_is_one_line_and_status_2(run, tmp_path, content, message):
    path = tmp_path / "file"
    path.write_bytes(content)
    status, _, err = run("check", path)
    assert status == 2
    assert err.startswith("schedule.py: error: ") and err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("content", ["", "[]", "{}", "[[0]]", "[[0, 0], [0, 0]]", "[[0, 0.5]]", "[[true, 0]]", "[" * 9999, "[[0, 0], [9999999999, 0]]", '["ab"]'])  # fmt: skip
def test_a_broken_placement_file_is_one_line_and_status_2(run, tmp_path, content):
    path = tmp_path / "placement"
    path.write_text(content)
    status, out, err = run("show", *PLAN.split(), "--placement", path)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("schedule.py: error: --placement ")


def test_names_of_the_design_that_are_not_built_are_refused_by_name(run):
    missing = [name for name in DESIGNED if name not in builders.names()]
    assert missing
    for name in missing:
        status, _, err = run("show", "--schedule", name, *SIZES)
        assert status == 2 and f"--schedule: {name} is not built yet: choose one of " in err


def test_every_built_schedule_shows_exports_and_checks(prints, tmp_path):
    for name in builders.names():
        prints("show", "--schedule", name, *SIZES)
        prints("show", "--schedule", name, *SIZES, "--streams")
        prints("export", "--schedule", name, *SIZES, "--format", "json", "--output", tmp_path / name)
        prints("check", tmp_path / name)


def test_it_runs_from_any_folder_and_without_torch(tmp_path):
    flags = ["export", "--schedule", "1f1b", *SIZES, "--format", "json", "--output", "out.json"]
    # -S leaves installed packages out: what is imported is the checkout's and Python's own.
    done = subprocess.run(
        [sys.executable, "-S", "-E", TOOL, *flags], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:]; sys.path[0] = sys.argv[0].rpartition('/')[0]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally: print(sorted({'torch', 'numpy', 'megatron.core'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, TOOL, *flags], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
    assert in_a_process("check", "out.json", cwd=tmp_path).stdout.endswith("out.json is valid\n")


def test_a_mistake_ends_a_process_with_status_2_and_no_traceback(tmp_path):
    done = in_a_process("show", "--schedule", "gpip", *SIZES)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("schedule.py: error: --schedule: 'gpip' is unknown (did you mean gpipe?)")
    assert done.stderr.count("\n") == 1


def test_a_reader_that_stops_early_is_no_error():
    # Far more than a pipe holds, so that writing meets the closed end.
    flags = ["--schedule", "1f1b", "--pipeline-model-parallel-size", "8", "--num-microbatches", "500"]
    process = subprocess.Popen(
        [sys.executable, TOOL, "export", *flags, "--format", "json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.read(10) == b'{"format":'
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(timeout=60) == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
def test_output_that_cannot_be_written_is_one_line(run):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, TOOL, "show", *PLAN.split()], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 2
    assert done.stderr == "schedule.py: error: the output can't be written (No space left on device)\n"
    status, _, err = run("export", *PLAN.split(), "--format", "text", "--output", "/dev/full")
    assert status == 2 and err.count("\n") == 1


def test_check_reads_stdin(prints):
    text = prints("export", "--schedule", "1f1b", *SIZES, "--format", "text")
    done = in_a_process("check", "-", input=text)
    assert done.returncode == 0 and done.stdout.endswith("- is valid\n")


def test_help_names_every_command_and_flag():
    assert all(word in in_a_process("--help").stdout for word in ("show", "export", "check", "compare"))
    text = in_a_process("show", "--help").stdout
    for flag in ("--num-virtual-stages-per-pipeline-rank", "--activation-memory-limit", "--memory-w", "--streams"):
        assert flag in text
