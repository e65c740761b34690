"""When a rank fails: everyone stops within seconds, and the first cause is what people see."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable

import torch.distributed as dist

from megatron.pretrain.errors import ConfigError

_PATIENCE_S = 5.0
"""How long a rank that says nothing waits before it exits: a launcher kills everyone at the first exit, and the rank that
has something to say must have said it."""


def run_rank(main: Callable[[], None], program: str = "pretrain_gpt.py") -> None:
    """Run `main` on this rank, after torch.distributed was or will be initialised in it.

    The first rank that fails says why: a ConfigError in one line (exit status 2), anything else with its traceback (1).
    The others fail because of it, and stay silent. The process ends without waiting for peers or helper threads.
    """
    try:
        main()
    except (Exception, KeyboardInterrupt) as error:
        status = 2 if isinstance(error, ConfigError) else 1
        if _is_first():
            _report(error, program)
        else:
            time.sleep(_PATIENCE_S)
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: the interpreter would wait for threads that wait for peers which are gone.
        os._exit(status)


def _is_first() -> bool:
    """Whether no rank has failed before, as the run's own key-value store counts."""
    if not dist.is_initialized():
        return os.environ.get("RANK", "0") == "0"
    try:
        store = dist.distributed_c10d._get_default_store()
        return store.add("pipeline/num_failed_ranks", 1) == 1
    except RuntimeError:
        # The store is gone, and so is the rank that kept it: it had the first word, if it had time for one.
        print(f"rank {dist.get_rank()}: the others are gone, stopping", file=sys.stderr)
        return False


def _report(error: BaseException, program: str) -> None:
    if isinstance(error, ConfigError):
        print(f"{program}: error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return
    rank = f"rank {dist.get_rank()}" if dist.is_initialized() else "this process"
    traceback.print_exception(error)
    print(f"{program}: {rank} failed: {type(error).__name__}: {error}", file=sys.stderr)
