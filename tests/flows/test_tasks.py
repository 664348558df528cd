"""Stages whose result can be had in several forms."""

import mlflow
import numpy as np
import pyarrow as pa
import pytest

from flows import tasks
from flows.config import load
from flows.job import pinned
from flows.train import train
from pipeline.preprocessing.worker import Worker
from pipeline.registration.register import raw_frame
from pipeline.registration.scorer import LoadedModel
from storage.artifacts import sha256

CONFIG = "configs/smoke.yaml"


@pytest.mark.slow
def test_a_model_of_int8_tables_is_registered_as_it_is_judged(smoke, copied, command):
    """One training of two steps: its version is a new one beside the fp32 model, and scores as the packed one does."""
    words = ("registration.weights=int8", "training.max_steps=2", "evaluation.slices=[]")
    code, result, log = command(train, CONFIG, *words, home=copied)
    assert code == 0, log
    version = str(result["model"]["version"])
    config = load(CONFIG)
    tracker = tasks.tracker_of(config)
    tags = tracker.client.get_model_version("smoke", version).tags
    folder = copied / "runs" / f"smoke-{result['identity'][:12]}-0"
    weights = folder / "model_int8" / "weights.safetensors"
    assert (tags["weights"], tags["size_bytes"]) == ("int8", str(weights.stat().st_size))
    plain = tracker.client.get_model_version("smoke", "1").tags
    assert (plain["weights"], int(plain["size_bytes"]) > 2 * weights.stat().st_size) == ("fp32", True)
    downloaded = mlflow.artifacts.download_artifacts(f"models:/smoke/{version}", dst_path=str(copied / "got"))
    assert sha256(copied / "got" / "artifacts" / "model" / "weights.safetensors") == sha256(weights), downloaded
    worker = Worker(pinned(config, None, False).data["test"], tasks.warehouse_of(config))
    rows = pa.concat_tables([worker.raw(fragment) for fragment in worker.fragments()])
    packed = {form: LoadedModel(folder / form) for form in ("model", "model_int8")}
    served = mlflow.pyfunc.load_model(f"models:/smoke/{version}")
    scores = served.predict(raw_frame(rows, packed["model"].columns))["probability"].to_numpy()
    assert np.abs(scores - packed["model_int8"].score(rows)).max() < 1e-6
    labels = rows["label"].to_numpy()
    logloss = -np.mean(np.log(np.where(labels == 1, scores, 1 - scores)))
    assert result["eval"]["logloss"] == pytest.approx(logloss, abs=1e-6)  # judged by the rounded weights
    assert 0 < np.abs(scores - packed["model"].score(rows)).max() < 0.01
