"""Which device computes: the decision, and what the probe makes of torch's answers."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from moet_desk import hardware
from moet_desk.errors import MoetError
from moet_desk.hardware import Accelerator, choose_device
from moet_desk.machine import Gpu
from moet_desk.probing.gpus import FoundGpus

CARD = Accelerator("NVIDIA X", (8, 0), has_triton=True, can_compile=True)
NO_CARD = Accelerator(missing="the driver shows none")
UNFIT = [
    pytest.param(NO_CARD, "MD-GPU-01", "the driver shows none", id="no card"),
    pytest.param(replace(CARD, capability=(7, 5)), "MD-GPU-02", "7.5", id="too old"),
    pytest.param(replace(CARD, has_triton=False), "MD-GPU-02", "Triton", id="no triton"),
    pytest.param(replace(CARD, can_compile=False), "MD-GPU-02", "compiler", id="no compiler"),
]


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_choose_device__card_that_can_be_used__taken(
    wanted: str, capability: tuple[int, int]
) -> None:
    assert choose_device(wanted, replace(CARD, capability=capability)).device == "cuda"


@pytest.mark.parametrize("found", [CARD, NO_CARD])
def test_choose_device__cpu__whatever_there_is(found: Accelerator) -> None:
    assert choose_device("cpu", found).device == "cpu"


@pytest.mark.parametrize(("found", "code", "word"), UNFIT)
def test_choose_device__card_cannot_be_used__auto_says_why_and_cuda_fails(
    found: Accelerator, code: str, word: str
) -> None:
    choice = choose_device("auto", found)
    assert choice.device == "cpu"
    assert word in choice.why
    with pytest.raises(MoetError) as caught:
        choose_device("cuda", found)
    assert caught.value.code == code
    assert word in caught.value.cause
    assert "engine.device" in caught.value.do


class Torch:
    """What the probe asks of torch, answered as a computer with a card would."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(torch.version, "cuda", "13.0")
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA X")
        patch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))


def test_probe__card__its_name_and_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    Torch(monkeypatch)
    found = hardware.probe_accelerator()
    assert (found.name, found.capability, found.missing) == ("NVIDIA X", (12, 0), "")
    assert found.has_triton


def test_probe__torch_without_cuda__says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    Torch(monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert hardware.probe_accelerator().missing == "this build of torch has no CUDA"


def test_probe__driver_too_old__torchs_words_and_no_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def warn() -> bool:
        warnings.warn("The driver on your system is too old.", stacklevel=1)
        return False

    Torch(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", warn)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = hardware.probe_accelerator()
    assert found.missing == "The driver on your system is too old"


def test_probe__driver_fails_when_asked__no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise RuntimeError("CUDA error: unknown error.")

    Torch(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_name", broken)
    assert "unknown error" in hardware.probe_accelerator().missing


def test_can_compile__compiler_named_by_the_environment_or_on_the_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    headers = tmp_path_factory.mktemp("include")
    monkeypatch.setattr(hardware.sysconfig, "get_paths", lambda: {"include": str(headers)})
    monkeypatch.setattr(hardware.shutil, "which", lambda name: None)
    monkeypatch.setenv("CC", "/opt/cc")
    assert not hardware._can_compile()  # no headers
    (headers / "Python.h").touch()
    assert hardware._can_compile()
    monkeypatch.delenv("CC")
    assert not hardware._can_compile()
    monkeypatch.setattr(hardware.shutil, "which", lambda name: name == "clang" and "/bin/clang")
    assert hardware._can_compile()


def test_take_card__several__the_one_with_free_memory_by_its_uuid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uuids = ["11111111-0000", "22222222-0000"]
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=uuids[i])
    )
    free = {"GPU-22222222-0000": 20, "GPU-11111111-0000": 2, "GPU-hidden": 90}
    gpus = tuple(
        Gpu(index=i, name=uuid, uuid=uuid, vram_total=24, vram_free=free[uuid])
        for i, uuid in enumerate(free)
    )
    monkeypatch.setattr(hardware, "look_for_gpus", lambda: FoundGpus(gpus=gpus))
    choice = hardware.take_card()
    assert choice is not None
    assert choice.gpu.uuid == "GPU-22222222-0000"
    assert taken == [1]  # torch's order, not the driver's


def test_take_card__one_card__torch_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: pytest.fail("set"))
    assert hardware.take_card() is None
