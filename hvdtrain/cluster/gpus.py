"""The GPUs of a host: as CUDA shows them to a process, and as the driver (NVML) describes them.

CUDA and NVML number GPUs differently, and CUDA may hide some of them from a process. Only the ID of
a GPU is the same in both.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.cluster.placement import visible_entries
from hvdtrain.errors import LaunchError
from hvdtrain.text import plural

__all__ = [
    "Gpu",
    "GpuReader",
    "GpuState",
    "cuda_gpus",
    "describe_gpus",
    "read_states",
    "visible_states",
]

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_TEXT_BYTES = 128
_NO_DEVICE = 100


class Gpu(NamedTuple):
    """A GPU, or a part of a GPU (MIG), that CUDA shows to a process."""

    id: str  # Unique ID. With CUDA, it is the UUID that ``nvidia-smi -L`` prints.
    # PCI bus ID, such as ``0000:3B:00.0``. All parts of a GPU have the same bus ID. Empty if
    # unknown.
    bus_id: str = ""
    # Name of the model. For a part of a GPU, the name contains the profile, such as ``1g.10gb``.
    # Empty if unknown.
    model: str = ""
    memory_bytes: int = 0  # size of its memory; 0 if unknown


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """The driver's description of a GPU or a part of a GPU. Unknown values are 0, None or empty."""

    number: str  # index of the GPU in ``nvidia-smi``, such as ``1``; ``1:0`` for its first part
    id: str = ""  # UUID
    model: str = ""  # name of the model
    driver: str = ""  # version of the driver
    memory_bytes: int = 0  # size of its memory
    used_bytes: int = 0  # memory in use by all processes
    busy: int | None = None  # utilization in the last second in percent
    # ID, name and memory in bytes of each process that computes on it
    processes: Sequence[tuple[int, str, int]] = ()
    faults: Sequence[str] = ()  # faults of the GPU, such as ``2 uncorrectable memory errors``


