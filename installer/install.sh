#!/bin/sh
# Install moet-desk for this user, each version in a virtual environment of its own.
#
#   sh install.sh install WHEEL [options]        install, or upgrade to, this wheel
#   sh install.sh list                           the versions that are installed
#   sh install.sh rollback [VERSION]             back to the version used before, or to this one
#   sh install.sh uninstall [--models|--all]     remove the program; models and settings stay,
#                                                but for models, or for everything of this program
#   sh install.sh bundle WHEEL DIR [options]     fill DIR with all that an install without network needs
#
# Options of install and bundle:
#   --cpu, --cuda       which build of torch; CUDA's where nvidia-smi lists a card, by default
#   --torch-index URL   another place of torch's builds
#   --offline DIR       (install) take every package from DIR, made by bundle
#   --plain             (install) no desktop entry and no completion for shells
#
# PYTHON=/path/to/python3.12 chooses the interpreter.
set -eu

data="${XDG_DATA_HOME:-$HOME/.local/share}"
config="${XDG_CONFIG_HOME:-$HOME/.config}"
root="$data/moet-desk-versions"
link="$HOME/.local/bin/moet-desk"
desktop="$data/applications/moet-desk.desktop"
for_bash="$data/bash-completion/completions/moet-desk"
for_zsh="$data/zsh/site-functions/_moet-desk"
for_fish="$config/fish/completions/moet-desk.fish"
here="$(cd "$(dirname "$0")" && pwd)"
cpu_index="https://download.pytorch.org/whl/cpu"

fail() {
    echo "$1" >&2
    echo "Do: $2" >&2
    exit 4
}

usage() {
    fail "$1" "read the first lines of $0."
}

find_python() {
    for name in ${PYTHON:+"$PYTHON"} python3.13 python3.12 python3.11 python3.14 python3; do
        if command -v "$name" >/dev/null 2>&1 &&
            "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    fail "moet-desk needs Python 3.11 to 3.14, and none was found." \
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

check_computer() {
    case "$(uname -s)" in
    Linux) ;;
    *) fail "moet-desk runs on Linux and in WSL, and this is $(uname -s)." "use one of these." ;;
    esac
    [ "$(getconf LONG_BIT)" = 64 ] || fail "This system has 32 bits." "use one with 64 bits."
    mkdir -p "$root" "$(dirname "$link")" || fail "$root cannot be made." "look at its permissions."
    [ ! -e "$link" ] || [ -L "$link" ] || fail "$link is not ours." "move it away."
}

# What the packages of a build take on disk while they are installed, in MiB.
check_room() {
    case "$1" in cuda) need=9000 ;; *) need=2000 ;; esac
    [ "$need" -le "$(($(df -Pk "$root" | awk 'NR == 2 { print $4 }') / 1024))" ] ||
        fail "The packages take about $need MiB in $root, and less is free." "free some."
}

read_options() {
    kind="" offline="" index="" plain=""
    while [ $# -gt 0 ]; do
        case "$1" in
        --cpu | --cuda) kind="${1#--}" ;;
        --plain) plain=yes ;;
        --offline | --torch-index)
            [ $# -gt 1 ] || usage "$1 needs a value."
            case "$1" in --offline) offline="$2" ;; *) index="$2" ;; esac
            shift
            ;;
        *) usage "$1 is not an option." ;;
        esac
        shift
    done
    if [ -z "$kind" ]; then
        kind=cpu
        if [ -n "$offline" ] && [ -f "$offline/kind" ]; then
            kind="$(cat "$offline/kind")"
        elif command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
            kind=cuda
        fi
    fi
    lock="$here/lock"
    [ -z "$offline" ] || lock="$offline/lock"
    [ -f "$lock/packages.txt" ] || fail "$lock/packages.txt is missing." \
        "run this from a checkout, an unpacked sdist or a bundle."
    # The ordinary index holds the CUDA build for Linux; that of CPUs has one of its own.
    [ -n "$index" ] || [ "$kind" = cuda ] || index="$cpu_index"
}

# A list with hashes is installed with all of them checked.
checks_of() {
    if grep -q -- --hash= "$1"; then echo "--require-hashes"; fi
}

# $1: what pip does. The three parts are apart because only torch comes from another index.
each_part() {
    verb="$1" && shift
    set -- "$@" --only-binary=:all: # nothing is built here, so no compiler is needed
    [ -z "$offline" ] || set -- "$@" --no-index "--find-links=$offline/packages"
    "$python" -m pip "$verb" --quiet --disable-pip-version-check --no-deps --require-hashes \
        "$@" --requirement "$lock/packages.txt" || return 1
    [ -z "$index" ] || [ -n "$offline" ] || set -- "$@" "--index-url=$index"
    # shellcheck disable=SC2046
    "$python" -m pip "$verb" --quiet --disable-pip-version-check --no-deps \
        $(checks_of "$lock/torch-$kind.txt") "$@" --requirement "$lock/torch-$kind.txt"
}

# Each link changes by a rename, so that a stop in between leaves the old one working.
point() {
    ln -s "$1" "$2.new"
    mv -T "$2.new" "$2"
}

