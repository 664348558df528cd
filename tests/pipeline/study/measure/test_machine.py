"""Peak rates are plausible, and power comes from counters that wrap around. No speed is asserted."""

import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from pipeline.study.measure import machine
from pipeline.study.measure.machine import Machine, Power, measure_machine, read_memory_bytes


def test_this_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "TRIES", 2)
    monkeypatch.setattr(machine, "ROWS", 1 << 12)
    before = torch.get_num_threads()
    found = measure_machine(threads=1)
    assert torch.get_num_threads() == before
    assert (found.threads, found.device, found.device_name) == (1, "cpu", None)
    assert min(found.fp32_gflops, found.bf16_gflops, found.read_gb_per_second, found.random_gb_per_second) > 0
    assert Machine.model_validate_json(found.model_dump_json()) == found


def test_a_control_group_may_allow_less_memory(tmp_path: Path) -> None:
    limit, total = tmp_path / "memory.max", psutil.virtual_memory().total
    assert read_memory_bytes(limit) == total
    limit.write_text("max\n")
    assert read_memory_bytes(limit) == total
    limit.write_text("4096\n")
    assert read_memory_bytes(limit) == 4096


def set_energy(root: Path, name: str, microjoules: int, wraps_at: int) -> None:
    (root / name).mkdir(exist_ok=True)
    (root / name / "energy_uj").write_text(f"{microjoules}\n")
    (root / name / "max_energy_range_uj").write_text(f"{wraps_at}\n")


def test_watts_are_joules_of_all_packages_over_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.0, 16.0])
    monkeypatch.setattr(machine, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    set_energy(tmp_path, "intel-rapl:0", 5_000_000, 100_000_000)
    set_energy(tmp_path, "intel-rapl:1", 90_000_000, 100_000_000)
    set_energy(tmp_path, "intel-rapl:0:0", 1, 100)  # a part of the first: counted there
    power = Power(root=tmp_path)
    set_energy(tmp_path, "intel-rapl:0", 25_000_000, 100_000_000)
    set_energy(tmp_path, "intel-rapl:1", 10_000_000, 100_000_000)  # 20 joules, over the end of the counter
    set_energy(tmp_path, "intel-rapl:0:0", 77, 100)
    assert power.watts() == pytest.approx((20 + 20) / 2)
    set_energy(tmp_path, "intel-rapl:0", 33_000_000, 100_000_000)
    assert power.watts() == pytest.approx(8 / 4)


def test_power_that_cannot_be_read_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Power(root=tmp_path / "nothing").watts() is None
    set_energy(tmp_path, "intel-rapl:0", 1, 10)
    power = Power(root=tmp_path)
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()
    assert power.watts() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Power("cuda").watts() is None


def test_watts_of_devices_come_from_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, millijoules = iter([0.0, 2.0]), iter([1_000, 5_000, 2_000, 25_000])
    monkeypatch.setattr(machine, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    fake = SimpleNamespace(
        nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 2, nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: next(millijoules),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert Power("cuda").watts() == pytest.approx((1 + 20) / 2)