def cuda_gpus() -> list[Gpu]:
    """Return the GPUs that CUDA shows to this process, in CUDA's order.

    CUDA reads ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER`` when a process first uses CUDA.
    Later changes of these variables have no effect. The list is empty if the host lacks a driver,
    or if CUDA shows no GPU.

    Raises:
        LaunchError: If CUDA fails.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    code = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    if code == _NO_DEVICE:
        return []
    if code:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(code, ctypes.byref(text))
        raise LaunchError(
            f"CUDA fails: {(text.value or b'unknown error').decode()} (code {code}). Compare the "
            "driver's log: dmesg | grep -i nvrm"
        )
    gpus = [_cuda_gpu(cuda, ordinal) for ordinal in range(count.value)]
    return [gpu for gpu in gpus if gpu is not None]


def describe_gpus(count: int, host: str, environ: Mapping[str, str]) -> list[Gpu]:
    """Describe the ``count`` GPUs that a framework sees, in the framework's order.

    If CUDA doesn't describe the GPUs, the ID of a GPU consists of the host and a number. The
    numbers come from a variable such as ``CUDA_VISIBLE_DEVICES``, if one is set.
    """
    if count == 0:
        return []
    with contextlib.suppress(LaunchError):
        gpus = cuda_gpus()
        if len(gpus) == count:
            return gpus
    numbers = [str(number) for number in range(count)]
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        entries = environ.get(name, "").split(",")
        if len(entries) == count and all(entries):
            numbers = entries
            break
    return [Gpu(f"{host} GPU {number}") for number in numbers]


def _cuda_gpu(cuda: ctypes.CDLL, ordinal: int) -> Gpu | None:
    device = ctypes.c_int()
    raw = (ctypes.c_ubyte * 16)()
    # The second version of this function distinguishes the parts of a GPU.
    get_uuid = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid
    if cuda.cuDeviceGet(ctypes.byref(device), ordinal) or get_uuid(raw, device):
        return None
    bus_id, model = (ctypes.create_string_buffer(_TEXT_BYTES) for _ in range(2))
    memory = ctypes.c_size_t()
    # If one of these fails, the value stays empty.
    cuda.cuDeviceGetPCIBusId(bus_id, _TEXT_BYTES, device)
    cuda.cuDeviceGetName(model, _TEXT_BYTES, device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    name = model.value.decode(errors="replace")
    kind = "MIG" if " MIG " in name else "GPU"
    return Gpu(f"{kind}-{uuid.UUID(bytes=bytes(raw))}", bus_id.value.decode(), name, memory.value)


def read_states(rows: Sequence[Any]) -> tuple[GpuState, ...]:
    """Decode the states of GPUs from JSON, perhaps of another version of hvdtrain."""
    known = {entry.name for entry in dataclasses.fields(GpuState)}
    return tuple(
        GpuState(**{name: _frozen(value) for name, value in row.items() if name in known})
        for row in rows
        if isinstance(row, dict) and "number" in row
    )


def _frozen(value: Any) -> Any:
    """Convert lists and nested lists to tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def visible_states(states: Sequence[GpuState], environ: Mapping[str, str]) -> list[GpuState]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` allows ranks to use.

    Raises:
        LaunchError: If CUDA fails, or shows none of the driver's GPUs.
    """
    entries = visible_entries(environ)
    if not states or entries == []:
        return []
    shown = cuda_gpus()
    if not shown:
        raise LaunchError(
            f"The driver knows {plural(len(states), 'GPU')}, but CUDA shows none: libcuda.so.1 is "
            f"missing, or {_VISIBLE} is wrong, got {environ.get(_VISIBLE, 'no value')!r}."
        )
    # Only CUDA knows its numbers. It shows a single part of a GPU, even if several are listed.
    listed = [entry for entry in entries or () if not entry.isdecimal()]
    ids = tuple(listed or [gpu.id for gpu in shown])
    # A GPU without an ID is lost.
    return [one for one in states if one.id.startswith(ids) or (entries is None and not one.id)]


class GpuReader:
    """Reads the state of this host's GPUs from the driver.

    Args:
        faults: Whether to read the counters of faults, which takes longer.
    """

    def __init__(self, *, faults: bool = True) -> None:
        self._faults = faults
        self._thread: threading.Thread | None = None
        self._result: list[GpuState] | LaunchError = []
        self._nvml: Any = None
        self._is_absent = False

    def read(self, timeout_s: float) -> list[GpuState]:
        """Return the state of each GPU and of each part of a GPU; empty without a driver.

        Raises:
            LaunchError: If the driver fails, or doesn't answer in time.
        """
        if self._is_absent:
            return []
        if self._thread is None or not self._thread.is_alive():
            # The driver answers within milliseconds, or never if a GPU is broken.
            self._result = LaunchError(f"The GPU driver did not answer within {timeout_s:g} s.")
            self._thread = threading.Thread(target=self._query, name="nvml", daemon=True)
            self._thread.start()
            self._thread.join(timeout_s)
        if isinstance(self._result, LaunchError):
            raise self._result
        return self._result

    def _query(self) -> None:
        try:
            # Hosts without GPUs may lack the package.
            import pynvml
        except ImportError:
            self._is_absent, self._result = True, []
            return
        try:
            if self._nvml is None:
                pynvml.nvmlInit()
                self._nvml = pynvml
            self._result = list(_states(pynvml, self._faults))
        except pynvml.NVMLError as error:
            # A missing driver stays missing, but a lost GPU may come back.
            self._is_absent = self._nvml is None
            no_library = isinstance(error, pynvml.NVMLError_LibraryNotFound)
            self._result = [] if no_library else LaunchError(f"The GPU driver fails: {error}.")


def _states(nvml: Any, with_faults: bool) -> Iterator[GpuState]:
    """Yield the state of each GPU of this host, or of each part of a divided GPU."""
    driver = str(nvml.nvmlSystemGetDriverVersion())
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            gpu = nvml.nvmlDeviceGetHandleByIndex(index)
            faults = tuple(_faults(nvml, gpu)) if with_faults else ()
            for number, handle in _parts(nvml, gpu, index) or [(str(index), gpu)]:
                yield _state(nvml, number, handle, driver=driver, faults=faults)
        except nvml.NVMLError as error:
            yield GpuState(number=str(index), driver=driver, faults=(f"{error}",))


def _parts(nvml: Any, gpu: Any, index: int) -> list[tuple[str, Any]]:
    """Return the number and the handle of each part (MIG) of a GPU; empty for a whole GPU."""
    parts: list[tuple[str, Any]] = []
    if _ask([0, 0], nvml, nvml.nvmlDeviceGetMigMode, gpu)[0]:
        for part in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
            with contextlib.suppress(nvml.NVMLError_NotFound):
                handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, part)
                parts.append((f"{index}:{part}", handle))
    return parts


def _faults(nvml: Any, gpu: Any) -> Iterator[str]:
    """Yield each fault of the memory of a GPU. Many GPU models count only some kinds of faults."""
    kind = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    if errors := _ask(0, nvml, nvml.nvmlDeviceGetTotalEccErrors, gpu, *kind):
        yield f"{errors} uncorrectable memory errors since the driver was loaded"
    _, _, is_pending, has_failed = _ask((0, 0, 0, 0), nvml, nvml.nvmlDeviceGetRemappedRows, gpu)
    if has_failed:
        yield "faulty memory rows could not be remapped"
    elif is_pending:
        yield "faulty memory rows will be remapped at the next reset"
    if _ask(0, nvml, nvml.nvmlDeviceGetRetiredPagesPendingStatus, gpu):
        yield "faulty memory pages will be retired at the next reset"


def _state(
    nvml: Any, number: str, handle: Any, *, driver: str, faults: tuple[str, ...]
) -> GpuState:
    total = used = 0
    # A GPU that shares the host's memory has none of its own.
    with contextlib.suppress(nvml.NVMLError_NotSupported):
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        total, used = int(memory.total), int(memory.used)
    utilization = _ask(None, nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    return GpuState(
        number=number,
        id=str(nvml.nvmlDeviceGetUUID(handle)),
        model=str(nvml.nvmlDeviceGetName(handle)),
        driver=driver,
        memory_bytes=total,
        used_bytes=used,
        # Unknown for parts of a GPU.
        busy=None if utilization is None else int(utilization.gpu),
        processes=tuple(
            (int(process.pid), _process_name(process.pid), int(process.usedGpuMemory or 0))
            for process in _ask([], nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        ),
        faults=faults,
    )


def _ask(default: Any, nvml: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of NVML, and return ``default`` if the GPU doesn't support it."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return default


def _process_name(pid: int) -> str:
    """Return the name of a process; empty if the process runs in another container."""
    try:
        # The kernel shortens names to 15 bytes, even within a character.
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""
