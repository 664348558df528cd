"""A model trained on a weighted fifth of the negatives matches the whole population."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.end_to_end import end_to_end
from pipeline.config import load
from pipeline.errors import ConfigError
from pipeline.inference.model import LoadedModel
from pipeline.registration.versions import download_packed
from tests.homes import CONFIG, files_of, open_smoke
from tests.quality import quality

THINNED = {
    "source.outcomes.keep_negatives": 0.2,
    "features.weight": "sample_weight",
    "training.epochs": 6,
    "training.world_size": 1,
    "training.threads_per_rank": 1,
    "evaluation.importance_rows": None,
    "preprocessing.executor": "inline",
}


@pytest.mark.nightly
def test_a_thinned_model_is_calibrated_on_all_rows(smoke, home, plain, tmp_path, monkeypatch):
    monkeypatch.setenv("DLRM_HOME", str(tmp_path / "home"))
    result = end_to_end(config=CONFIG, overrides=THINNED)
    counts = result["ingest"]["by_day"]["2025-01-09"]
    assert counts["rows"] == 5_000 == counts["written"] + counts["left_out"]
    evaluation = result["eval"]
    assert evaluation["rows"] == counts["written"] < 3_000
    assert evaluation["label_rate"] == pytest.approx(smoke["eval"]["label_rate"], abs=0.03)
    files = files_of(home, "smoke", "2025-01-09")
    rows = pa.concat_tables([pq.read_table(file, partitioning=None) for file in files])
    model = LoadedModel(download_packed(open_smoke().tracking, "smoke", 1, Path(tmp_path / "model")))
    assert "sample_weight" not in model.columns
    found = quality(rows.column("label").to_numpy(), model.score(rows))
    assert found.rows == 5_000
    assert 0.85 < found.calibration < 1.15  # without the weights it is 2 or more
    assert found.ne < smoke["eval"]["ne"] + 0.03
    assert (evaluation["ne"], evaluation["calibration"]) == pytest.approx((found.ne, found.calibration), abs=0.1)


def test_thinned_rows_need_their_weight():
    with pytest.raises(ConfigError) as error:
        load(CONFIG, {"source.outcomes.keep_negatives": 0.2})
    assert str(error.value) == (
        "features.weight with source.outcomes.keep_negatives: expected sample_weight, got None. "
        "Set features.weight=sample_weight: a row kept stands for those left out."
    )


def test_weights_are_part_of_a_trainings_identity():
    config = load(CONFIG)
    assert config.semantics() != load(CONFIG, {"features.weight": "num_price"}).semantics()
