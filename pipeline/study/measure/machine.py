"""Peak rates of a machine, measured in a few seconds, and its power."""

import importlib
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from pydantic import BaseModel

ROWS, WIDTH, LOOKUPS = 1 << 21, 64, 1 << 17
"""Shape and lookups of the gathered table. 512 MiB exceed most caches."""
TRIES = 7
SLOW_SECONDS = 0.1
"""A product of a sixteenth of the rows that takes longer than this is not repeated with all rows."""


class Machine(BaseModel, frozen=True):
    """Resources and peak rates of a machine with all requested threads. On CUDA, the rates of one device.

    Source:
        Williams, Waterman, Patterson 2009, "Roofline": ceilings are measured, not taken from data sheets.
    """

    cpu: str
    cores: int
    """Cores that this process may use."""
    memory_bytes: int
    """Host memory that this process may use."""
    threads: int
    """Threads during the measurement."""
    device: Literal["cpu", "cuda"] = "cpu"
    device_name: str | None = None
    """Name of the CUDA device."""
    device_memory_bytes: int | None = None
    fp32_gflops: float
    """Rate of float32 matrix products."""
    bf16_gflops: float
    """Rate of bfloat16 matrix products."""
    read_gb_per_second: float
    """Sequential memory reads."""
    random_gb_per_second: float
    """Rows of 64 float32 numbers, read at random and summed."""


def measure_machine(threads: int, device: str = "cpu") -> Machine:
    """Measures this machine. Each rate is the best of several tries.

    Args:
        threads: Threads of tensor arithmetic.
        device: `cpu` or `cuda`. Of several CUDA devices, the current one.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ceilings = {
            "fp32_gflops": measure_gflops(torch.float32, device),
            "bf16_gflops": measure_gflops(torch.bfloat16, device),
            "read_gb_per_second": measure_read_speed(device),
            "random_gb_per_second": measure_random_read_speed(device),
        }
    finally:
        torch.set_num_threads(before)
    accelerator: dict[str, Any] = {}
    if device == "cuda":
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        accelerator = {"device": "cuda", "device_name": found.name, "device_memory_bytes": found.total_memory}
    return Machine(
        cpu=read_processor_name(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=read_memory_bytes(),
        threads=threads,
        **accelerator,
        **{name: round(value, 1) for name, value in ceilings.items()},
    )


def measure_gflops(precision: torch.dtype, device: str = "cpu") -> float:
    """Measures GFLOP/s of matrix products as large as in a wide MLP.

    A processor without instructions for the precision is a hundred times slower. Its products have fewer rows.
    """
    rows, size = (4_096, 1_024) if device == "cpu" else (16_384, 4_096)
    a, b = (torch.randn(shape, device=device).to(precision) for shape in ((rows, size), (size, size)))
    few = a[: rows // 16]
    seconds = _least(lambda: torch.mm(few, b), device, tries=2)
    if seconds < SLOW_SECONDS:
        few, seconds = a, _least(lambda: torch.mm(a, b), device)
    return 2e-9 * len(few) * size * size / seconds


def measure_read_speed(device: str = "cpu") -> float:
    """Measures GB/s of summing half a gibibyte."""
    memory = torch.ones(2**27, device=device)
    return 1e-9 * memory.nbytes / _least(memory.sum, device)


def measure_random_read_speed(device: str = "cpu") -> float:
    """Measures GB/s of random table rows, summed in bags of 8."""
    table = torch.ones(ROWS, WIDTH, device=device)
    ids = torch.randint(ROWS, (LOOKUPS // 8, 8), device=device)
    read = LOOKUPS * WIDTH * table.element_size()
    return 1e-9 * read / _least(lambda: torch.nn.functional.embedding_bag(ids, table, mode="sum"), device)


def _least(action: Callable[[], Any], device: str, tries: int | None = None) -> float:
    """Returns the seconds of the fastest of TRIES tries. The first ones warm up memory and caches."""
    times = []
    for _ in range(tries or TRIES):
        start = time.perf_counter()
        action()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def read_processor_name() -> str:
    """Returns the name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def read_memory_bytes(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Returns the memory of the host, or the limit of its control group."""
    total = psutil.virtual_memory().total
    allowed = limit.read_text(encoding="utf-8").strip() if limit.is_file() else "max"
    return min(total, int(allowed)) if allowed.isdigit() else total


class Power:
    """Power of the processors or CUDA devices, from their energy counters.

    Processors are read from RAPL, which most systems restrict to root. Devices are read from NVML, if the package
    `nvidia-ml-py` is installed.

    Args:
        device: `cpu` or `cuda`.
        root: Folder of RAPL.
    """

    def __init__(self, device: str = "cpu", root: Path = Path("/sys/class/powercap")) -> None:
        # `intel-rapl:0` is a package. `intel-rapl:0:1` is a part of it and already counted in it.
        packages = sorted(path for path in root.glob("intel-rapl:*") if path.name.count(":") == 1)
        self._read = _nvml if device == "cuda" else lambda: _rapl(packages)
        self._last = self._read()
        self._since = time.perf_counter()

    def watts(self) -> float | None:
        """Returns the mean watts since the last call, or since the start. None: not readable."""
        before, since = self._last, self._since
        self._last, self._since = self._read(), time.perf_counter()
        if not before or self._last.keys() != before.keys() or self._since <= since:
            return None
        joules = 0.0
        for name, (now, wraps_at) in self._last.items():
            used = now - before[name][0]
            joules += used if used >= 0 else used + wraps_at
        return joules / (self._since - since)


Energy = dict[str, tuple[float, float]]
"""Counter -> (joules so far, joules at which it wraps around). Empty: none is readable."""


def _rapl(packages: list[Path]) -> Energy:
    try:
        return {
            path.name: tuple(1e-6 * int((path / name).read_text()) for name in ("energy_uj", "max_energy_range_uj"))  # type: ignore[misc]
            for path in packages
        }
    except (OSError, ValueError):
        return {}


def _nvml() -> Energy:
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
        return {
            str(number): (1e-3 * nvml.nvmlDeviceGetTotalEnergyConsumption(handle), 0.0)
            for number, handle in enumerate(handles)
        }
    except Exception:  # not installed, no driver, or no counter: NVML has an error class for each
        return {}
