"""Cards as the driver shows them (NVML). Works, and says why, where there is no driver."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moet_desk.machine import Gpu, PcieLink


@dataclass(frozen=True, slots=True)
class FoundGpus:
    """The cards, or why there are none."""

    gpus: tuple[Gpu, ...] = ()
    problem: str = ""
    driver: str | None = None
    driver_cuda: str | None = None


def look_for_gpus() -> FoundGpus:
    """Ask the driver for its cards. Raises nothing: what is wrong is in the result."""
    try:
        import pynvml
    except ImportError:
        return FoundGpus(problem="the package nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return FoundGpus(problem=_why(pynvml, error))
    try:
        return _ask(pynvml)
    except pynvml.NVMLError as error:
        return FoundGpus(problem=_why(pynvml, error))
    finally:
        with contextlib.suppress(pynvml.NVMLError):  # the driver may be gone by now
            pynvml.nvmlShutdown()


def _why(nvml: Any, error: Exception) -> str:
    number = getattr(error, "value", None)
    if number == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return "no NVIDIA driver is installed"
    if number == nvml.NVML_ERROR_DRIVER_NOT_LOADED:
        return "the NVIDIA driver is installed and not loaded"
    if number == nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return "the NVIDIA driver was updated and the computer not restarted"
    return f"the NVIDIA driver fails: {error}"


def _ask(nvml: Any) -> FoundGpus:
    cuda = _or_none(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2)
    driver = _or_none(nvml, nvml.nvmlSystemGetDriverVersion)
    gpus = tuple(_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
    return FoundGpus(
        gpus=gpus,
        problem="" if gpus else "the driver shows no card",
        driver=_word(driver),
        driver_cuda=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
    )


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)

    def ask(name: str, *more: Any) -> Any:
        function = getattr(nvml, name, None)  # older packages lack some
        return None if function is None else _or_none(nvml, function, handle, *more)

    link = PcieLink(
        gen=ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        max_gen=ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        max_width=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        card_gen=ask("nvmlDeviceGetGpuMaxPcieLinkGeneration"),
    )
    capability = ask("nvmlDeviceGetCudaComputeCapability")
    display = ask("nvmlDeviceGetDisplayActive")
    return Gpu(
        index=index,
        name=_word(nvml.nvmlDeviceGetName(handle)) or "",
        uuid=_word(nvml.nvmlDeviceGetUUID(handle)) or "",
        vram_total=int(memory.total),
        vram_free=int(memory.free),
        capability=None if capability is None else (int(capability[0]), int(capability[1])),
        has_display=None if display is None else bool(display),
        memory_bits=ask("nvmlDeviceGetMemoryBusWidth"),
        memory_mhz=ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_MEM),
        link=link,
    )


def _or_none(nvml: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """What the driver answers, None where this card or driver does not know."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def _word(text: Any) -> str | None:
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else text
