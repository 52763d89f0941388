"""Probing: what is read from the kernel's files and from the driver becomes the right record."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moet_desk import hardware
from moet_desk.locations import TerminalFacts
from moet_desk.machine import Certificates, Rates, Terminal
from moet_desk.probing import drives, gpus, look, memory, rates, surroundings, system
from moet_desk.probing.memory import SystemFiles
from moet_desk.units import GIB, MIB

TOTAL, AVAILABLE = 128 * GIB, 100 * GIB


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SystemFiles:
    """Folders in place of the kernel's; a host of 128 GiB."""
    ram = SimpleNamespace(total=TOTAL, available=AVAILABLE)
    swap = SimpleNamespace(total=64 * GIB, used=3 * GIB)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: ram)
    monkeypatch.setattr(memory.psutil, "swap_memory", lambda: swap)
    return SystemFiles(proc=tmp_path / "proc", sys=tmp_path / "sys", root=tmp_path / "root")


def write(path: Path, text: str | int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


# -- memory ----------------------------------------------------------------------------------


def test_memory__no_limit__the_hosts_and_swap_apart(files: SystemFiles) -> None:
    found = memory.read_memory(files)
    assert (found.total, found.available) == (TOTAL, AVAILABLE)
    assert (found.swap_total, found.swap_used) == (64 * GIB, 3 * GIB)
    assert (found.container_limit, found.cgroup) == (None, None)


def test_memory__cgroup_2__room_of_the_tightest_group_above(files: SystemFiles) -> None:
    write(files.proc / "self" / "cgroup", "0::/user.slice/app.scope")
    outer = files.sys / "fs" / "cgroup" / "user.slice"
    inner = outer / "app.scope"
    write(outer / "memory.max", 48 * GIB)
    write(outer / "memory.current", 10 * GIB)
    write(outer / "memory.stat", f"anon {GIB}\ninactive_file {8 * GIB}\n")
    write(inner / "memory.max", "max")
    write(inner / "memory.current", GIB)
    found = memory.read_memory(files)
    assert found.container_limit == 48 * GIB
    assert found.available == 46 * GIB  # files in the page cache are given back when needed
    assert found.cgroup == 2
    assert found.total == TOTAL


def test_memory__cgroup_1__its_limit_and_its_word_for_none(files: SystemFiles) -> None:
    write(files.proc / "self" / "cgroup", "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc")
    folder = files.sys / "fs" / "cgroup" / "memory"  # a container sees only the mount itself
    write(folder / "memory.usage_in_bytes", 2 * GIB)
    write(folder / "memory.limit_in_bytes", 9223372036854771712)
    assert memory.read_memory(files).cgroup is None
    write(folder / "memory.limit_in_bytes", 16 * GIB)
    found = memory.read_memory(files)
    assert (found.container_limit, found.available, found.cgroup) == (16 * GIB, 14 * GIB, 1)


def test_memory__limit_above_the_ram__no_limit(files: SystemFiles) -> None:
    write(files.sys / "fs" / "cgroup" / "memory.max", 512 * GIB)
    write(files.sys / "fs" / "cgroup" / "memory.current", GIB)
    found = memory.read_memory(files)
    assert (found.available, found.container_limit) == (AVAILABLE, None)


def test_engines_probe__uses_the_same_limits(
    files: SystemFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(files.sys / "fs" / "cgroup" / "memory.max", 20 * GIB)
    write(files.sys / "fs" / "cgroup" / "memory.current", 4 * GIB)
    monkeypatch.setattr(hardware, "read_memory", lambda: memory.read_memory(files))
    assert hardware.probe().ram_available == 16 * GIB


# -- system ----------------------------------------------------------------------------------


def test_system__wsl_and_containers(files: SystemFiles) -> None:
    assert not system.is_wsl(files)
    write(files.proc / "sys" / "kernel" / "osrelease", "6.6.87.2-microsoft-standard-WSL2")
    assert system.is_wsl(files)
    assert system.find_container(files) is None
    write(files.proc / "1" / "cgroup", "0::/kubepods/burstable/pod1")
    assert system.find_container(files) == "kubepods"
    write(files.root / "run" / ".containerenv", "")
    assert system.find_container(files) == "podman"


def test_cpu__named_by_the_kernel(files: SystemFiles) -> None:
    write(files.proc / "cpuinfo", "processor\t: 0\nmodel name\t: Some CPU 9000\n")
    found = system.look_at_cpu(files)
    assert found.name == "Some CPU 9000"
    assert 1 <= found.usable <= found.cores


def test_tools__the_installed_torch__without_importing_it() -> None:
    import torch

    found = system.find_tools()
    assert found.torch == torch.__version__.partition("+")[0]
    assert found.torch_cuda == torch.version.cuda


# -- drives ----------------------------------------------------------------------------------

MOUNTS = r"""
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
40 22 8:17 / /mnt/my\040disk rw shared:2 - xfs /dev/sdb1 rw
41 22 0:50 / /mnt/nas rw - nfs4 nas:/models rw
42 22 254:1 / /home rw - btrfs /dev/mapper/home rw
garbage
"""


@pytest.mark.parametrize(
    ("path", "filesystem"),
    [
        ("/", "ext4"),
        ("/mnt", "ext4"),
        ("/mnt/my disk/models", "xfs"),
        ("/mnt/nas", "nfs4"),
        ("/mnt/nastier", "ext4"),
        ("/home/ada", "btrfs"),
    ],
)
def test_mounts__the_one_a_path_is_on(path: str, filesystem: str) -> None:
    found = drives.find_mount(drives.read_mounts(MOUNTS), path)
    assert found is not None
    assert found.filesystem == filesystem


def block(files: SystemFiles, number: str, folder: str, rotational: int) -> Path:
    """A drive in the kernel's tree, with the link by its number."""
    real = files.sys / "devices" / folder
    disk = real.parent if (real.name[-1:].isdigit() and "p" in real.name) else real
    write(disk / "queue" / "rotational", rotational)
    real.mkdir(parents=True, exist_ok=True)
    link = files.sys / "dev" / "block" / number
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(real)
    return real


def test_block_device__partition_of_an_nvme__the_drive(files: SystemFiles) -> None:
    write(block(files, "259:2", "nvme0n1/nvme0n1p2", 0) / "partition", 2)
    found = drives._block_device(files, "259:2")
    assert found == drives.BlockDevice("nvme0n1", is_nvme=True, is_rotational=False)


def test_block_device__spinning_and_encrypted_and_virtual(files: SystemFiles) -> None:
    block(files, "8:16", "sdb", 1)
    assert drives._block_device(files, "8:16") == drives.BlockDevice("sdb", False, True)
    (block(files, "254:1", "dm-0", 0) / "slaves" / "nvme1n1").mkdir(parents=True)
    assert drives._block_device(files, "254:1") == drives.BlockDevice("dm-0", True, False)
    block(files, "252:0", "vda", 1)  # says that it rotates, whatever it is
    assert drives._block_device(files, "252:0") == drives.BlockDevice("vda", None, None)
    assert drives._block_device(files, "0:1") == drives.BlockDevice("")


def test_drive__a_folder_that_is_not_there_yet(files: SystemFiles, tmp_path: Path) -> None:
    found = drives.look_at_drive(tmp_path / "a" / "b", "models", files)
    assert found.folder == str(tmp_path / "a" / "b")
    assert 0 < found.free <= found.total
    assert not (tmp_path / "a").exists()
    assert not list(tmp_path.glob(".moet-desk*"))


# -- rates -----------------------------------------------------------------------------------


def test_rates__kept_and_what_is_not_measured_again_stays(tmp_path: Path) -> None:
    assert rates.read_rates(tmp_path) is None
    rates.save_rates(tmp_path / "new", Rates(measured="2026-01-01T00:00:00Z", pcie=5e10))
    later = Rates(measured="2026-02-02T00:00:00Z", drive_read=6e9, drive_direct=True)
    rates.save_rates(tmp_path / "new", later)
    assert rates.read_rates(tmp_path / "new") == Rates(
        measured="2026-02-02T00:00:00Z", pcie=5e10, drive_read=6e9, drive_direct=True
    )
    (tmp_path / "new" / rates.RATES_FILE).write_text("{")
    assert rates.read_rates(tmp_path / "new") is None


def test_measure__this_computer__plausible_and_no_file_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates, "_READ_FILE", 16 * MIB)
    monkeypatch.setattr(rates, "_READ_S", 0.1)
    found = rates.measure(tmp_path / "models")
    assert found.ram_copy is not None
    assert found.ram_copy > 1e8
    assert found.drive_read is not None
    assert found.drive_read > 1e6
    assert list(tmp_path.iterdir()) == []


# -- cards -----------------------------------------------------------------------------------


class Nvml:
    """The driver's library with one card; some answers are missing, as on real ones."""

    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18
    NVML_CLOCK_MEM = 2

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            super().__init__(f"error {value}")
            self.value = value

    def __init__(self, init_error: int | None = None) -> None:
        self.init_error = init_error
        self.is_open = False
        self.nvmlSystemGetDriverVersion = lambda: b"580.95.05"
        self.nvmlSystemGetCudaDriverVersion_v2 = lambda: 13000
        self.nvmlDeviceGetCount = lambda: 1
        self.nvmlDeviceGetHandleByIndex = lambda index: index
        card = SimpleNamespace(total=32 * GIB, free=30 * GIB)
        self.nvmlDeviceGetMemoryInfo = lambda handle: card
        self.nvmlDeviceGetName = lambda handle: "NVIDIA GeForce RTX 5090"
        self.nvmlDeviceGetUUID = lambda handle: b"GPU-1"
        self.nvmlDeviceGetCudaComputeCapability = lambda handle: (12, 0)
        self.nvmlDeviceGetDisplayActive = self.unknown
        self.nvmlDeviceGetMemoryBusWidth = lambda handle: 512
        self.nvmlDeviceGetMaxClockInfo = lambda handle, kind: {2: 14001}[kind]
        self.nvmlDeviceGetCurrPcieLinkGeneration = lambda handle: 1
        self.nvmlDeviceGetCurrPcieLinkWidth = lambda handle: 8
        self.nvmlDeviceGetMaxPcieLinkGeneration = lambda handle: 5
        self.nvmlDeviceGetMaxPcieLinkWidth = lambda handle: 16

    def unknown(self, handle: int) -> Any:
        raise self.NVMLError(3)

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise self.NVMLError(self.init_error)
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False


def test_gpus__one_card__what_the_driver_says_and_none_for_what_it_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = gpus.look_for_gpus()
    assert (found.driver, found.driver_cuda, found.problem) == ("580.95.05", "13.0", "")
    (gpu,) = found.gpus
    assert (gpu.uuid, gpu.capability, gpu.has_display) == ("GPU-1", (12, 0), None)
    assert (gpu.vram_total, gpu.vram_free) == (32 * GIB, 30 * GIB)
    assert gpu.vram_bytes_per_s == pytest.approx(1792e9, rel=0.001)
    assert gpu.link.card_gen is None  # this library does not have the call
    assert gpu.link.bytes_per_s == pytest.approx(31.5e9, rel=0.01)  # 8 lanes of PCIe 5
    assert not nvml.is_open


@pytest.mark.parametrize(
    ("number", "words"),
    [(12, "no NVIDIA driver"), (9, "not loaded"), (18, "not restarted"), (99, "error 99")],
)
def test_gpus__no_driver__says_why(
    number: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(number))
    found = gpus.look_for_gpus()
    assert found.gpus == ()
    assert words in found.problem


def test_gpus__driver_fails_half_way__says_so_and_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    nvml.nvmlDeviceGetMemoryInfo = nvml.unknown
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = gpus.look_for_gpus()
    assert "driver fails" in found.problem
    assert not nvml.is_open


def test_gpus__driver_goes_while_it_is_asked__says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    nvml.nvmlDeviceGetMemoryInfo = nvml.unknown
    monkeypatch.setattr(nvml, "nvmlShutdown", lambda: nvml.unknown(0))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert "driver fails" in gpus.look_for_gpus().problem


def test_gpus__without_the_package__says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "nvidia-ml-py" in gpus.look_for_gpus().problem


def test_look__this_computer__whole(tmp_path: Path) -> None:
    found = look({"models": tmp_path})
    assert found.memory.total > 0
    assert found.drives[0].use == "models"
    assert bool(found.gpus) != bool(found.gpu_problem)


# -- surroundings ----------------------------------------------------------------------------


def test_clock__newest_of_program_and_folders(tmp_path: Path) -> None:
    write(tmp_path / "kept", "x")
    os.utime(tmp_path / "kept", (4e9, 4e9))
    found = surroundings.look_at_clock([tmp_path, tmp_path / "absent"], now_s=5.0)
    assert (found.now_s, found.newest_file_s) == (5.0, 4e9)
    alone = surroundings.look_at_clock([])
    assert alone.newest_file_s == Path(surroundings.moet_desk.__file__).stat().st_mtime


def test_certificates__a_named_place_counts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "own.pem"
    monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
    assert surroundings.find_certificates() == Certificates(place=str(bundle), usable=False)
    bundle.touch()
    assert not surroundings.find_certificates().usable
    write(bundle, "certificate")
    assert surroundings.find_certificates().usable
    monkeypatch.delenv("SSL_CERT_FILE")
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    assert surroundings.find_certificates() == Certificates(place=str(tmp_path), usable=True)


@pytest.mark.parametrize(
    ("term", "truecolor", "colours"),
    [
        ("xterm-256color", True, 2**24),
        ("xterm-256color", False, 256),
        ("xterm-kitty", False, 256),
        ("linux", False, 16),
        ("dumb", False, 2),
    ],
)
def test_terminal__size_and_colours(
    term: str, truecolor: bool, colours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def size(fd: int) -> os.terminal_size:
        if fd == 0:
            raise OSError
        return os.terminal_size((100, 30))

    monkeypatch.setattr(surroundings.os, "get_terminal_size", size)
    found = surroundings.look_at_terminal(TerminalFacts(term=term, truecolor=truecolor, utf8=False))
    assert found == Terminal(name=term, columns=100, rows=30, utf8=False, colours=colours)


def test_terminal__none__nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> None:
        raise OSError

    monkeypatch.setattr(surroundings.os, "get_terminal_size", refuse)
    assert surroundings.look_at_terminal() is None
