"""Some damaged inputs of each kind. `make fuzz` plays many more."""

from pathlib import Path

import pytest

from tests.fuzz.harness import play_many
from tests.fuzz.inputs import INPUTS

CASES = {
    "door": 2,
    "nights": 6,
    "avro": 15,
    "csv": 12,
    "ingest": 4,
    "parquet": 15,
    "side table": 12,
    "data file": 40,
    "forged checkpoint": 25,
    "config": 30,
    "overrides": 30,
    "conversation": 15,
    "foreign file": 15,
    "work": 30,
}
"""Cases of the slower inputs."""
FOUND = {"run folder": (7000243,), "forged checkpoint": (7000635, 7000745)}
"""Later cases that found something."""


NEED_EXTRAS = {"avro"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.extra if name in NEED_EXTRAS else ()) for name in INPUTS]
)
def test_a_reader_returns_a_right_value_or_refuses(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DLRM_HOME", raising=False)
    cases = CASES.get(name, 60)
    numbers = (*range(cases), *FOUND.get(name, ()))
    found = play_many(name, INPUTS[name], tmp_path / "fuzz", numbers)
    assert found["read"] + found["refused"] == len(numbers)
