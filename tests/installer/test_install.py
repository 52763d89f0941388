"""install.sh in a home of its own, with small wheels that need no network."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

INSTALLER = Path(__file__).parents[2] / "installer"

MAIN = """
import sys
def main():
    if sys.argv[1:] == ["--version"] and {breaks}: sys.exit(1)
    print("completion of " + sys.argv[2] if sys.argv[1:2] == ["completion"] else "{version}")
"""


def make_wheel(
    folder: Path, name: str, version: str, *, program: bool = True, breaks: bool = False
) -> Path:
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    meta = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}/__init__.py", MAIN.format(version=version, breaks=breaks))
        file.writestr(f"{info}/METADATA", meta)
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        if program:
            entry = f"[console_scripts]\nmoet-desk={name}:main\n"
            file.writestr(f"{info}/entry_points.txt", entry)
        file.writestr(f"{info}/RECORD", "")
    return path


# Making an environment takes seconds, most of them for pip; a copy of one does not.
PYTHON = """#!/bin/sh
case "$1 $2" in "-m venv") exec cp -r "{template}" "$3" ;; *) exec "{python}" "$@" ;; esac
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("python")
    template = folder / "template"
    subprocess.run([sys.executable, "-m", "venv", template], check=True, timeout=120)
    path = folder / "python"
    path.write_text(PYTHON.format(template=template, python=sys.executable))
    path.chmod(0o755)
    return path


class Home:
    """A home, a bundle with two packages, and the script."""

    def __init__(self, folder: Path) -> None:
        self.home, self.bundle = folder / "home", folder / "bundle"
        for path in (self.home, self.bundle / "packages", self.bundle / "lock"):
            path.mkdir(parents=True)
        self.env = {"HOME": str(self.home), "PATH": os.environ["PATH"], "PYTHON": sys.executable}
        self.program = self.home / ".local/bin/moet-desk"
        self.versions = self.home / ".local/share/moet-desk-versions"
        self.lock("packages", self.package("dep", "1.0"))
        self.lock("torch-cpu", self.package("torch", "2.0"))

    def package(self, name: str, version: str) -> Path:
        return make_wheel(self.bundle / "packages", name, version, program=False)

    def lock(self, name: str, *wheels: Path) -> None:
        lines = [
            f"{wheel.name.split('-')[0]}=={wheel.name.split('-')[1]}"
            f" --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}"
            for wheel in wheels
        ]
        (self.bundle / "lock" / f"{name}.txt").write_text("\n".join(lines) + "\n")

    def run(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", INSTALLER / "install.sh", *words], env=self.env, check=False, timeout=180,
            capture_output=True, text=True,
        )  # fmt: skip

    def install(self, wheel: Path, *more: str) -> subprocess.CompletedProcess[str]:
        return self.run("install", wheel, "--offline", self.bundle, "--cpu", *more)

    def says(self) -> str:
        return subprocess.check_output([self.program], env=self.env, text=True, timeout=60).strip()


@pytest.mark.slow
def test_install_upgrade_broken_upgrades_rollback_uninstall(tmp_path: Path, python: Path) -> None:
    home = Home(tmp_path)
    home.env["PYTHON"] = str(python)
    models = home.home / ".local/share/moet-desk/models/kept"
    models.mkdir(parents=True)
    assert home.run("rollback").returncode == 4
    first = home.install(make_wheel(tmp_path, "moet_desk", "1.0"))
    assert first.returncode == 0, first.stderr
    assert home.says() == "1.0"
    local = home.home / ".local/share"
    desktop = (local / "applications/moet-desk.desktop").read_text()
    assert f'Exec="{home.program}"\nTerminal=true' in desktop
    for shell, path in (
        ("bash", local / "bash-completion/completions/moet-desk"),
        ("zsh", local / "zsh/site-functions/_moet-desk"),
        ("fish", home.home / ".config/fish/completions/moet-desk.fish"),
    ):
        assert path.read_text() == f"completion of {shell}\n"

    for name in ("current.new", "previous.new"):
        (home.versions / name).symlink_to("left of a stop")
    assert home.install(make_wheel(tmp_path, "moet_desk", "2.0")).returncode == 0
    assert home.says() == "2.0"
    assert home.run("list").stdout == "1.0 (before)\n2.0 (in use)\n"

    broken = home.install(make_wheel(tmp_path, "moet_desk", "3.0", breaks=True))
    assert (broken.returncode, "in use is unchanged" in broken.stderr) == (4, True)
    (home.bundle / "packages/dep-1.0-py3-none-any.whl").write_bytes(b"something else")
    changed = home.install(make_wheel(tmp_path, "moet_desk", "4.0"))
    assert (changed.returncode, "HASHES" in changed.stderr.upper()) == (4, True)
    assert home.says() == "2.0"
    assert home.run("list").stdout == "1.0 (before)\n2.0 (in use)\n"

    assert home.run("rollback").stdout == "Now in use: 1.0\n"
    assert home.says() == "1.0"
    assert home.run("rollback", "2.0").returncode == 0
    assert home.says() == "2.0"
    for name in ("3.0", "../elsewhere", "current"):
        assert home.run("rollback", name).returncode == 4
    assert home.says() == "2.0"

    assert home.run("uninstall").returncode == 0
    assert not home.program.is_symlink()
    assert not home.versions.exists()
    assert models.is_dir()
    assert [path for path in home.home.rglob("*moet-desk*") if path.is_file()] == []


