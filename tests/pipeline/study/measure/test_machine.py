"""Peak rates are plausible, and power comes from counters that wrap around. No speed is asserted."""

from pathlib import Path

import psutil
import pytest
import torch

from pipeline.study.measure import machine
from pipeline.study.measure.machine import Machine, measure_machine, read_memory_bytes


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
