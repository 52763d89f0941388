"""install.sh in a home of its own, with small wheels that need no network."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "installer" / "install.sh"


def _wheel(folder: Path, version: str, requires: str = "") -> Path:
    path = folder / f"moet_desk-{version}-py3-none-any.whl"
    info = f"moet_desk-{version}.dist-info"
    meta = f"Metadata-Version: 2.1\nName: moet-desk\nVersion: {version}\n{requires}"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("moet_desk/__init__.py", f"def main():\n    print('{version}')\n")
        file.writestr(f"{info}/METADATA", meta)
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/entry_points.txt", "[console_scripts]\nmoet-desk=moet_desk:main\n")
        file.writestr(f"{info}/RECORD", "")
    return path


@pytest.mark.slow
def test_install_upgrade_failed_upgrade_rollback_uninstall(tmp_path: Path) -> None:
    home = tmp_path / "home"
    models = home / ".local/share/moet-desk/models/kept"
    models.mkdir(parents=True)
    env = {"HOME": str(home), "PATH": os.environ["PATH"], "PYTHON": sys.executable}
    program = home / ".local/bin/moet-desk"

    def script(*words: str | Path) -> int:
        return subprocess.run(["sh", SCRIPT, *words], env=env, check=False, timeout=60).returncode

    def says() -> str:
        return subprocess.check_output([program], env=env, text=True, timeout=60).strip()

    def install(wheel: Path) -> int:
        return script("install", wheel, "--offline", tmp_path)

    assert script("rollback") == 4
    assert install(_wheel(tmp_path, "1.0")) == 0
    assert says() == "1.0"
    assert install(_wheel(tmp_path, "2.0")) == 0
    assert says() == "2.0"
    assert install(_wheel(tmp_path, "3.0", "Requires-Dist: not-in-the-folder\n")) == 4
    assert says() == "2.0"
    assert script("rollback") == 0
    assert says() == "1.0"
    assert script("uninstall") == 0
    assert not program.is_symlink()
    assert not (home / ".local/share/moet-desk-versions").exists()
    assert models.is_dir()
