"""Runs a function on a few gloo ranks, each a fresh process, without paying megatron-core's import for each.

A forkserver imports megatron-core once (about 7 s) and forks every rank from there, so a rank costs about half a second and
starts with nothing initialised: a test may kill it. Ranks write their output and result into files, never into pipes.
"""

from __future__ import annotations

import datetime
import multiprocessing
import multiprocessing.connection
import os
import pickle
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Only installed packages: up to Python 3.13 a forkserver does not take over this process's sys.path.
PRELOAD = [
    "megatron.core.optimizer",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.dist_checkpointing.strategies.torch",
    "torch._dynamo",
]


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: exit code (-9 for SIGKILL), what the function returned, what it printed."""

    exitcode: int | None
    result: Any
    log: str


def run_ranks(
    function: Callable, world_size: int, folder: Path, *args: Any, timeout_s: float = 60, initialised: bool = True
) -> list[Any]:
    """What `function(*args)` returns on each of `world_size` pipeline ranks; fails with a rank's output when one fails.

    With `initialised` False the ranks find only what a launcher sets in the environment, and no process group.
    """
    outcomes = run_ranks_to_the_end(function, world_size, folder, *args, timeout_s=timeout_s, initialised=initialised)
    for rank, outcome in enumerate(outcomes):
        assert outcome.exitcode == 0, f"rank {rank} ended with {outcome.exitcode}:\n{outcome.log}"
    return [outcome.result for outcome in outcomes]


def run_ranks_to_the_end(
    function: Callable,
    world_size: int,
    folder: Path,
    *args: Any,
    timeout_s: float = 60,
    initialised: bool = True,
    ends_together: bool = False,
) -> list[Outcome]:
    """As `run_ranks`, for functions whose ranks may die.

    With `ends_together`, the first rank that fails has the others ended with SIGTERM, as a launcher does.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    scratch = folder / f"run-{uuid.uuid4().hex[:8]}"
    scratch.mkdir(parents=True)
    port = _free_port()
    ranks = [
        context.Process(
            target=_rank, args=(function, rank, world_size, port, str(scratch), args, initialised), daemon=True
        )
        for rank in range(world_size)
    ]
    deadline = time.monotonic() + timeout_s
    for process in ranks:
        process.start()
    try:
        while ends_together and any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
            multiprocessing.connection.wait([process.sentinel for process in ranks if process.is_alive()], timeout=1)
            if any(process.exitcode for process in ranks):
                for process in ranks:
                    process.terminate()
        for process in ranks:
            process.join(max(0.1, deadline - time.monotonic()))
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join()
    return [_outcome(process, scratch, rank) for rank, process in enumerate(ranks)]


def _outcome(process: Any, scratch: Path, rank: int) -> Outcome:
    log, result = scratch / f"rank{rank}.log", scratch / f"rank{rank}.pkl"
    value = pickle.loads(result.read_bytes()) if result.exists() else None
    return Outcome(process.exitcode, value, log.read_text(errors="replace") if log.exists() else "")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank(
    function: Callable, rank: int, world_size: int, port: int, scratch: str, args: tuple, initialised: bool
) -> None:
    log = os.open(os.path.join(scratch, f"rank{rank}.log"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import torch

    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    if initialised:
        _initialise(world_size)
    result = function(*args)
    Path(scratch, f"rank{rank}.pkl").write_bytes(pickle.dumps(result))
    if initialised:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def _initialise(world_size: int) -> None:
    import torch
    from megatron.core import parallel_state

    from megatron.pretrain import cpu

    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world_size, create_gloo_process_groups=False)
    cpu.prepare_megatron_core()