def test_uninstall__removes_models_or_all_only_when_asked(tmp_path: Path) -> None:
    home = Home(tmp_path)
    own, config = home.home / ".local/share/moet-desk", home.home / ".config/moet-desk"
    for path in (own / "models/m", own / "sources/m", config):
        path.mkdir(parents=True)
    (own / "chats.sqlite3").touch()
    other = home.home / ".local/share/other"
    other.mkdir()
    assert home.run("uninstall", "--everything").returncode == 4
    assert home.run("uninstall").returncode == 0
    assert (own / "models/m").is_dir()
    assert home.run("uninstall", "--models").returncode == 0
    assert sorted(path.name for path in own.iterdir()) == ["chats.sqlite3"]
    assert config.is_dir()
    assert home.run("uninstall", "--all").returncode == 0
    assert not own.exists()
    assert not config.exists()
    assert other.is_dir()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "Nothing to do"),
        (("install",), "needs a wheel"),
        (("install", "moet_desk-1.0-py3-none-any.whl"), "does not exist"),
        (("install", "x.whl", "--offline"), "needs a value"),
        (("install", "x.whl", "--fast"), "not an option"),
        (("bundle", "x.whl"), "needs a wheel and a folder"),
        (("bundle", "x.whl", "d", "--offline", "."), "missing"),
        (("uninstall", "--fast"), "not an option"),
    ],
)
def test_usage__says_what_is_wrong(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    shown = Home(tmp_path).run(*words)
    assert (shown.returncode, said in shown.stderr) == (4, True), shown.stderr
    assert "Do: " in shown.stderr


def test_install__refuses_a_foreign_program_and_an_old_python(tmp_path: Path) -> None:
    home = Home(tmp_path)
    wheel = make_wheel(tmp_path, "moet_desk", "1.0")
    home.program.parent.mkdir(parents=True)
    home.program.write_text("mine")
    assert "is not ours" in home.install(wheel).stderr
    assert home.program.read_text() == "mine"
    home.program.unlink()
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in (
        "sh",
        "basename",
        "dirname",
        "uname",
        "getconf",
        "mkdir",
        "df",
        "awk",
        "readlink",
        "grep",
    ):
        (tools / name).symlink_to(shutil.which(name) or "")
    home.env |= {"PATH": str(tools), "PYTHON": "no-python"}
    assert "needs Python 3.11" in home.install(wheel).stderr
    assert not (home.versions / "1.0").exists()


@pytest.mark.slow
def test_bundle__takes_files_of_the_lock_and_keeps_their_hashes(tmp_path: Path) -> None:
    home = Home(tmp_path)
    script = tmp_path / "installer"
    shutil.copytree(home.bundle / "lock", script / "lock")
    shutil.copy(INSTALLER / "install.sh", script)
    (script / "lock/torch-cpu.txt").write_text("torch==2.0\n")
    wheel = make_wheel(tmp_path, "moet_desk", "1.0")
    target = tmp_path / "made"
    home.env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(home.bundle / "packages")}
    made = subprocess.run(
        ["sh", script / "install.sh", "bundle", wheel, target, "--cpu"],
        env=home.env, check=False, timeout=180, capture_output=True, text=True,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    names = sorted(path.name for path in (target / "packages").iterdir())
    assert names == ["dep-1.0-py3-none-any.whl", "torch-2.0-py3-none-any.whl"]
    for name in ("packages", "torch-cpu"):
        made_lock = (target / "lock" / f"{name}.txt").read_text()
        assert made_lock == (home.bundle / "lock" / f"{name}.txt").read_text()
    assert (target / "kind").read_text() == "cpu\n"
    assert (target / "install.sh").is_file()
    assert (target / wheel.name).is_file()
