"""A training reads what an earlier one has made, and its weights are those without a cache."""

from pathlib import Path
from typing import Any

import pytest

from flows.ingest import ingest
from flows.preprocess import preprocess
from flows.train import train
from pipeline.config import load
from pipeline.preprocessing.cache.store import COLUMNS
from tests.homes import CONFIG


@pytest.mark.nightly
def test_trainings_share_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: Any) -> None:
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    keys = {"source.generator.rows_per_day": 1_500, "training.world_size": 1, "preprocessing.workers": 2}
    cached = keys | {"preprocessing.cache_bytes": 1 << 30}
    ingest(CONFIG, keys)
    assert load(CONFIG, cached).semantics() == load(CONFIG, keys).semantics()
    done = [train(CONFIG, one, force=True) for one in (keys, cached, cached)]
    trained = [one["train"] for one in done]
    assert len({one["weights_sha256"] for one in trained}) == 1
    assert "cache" not in trained[0]["preprocessing"]
    cold, warm = (one["preprocessing"]["cache"] for one in trained[1:])
    assert cold["misses"] > 0
    assert (warm["hits"], warm["misses"]) == (cold["hits"] + cold["misses"], 0)
    assert list((tmp_path / "warehouse" / COLUMNS).rglob("*.columns"))
    made = [preprocess(CONFIG, one) for one in (keys, cached)]  # the rows that both trainings have read
    assert made[0]["order_hash"] == made[1]["order_hash"]
    assert (made[1]["bytes_read"], made[1]["cache"]["misses"]) == (0, 0)
    assert made[0]["bytes_read"] > 0
    assert made[0]["counts"] == made[1]["counts"]
