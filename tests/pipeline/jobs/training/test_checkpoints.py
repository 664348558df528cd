"""Checkpoints belong to a model: another one on the same table has its own."""

from pathlib import Path

import pytest

from pipeline.jobs.training.checkpoints import list_checkpoints
from tests.homes import open_smoke

HASH = "0123456789ab"


@pytest.mark.parametrize("other", ["small", "Small model", "smoke_2", "模型"])
def test_a_model_lists_its_own_runs(tmp_path: Path, other: str) -> None:
    first = open_smoke(home=str(tmp_path))
    second = open_smoke(home=str(tmp_path), registration__model_name=other)
    keys = [one.config.model_key for one in (first, second)]
    assert keys[0] == "smoke" != keys[1]
    names = [[f"{key}-{HASH}-0", f"{key}-2025-01-06-{HASH}-01234567-0"] for key in keys]
    for name in (*names[0], *names[1]):
        (tmp_path / "runs" / name / "checkpoints" / "best").mkdir(parents=True)
    found = [
        {one["run"] for one in list_checkpoints(workspace, None, False)["checkpoints"]} for workspace in (first, second)
    ]
    assert found == [set(one) for one in names]
