"""Peak rates of a machine, measured in a few seconds."""

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from pydantic import BaseModel, PositiveFloat, PositiveInt

ROWS, WIDTH, LOOKUPS = 1 << 21, 64, 1 << 17
"""Shape and lookups of the gathered table. 512 MiB exceed most caches."""
TRIES = 7
SLOW_SECONDS = 0.1
"""A product of a sixteenth of the rows that takes longer than this is not repeated with all rows."""


class Ceilings(BaseModel, frozen=True):
    """A machine with its peak rates, on all cores or on one CUDA device."""

    cpu: str
    """Display name."""
    cores: PositiveInt
    memory_bytes: PositiveInt
    """Of the host."""
    fp32_gflops: PositiveFloat
    """Rate of float32 matrix products."""
    bf16_gflops: PositiveFloat
    read_gb_per_second: PositiveFloat
    """Sequential memory reads."""
    random_gb_per_second: PositiveFloat
    """Rows of 64 float32 numbers, read at random and summed."""


class Machine(Ceilings, frozen=True):
    """This machine, as far as this process may use it, measured with all requested threads.

    Source:
        Williams, Waterman, Patterson 2009, "Roofline": ceilings are measured, not taken from data sheets.
    """

    threads: int
    """Threads during the measurement."""
    device: Literal["cpu", "cuda"] = "cpu"
    device_name: str | None = None
    device_memory_bytes: int | None = None


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
        **{name: max(round(value, 1), 0.1) for name, value in ceilings.items()},
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