make_venv() {
    venv="$root/$version"
    check_room "$kind"
    base="$(find_python)"
    rm -rf "$venv"
    "$base" -m venv "$venv" || {
        rm -rf "$venv"
        fail "Making a virtual environment failed." "on Debian: apt install python3-venv."
    }
    python="$venv/bin/python"
    { each_part install && "$python" -m pip install --quiet --disable-pip-version-check \
        --no-deps --no-index "$wheel" && "$venv/bin/moet-desk" --version >/dev/null; } || {
        rm -rf "$venv"
        fail "Installing failed; the version in use is unchanged." "read the words above."
    }
    : >"$venv/complete"
}

install_wheel() {
    wheel="$1" && shift
    read_options "$@"
    [ -f "$wheel" ] || fail "$wheel does not exist." "give the path of a wheel."
    version="$(version_of "$wheel")"
    check_computer
    [ -f "$root/$version/complete" ] || make_venv
    use "$version"
    [ -n "$plain" ] || add_extras
    echo "Ready: $link ($version)"
    case ":$PATH:" in
    *":$HOME/.local/bin:"*) ;;
    *) echo "Note: $HOME/.local/bin is not in PATH; a new login may put it there." ;;
    esac
}

use() {
    left="$(readlink "$root/current" 2>/dev/null || true)"
    [ -z "$left" ] || [ "$left" = "$1" ] || point "$left" "$root/previous"
    point "$1" "$root/current"
    point "$root/current/bin/moet-desk" "$link"
}

# What a shell or a desktop knows of the program. Without it the program works all the same.
add_extras() {
    mkdir -p "$(dirname "$desktop")" "$(dirname "$for_bash")" "$(dirname "$for_zsh")" \
        "$(dirname "$for_fish")" || return 0
    cat >"$desktop" <<END
[Desktop Entry]
Type=Application
Name=Moet Desk
Comment=Very large mixture-of-experts models on one consumer GPU
Exec="$link"
Terminal=true
Categories=Utility;
END
    for shell in bash zsh fish; do
        case "$shell" in bash) file="$for_bash" ;; zsh) file="$for_zsh" ;; *) file="$for_fish" ;; esac
        "$link" completion "$shell" >"$file" 2>/dev/null || rm -f "$file"
    done
}

list() {
    now="$(readlink "$root/current" 2>/dev/null || true)"
    before="$(readlink "$root/previous" 2>/dev/null || true)"
    for mark in "$root"/*/complete; do
        [ -f "$mark" ] || continue
        folder="$(dirname "$mark")"
        [ ! -L "$folder" ] || continue
        name="$(basename "$folder")"
        case "$name" in
        "$now") echo "$name (in use)" ;;
        "$before") echo "$name (before)" ;;
        *) echo "$name" ;;
        esac
    done | sort -V
}

rollback() {
    old="${1:-$(readlink "$root/previous" 2>/dev/null || true)}"
    case "$old" in */* | .*) old="" ;; esac
    [ -n "$old" ] && [ -f "$root/$old/complete" ] && [ ! -L "$root/$old" ] ||
        fail "There is no such version to go back to." "see: sh $0 list"
    use "$old"
    echo "Now in use: $old"
}

uninstall() {
    what="${1:-}"
    case "$what" in "" | --models | --all) ;; *) usage "$what is not an option." ;; esac
    [ "$(readlink "$link" 2>/dev/null || true)" != "$root/current/bin/moet-desk" ] || rm "$link"
    rm -rf "$root"
    rm -f "$desktop" "$for_bash" "$for_zsh" "$for_fish"
    own="${MOET_DESK_DATA_DIR:-$data/moet-desk}"
    case "$what" in
    --models) rm -rf "$own/models" "$own/sources" && echo "Removed, with the models in $own." ;;
    --all)
        rm -rf "$own"
        [ -n "${MOET_DESK_DATA_DIR:-}" ] || rm -rf "$config/moet-desk"
        echo "Removed, with models, chats and settings."
        ;;
    *) echo "Removed. Models, chats and settings are in $own." ;;
    esac
}

bundle() {
    wheel="$1" target="$2" && shift 2
    read_options "$@"
    [ -z "$offline" ] || usage "--offline belongs to install."
    version_of "$wheel" >/dev/null
    [ -f "$wheel" ] || fail "$wheel does not exist." "give the path of a wheel."
    mkdir -p "$target/packages" "$target/lock"
    python="$(find_python)"
    each_part download --dest "$target/packages" ||
        fail "Downloading failed." "read pip's words above."
    cp "$wheel" "$0" "$target/"
    cp "$lock/packages.txt" "$target/lock/"
    echo "$kind" >"$target/kind"
    if [ -n "$(checks_of "$lock/torch-$kind.txt")" ]; then
        cp "$lock/torch-$kind.txt" "$target/lock/"
    else # what came is what will be installed
        pinned="$(sed -n 's/^torch==//p' "$lock/torch-$kind.txt")"
        sum="$(cd "$target/packages" && sha256sum "torch-$pinned"*.whl | cut -d' ' -f1)"
        echo "torch==$pinned --hash=sha256:$sum" >"$target/lock/torch-$kind.txt"
    fi
    echo "Ready: sh $target/$(basename "$0") install $target/$(basename "$wheel") --offline $target"
}

command="${1:-}"
[ $# -eq 0 ] || shift
case "$command" in
install) [ $# -ge 1 ] || usage "install needs a wheel." && install_wheel "$@" ;;
bundle) [ $# -ge 2 ] || usage "bundle needs a wheel and a folder." && bundle "$@" ;;
list) list ;;
rollback) rollback "$@" ;;
uninstall) uninstall "$@" ;;
*) usage "Nothing to do was named." ;;
esac
