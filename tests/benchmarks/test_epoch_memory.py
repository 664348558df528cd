"""The command runs and prints its measurements. No number is checked here."""

import json
from pathlib import Path

import pytest

from benchmarks import epoch_memory

ROWS = 30_000


@pytest.mark.nightly
def test_the_last_line_is_the_result(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = epoch_memory.CONFIG.model_copy(update={"workers": 1})  # so few rows take less than a second
    monkeypatch.setattr(epoch_memory, "CONFIG", one)
    figure = tmp_path / "figure.png"
    epoch_memory.main(["--json", "--rows", str(ROWS), "--folder", str(tmp_path), "--figure", str(figure)])
    figures = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert figures.keys() == {"growth", "whole", "tenth", "columns", "config", "machine"}
    assert (figures["whole"]["rows"], figures["tenth"]["rows"]) == (ROWS, ROWS // 10)
    for epoch in (figures["whole"], figures["tenth"]):
        assert epoch["peak_bytes"] > 0
        assert epoch["restarts"] == 0
        assert list(epoch["workers"]) == ["1"]
        for process in (*epoch["workers"].values(), epoch["master"]):
            assert process["peak_mib"] >= process["mib_at_100_percent"] > process["own_mib_at_100_percent"] > 0
            assert process["peak_mib"] >= process["mib_at_10_percent"] > process["own_mib_at_10_percent"] > 0
            assert process["own_peak_mib"] >= process["own_mib_at_10_percent"]
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert figure.stat().st_size < 150_000
    assert "rows and batches held" in epoch_memory.as_text(figures)
