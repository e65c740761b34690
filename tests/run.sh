#!/usr/bin/env bash
# Makes the environment (tools/environment.sh) and runs the tests:
#
#   bash tests/run.sh             the suite
#   bash tests/run.sh --full      and the long matrices
#   bash tests/run.sh -k tokenizer -x     further arguments go to pytest
set -euo pipefail

unset CDPATH
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
bash tools/environment.sh

# Several ranks share the cores: one thread a process, or they only slow each other down.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export MKL_NUM_THREADS="${MKL_NUM_THREADS:-1}"
export OPENBLAS_NUM_THREADS="${OPENBLAS_NUM_THREADS:-1}"

exec .venv/bin/python -m pytest "$@"
