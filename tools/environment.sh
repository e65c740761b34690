#!/usr/bin/env bash
# Makes .venv at the top of the checkout with this project and the releases pinned in tools/constraints.txt:
#
#   bash tools/environment.sh                      with python3
#   PYTHON=python3.12 bash tools/environment.sh    with another one, 3.10 or newer
#
# It returns at once when that is done already. A changed pin or setup.py installs again; an install that was
# interrupted starts over. Only the first call makes the environment: delete .venv to change its Python.
set -euo pipefail

unset CDPATH
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-python3}"
venv="$root/.venv"
venv_python="$venv/bin/python"
stamp="$venv/.installed"
unfinished="$venv/.unfinished"

say() { echo "environment: $*" >&2; }
fail() { echo "environment: error: $*" >&2; exit 2; }

# One hash over all that decides what gets installed.
wanted() {
    "$venv_python" - "$root/setup.py" "$root/tools/constraints.txt" "${BASH_SOURCE[0]}" <<'PYTHON'
import hashlib, pathlib, sys
print(hashlib.sha256(b"\0".join(pathlib.Path(name).read_bytes() for name in sys.argv[1:])).hexdigest())
PYTHON
}

# A moved environment still starts its own Python, but its scripts point to where it was made.
in_place() { [[ -f "$venv/.made-in" && "$(<"$venv/.made-in")" == "$root" ]]; }
usable() { [[ ! -e "$unfinished" ]] && in_place && "$venv_python" -m pip --version >/dev/null 2>&1; }
current() { usable && [[ -f "$stamp" && "$(<"$stamp")" == "$(wanted)" ]]; }

make_venv() {
    command -v "$python" >/dev/null ||
        fail "no command '$python'; install Python 3.10 or newer, or name one: PYTHON=/path/to/python3"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$("$python" --version 2>&1) is too old, 3.10 or newer is needed; name another one: PYTHON=python3.12"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "'$python' lacks the venv module; on Debian and Ubuntu: apt-get install python3-venv"
    say "making .venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
    echo "$root" >"$venv/.made-in"
}

install_project() {
    local pip=("$venv_python" -m pip install --quiet --disable-pip-version-check -c "$root/tools/constraints.txt")
    # pip takes a package whose files were half written for an installed one: until the stamp is there, start over.
    rm -f "$stamp"
    touch "$unfinished"
    say "installing torch 2.13.0 (up to some hundred megabytes, some minutes the first time)"
    "${pip[@]}" torch==2.13.0 setuptools
    say "installing this project and what else it needs"
    # The pinned setuptools builds it, not whichever one is the newest on that day.
    "${pip[@]}" --no-build-isolation --use-pep517 -e "$root[test,example]"
    wanted >"$stamp"
    rm -f "$unfinished"
    say "ready"
}

main() {
    # Two scripts that start together must not install into one folder at the same time.
    if command -v flock >/dev/null; then
        exec 9>"$root/.venv.lock"
        flock -n 9 || { say "another process is installing, waiting for it"; flock 9; }
    fi
    current && return
    usable || make_venv
    install_project
}

main
