#!/bin/sh
# Install moet-desk for this user, each version in a virtual environment of its own.
#
#   sh install.sh install WHEEL [--cpu|--cuda]   install, or upgrade to, this wheel
#   sh install.sh install WHEEL --offline DIR    the same, taking every package from DIR
#   sh install.sh bundle WHEEL DIR [--cpu|--cuda] fill DIR for --offline
#   sh install.sh rollback                       back to the version used before
#   sh install.sh uninstall                      remove the program; models and settings stay
#
# PYTHON=/path/to/python3.12 chooses the interpreter.
set -eu

root="${XDG_DATA_HOME:-$HOME/.local/share}/moet-desk-versions"
link="$HOME/.local/bin/moet-desk"
here="$(cd "$(dirname "$0")" && pwd)"

fail() {
    echo "$1" >&2
    echo "Do: $2" >&2
    exit 4
}

find_python() {
    for name in ${PYTHON:+"$PYTHON"} python3.13 python3.12 python3.11 python3; do
        if command -v "$name" >/dev/null 2>&1 &&
            "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    fail "moet-desk needs Python 3.11 or newer, and none was found." \
        "install one (on Debian: apt install python3 python3-venv), or set PYTHON."
}

# The name of a wheel file is name-version-...whl.
version_of() {
    base="$(basename "$1")"
    case "$base" in
    moet_desk-*-*.whl) base="${base#moet_desk-}" && echo "${base%%-*}" ;;
    *) fail "$1 is not a wheel of moet-desk." "give a file called moet_desk-VERSION-py3-none-any.whl." ;;
    esac
}

torch_index() {
    kind="$1"
    if [ -z "$kind" ]; then
        kind=cpu
        command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && kind=cuda
    fi
    # The ordinary index holds the CUDA build for Linux.
    [ "$kind" = cuda ] || echo "--extra-index-url=https://download.pytorch.org/whl/cpu"
}

# Each link changes by a rename, so that a stop in between leaves the old one working.
point() {
    ln -s "$1" "$2.new"
    mv -T "$2.new" "$2"
}

install_wheel() {
    wheel="$1" && shift
    kind="" offline=""
    while [ $# -gt 0 ]; do
        case "$1" in
        --cpu | --cuda) kind="${1#--}" ;;
        --offline) [ $# -gt 1 ] || fail "--offline needs a folder." "give it." && offline="$2" && shift ;;
        *) fail "$1 is not an option of install." "read the first lines of $0." ;;
        esac
        shift
    done
    [ -f "$wheel" ] || fail "$wheel does not exist." "give the path of a wheel."
    version="$(version_of "$wheel")"
    python="$(find_python)"
    mkdir -p "$root" "$(dirname "$link")"
    [ ! -e "$link" ] || [ -L "$link" ] || fail "$link is not ours." "move it away."
    venv="$root/$version"
    if [ ! -f "$venv/complete" ]; then
        rm -rf "$venv"
        "$python" -m venv "$venv" || {
            rm -rf "$venv"
            fail "Making a virtual environment failed." "on Debian: apt install python3-venv."
        }
        if [ -n "$offline" ]; then
            set -- --no-index "--find-links=$offline"
        else
            set -- --constraint "$here/../constraints.txt"
            index="$(torch_index "$kind")"
            [ -z "$index" ] || set -- "$@" "$index"
        fi
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" "$wheel" || {
            rm -rf "$venv"
            fail "Installing the packages failed; the version in use is unchanged." "read pip's words above."
        }
        : >"$venv/complete"
    fi
    old="$(readlink "$root/current" 2>/dev/null || true)"
    [ -z "$old" ] || [ "$old" = "$version" ] || point "$old" "$root/previous"
    point "$version" "$root/current"
    point "$root/current/bin/moet-desk" "$link"
    echo "Ready: $link ($version)"
}

rollback() {
    old="$(readlink "$root/previous" 2>/dev/null || true)"
    [ -n "$old" ] && [ -f "$root/$old/complete" ] ||
        fail "There is no version to go back to." "install one."
    now="$(readlink "$root/current")"
    point "$old" "$root/current"
    point "$now" "$root/previous"
    echo "Now in use: $old"
}

uninstall() {
    [ "$(readlink "$link" 2>/dev/null || true)" != "$root/current/bin/moet-desk" ] || rm "$link"
    rm -rf "$root"
    echo "Removed. Models and settings are where they were."
}

bundle() {
    version_of "$1" >/dev/null
    mkdir -p "$2"
    index="$(torch_index "${3#--}")"
    "$(find_python)" -m pip download --quiet --disable-pip-version-check --dest "$2" \
        --constraint "$here/../constraints.txt" ${index:+"$index"} "$1"
    echo "Ready: $2"
}

case "${1:-}" in
install) [ $# -ge 2 ] || fail "install needs a wheel." "give its path." && shift && install_wheel "$@" ;;
bundle) [ $# -ge 3 ] || fail "bundle needs a wheel and a folder." "give both." && bundle "$2" "$3" "${4:-}" ;;
rollback) rollback ;;
uninstall) uninstall ;;
*) fail "Nothing to do was named." "sh install.sh install WHEEL; the file's first lines say the rest." ;;
esac
