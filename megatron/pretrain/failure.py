"""When a rank fails: everyone stops within seconds, and the first cause is what people see."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from megatron.pretrain.errors import PROGRAM, ConfigError, TrainingError

_COURTESY_S = 1.0
"""How long the rank that spoke waits for the others to find out, as it may be the one that keeps the store."""

_COUNTER = "pipeline/num_failed_ranks"


def run_rank(
    main: Callable[[], None], environ: Mapping[str, str], *, stderr: TextIO | None = None, patience_s: float = 5.0
) -> None:
    """Run `main` on this rank; where it fails, say why once for all ranks and end the process.

    A ConfigError is said in one line and ends with status 2, a TrainingError in one line and 1, anything else with its
    traceback and 1, Ctrl-C at once with 130. Once torch.distributed
    runs, the first rank that fails speaks, and the others, which mostly fail because of it, stay silent. Before that all
    ranks may have met the same mistake: rank 0 speaks at once, another only if it still lives after `patience_s`. A rank
    that has nothing to say waits so long before it ends, since a launcher kills everyone at the first end.
    """
    stderr = stderr or sys.stderr
    try:
        main()
    except KeyboardInterrupt:
        if environ.get("RANK", "0") == "0":
            print(f"{PROGRAM}: interrupted", file=stderr, flush=True)
        _end(130, at_once=_running_distributed() is not None)
    except Exception as error:
        distributed = _running_distributed()
        if distributed is None:
            if environ.get("RANK", "0") != "0":
                time.sleep(patience_s)
            _report(error, environ, stderr)
        elif _is_first(distributed, stderr):
            _report(error, environ, stderr)
            _wait_for_others(distributed)
        else:
            time.sleep(patience_s)
        _end(2 if isinstance(error, ConfigError) else 1, at_once=distributed is not None)


def _running_distributed() -> Any:
    """torch.distributed where it is initialised, else None; torch may not even be imported yet."""
    module = sys.modules.get("torch.distributed")
    return module if module is not None and module.is_initialized() else None


def _is_first(distributed: Any, stderr: TextIO) -> bool:
    """Whether no rank has failed before, as the run's own key-value store counts."""
    try:
        return _store(distributed).add(_COUNTER, 1) == 1
    except RuntimeError:
        # The store is gone, and so is the rank that kept it: it had the first word, if it had time for one.
        print(f"{PROGRAM}: rank {distributed.get_rank()}: the others are gone, stopping", file=stderr)
        return False


def _wait_for_others(distributed: Any) -> None:
    deadline = time.monotonic() + _COURTESY_S
    try:
        while time.monotonic() < deadline and _store(distributed).add(_COUNTER, 0) < distributed.get_world_size():
            time.sleep(0.02)
    except RuntimeError:
        # The rank that kept the store has ended, so nobody is left who could ask.
        return


def _store(distributed: Any) -> Any:
    return distributed.distributed_c10d._get_default_store()


def _report(error: BaseException, environ: Mapping[str, str], stderr: TextIO) -> None:
    rank = environ.get("RANK", "0")
    if isinstance(error, (ConfigError, TrainingError)):
        print(f"{PROGRAM}: error: {' '.join(str(error).splitlines())}", file=stderr, flush=True)
        return
    traceback.print_exception(error, file=stderr)
    print(f"{PROGRAM}: rank {rank} failed: {type(error).__name__}: {error}", file=stderr, flush=True)


def _end(status: int, at_once: bool) -> None:
    if not at_once:
        raise SystemExit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not SystemExit: the interpreter would wait for threads that wait for peers which are gone.
    os._exit(status)
