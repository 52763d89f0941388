#!/bin/sh
# install.sh on fresh Debian systems: install, first answer, upgrade, rollback, uninstall.
#
#   sh tests/installer/chroot.sh WHEEL FOLDER SUITE [options of install.sh]
#
# As root, with debootstrap. FOLDER/SUITE becomes the system (kept, so that a second run is short);
# SUITE is bookworm or trixie. MIRROR chooses Debian's mirror, WHEELS a folder of wheels that pip looks
# into as well, CA a file with certificates. The steps run as a user of the new system, who has python3,
# python3-venv and ca-certificates, no compiler, and no other package of Python.
set -eu

wheel="$1" folder="$2" suite="$3"
shift 3
here="$(cd "$(dirname "$0")" && pwd)"
system="$folder/$suite"

if [ ! -f "$system/etc/debian_version" ]; then
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates \
        "$suite" "$system" "${MIRROR:-http://deb.debian.org/debian}"
fi
cp /etc/resolv.conf "$system/etc/resolv.conf"
[ -z "${CA:-}" ] || cp "$CA" "$system/etc/ssl/certs/ca-certificates.crt"
rm -rf "$system/opt/desk"
mkdir -p "$system/opt/desk/wheels"
cp -r "$here/../../installer" "$system/opt/desk/"
[ -z "${WHEELS:-}" ] || cp "$WHEELS"/*.whl "$system/opt/desk/wheels/"

# The same wheel under the version that comes next, to upgrade to.
first="$(python3 - "$wheel" "$system/opt/desk" <<'END'
import re, shutil, sys, zipfile
from pathlib import Path

wheel, folder = Path(sys.argv[1]), Path(sys.argv[2])
shutil.copy(wheel, folder)
version = wheel.name.split("-")[1]
after = version + ".post1"
with zipfile.ZipFile(wheel) as old:
    target = folder / wheel.name.replace(version, after)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as new:
        for item in old.infolist():
            data = old.read(item)
            if item.filename.endswith(("METADATA", "moet_desk/__init__.py")):
                data = data.replace(version.encode(), after.encode())
            new.writestr(item.filename.replace(f"-{version}.", f"-{after}."), data)
print(version)
END
)"

cat >"$system/opt/desk/steps.sh" <<'END'
set -eu
first="$1" && shift
cd /opt/desk
desk="$HOME/.local/bin/moet-desk"
since="$(date +%s)"
step() {
    now="$(date +%s)"
    echo "ok  $1  ($((now - since)) s)"
    since="$now"
}
is() { [ "$1" = "$2" ] || { echo "expected '$2', got '$1'"; exit 1; }; }
script="sh installer/install.sh"

$script install "moet_desk-$first-py3-none-any.whl" "$@"
is "$("$desk" --version)" "moet-desk $first"
step "install"
"$desk" run --device cpu --max-tokens 12 "Say hello."
step "first answer, with the packing of the demo model"
"$desk" run --device cpu --max-tokens 12 "Say hello."
step "second answer"
"$desk" doctor >/dev/null || true
grep -q _moet_desk "$HOME/.local/share/bash-completion/completions/moet-desk"
[ -s "$HOME/.local/share/applications/moet-desk.desktop" ]
$script install "moet_desk-$first.post1-py3-none-any.whl" "$@"
is "$("$desk" --version)" "moet-desk $first.post1"
is "$($script list)" "$first (before)
$first.post1 (in use)"
step "upgrade"
"$desk" run --device cpu --max-tokens 4 "Say hello." >/dev/null
$script rollback
is "$("$desk" --version)" "moet-desk $first"
"$desk" run --device cpu --max-tokens 4 "Say hello." >/dev/null
step "rollback"
$script uninstall
[ ! -e "$desk" ] && [ ! -e "$HOME/.local/share/moet-desk-versions" ]
[ -d "$HOME/.local/share/moet-desk/models/demo" ]
$script uninstall --all
[ ! -e "$HOME/.local/share/moet-desk" ]
is "$(find "$HOME" -name '*moet*' | head -1)" ""
step "uninstall"
END

chroot "$system" sh -c 'id desk >/dev/null 2>&1 || useradd --create-home desk; chmod -R a+rX /opt/desk'
rm -rf "$system/home/desk/.local" "$system/home/desk/.config"
echo "== $suite: Debian $(cat "$system/etc/debian_version"), $(chroot "$system" python3 --version)"
# The mounts are in a namespace of their own and go with it.
unshare --mount --pid --fork sh -c '
    system="$1" && shift
    mount -t proc proc "$system/proc"
    mount --rbind /dev "$system/dev"
    exec chroot --userspec=desk:desk "$system" env -i HOME=/home/desk LANG=C.UTF-8 \
        PATH=/usr/bin:/bin PIP_FIND_LINKS=/opt/desk/wheels PIP_NO_CACHE_DIR=1 \
        sh /opt/desk/steps.sh "$@"' sh "$system" "$first" "$@"
echo "== $suite: all steps passed"
