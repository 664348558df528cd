"""Stages that write their result in several forms."""

import json

import mlflow
import numpy as np
import pyarrow as pa
import pytest
from safetensors.torch import load_file

from pipeline.config import load
from pipeline.inference.model import LoadedModel
from pipeline.jobs.training.evaluate import evaluate
from pipeline.jobs.training.finish import register
from pipeline.jobs.training.job import resolve_job
from pipeline.jobs.training.train import TrainingResult
from pipeline.jobs.workspace import Workspace
from pipeline.preprocessing.worker import Worker
from pipeline.registration.register import raw_frame
from pipeline.registration.versions import download_packed
from storage.artifacts import sha256


@pytest.mark.slow
def test_a_model_with_int8_tables_is_registered_as_evaluated(smoke, home, copied):
    """The smoke run's weights in the other form."""
    config = load("configs/smoke.yaml", {"registration.weights": "int8"})
    job = resolve_job(Workspace(config), None, False)
    assert job.done is None
    before = home / "runs" / f"smoke-{smoke['identity'][:12]}-0"
    probe = json.loads((before / "probe.json").read_text())
    trained = TrainingResult(
        weights=str(before / "weights.safetensors"), probe=probe, summary=smoke["train"], placement=()
    )

    run_id = Workspace(config).tracking.start("int8", {}, {}, None)

    evaluation = evaluate(Workspace(config), job, trained)
    model = register(Workspace(config), job, trained, evaluation, run_id)
    folder = copied / "runs" / f"smoke-{job.identity[:12]}-0"
    plain, rounded = LoadedModel(folder / "model"), LoadedModel(folder / "int8" / "model")
    weights = folder / "int8" / "model" / "weights.safetensors"
    tags = Workspace(config).tracking.client.get_model_version("smoke", str(model.version)).tags
    assert (tags["weights"], tags["size_bytes"]) == ("int8", str(weights.stat().st_size))
    assert evaluation.report.ne_exact == smoke["eval"]["ne"]
    assert float(tags["ne_int8_cost"]) == pytest.approx(evaluation.report.overall.ne - smoke["eval"]["ne"], abs=1e-6)
    others = Workspace(config).tracking.client.get_model_version("smoke", "1").tags
    assert others["weights"] == "fp32"
    width = config.model.embedding_width
    ratio = weights.stat().st_size / int(others["size_bytes"])
    assert ratio == pytest.approx((width + 8) / (4 * width), abs=0.01)
    fetched = download_packed(Workspace(config).tracking, "smoke", model.version, copied / "fetched")
    assert sha256(fetched / "weights.safetensors") == sha256(weights)
    worker = Worker(job.data["test"], Workspace(config).warehouse)
    rows = pa.concat_tables([worker.read_selected(fragment) for fragment in worker.fragments()])
    served = mlflow.pyfunc.load_model(f"models:/smoke/{model.version}")
    scores = served.predict(raw_frame(rows, plain.columns))["probability"].to_numpy()
    assert np.abs(scores - rounded.score(rows)).max() < 1e-6
    assert 0 < np.abs(scores - plain.score(rows)).max() < 1e-3
    logloss = -np.mean(np.log(np.where(rows["label"].to_numpy() == 1, scores, 1 - scores)))
    assert evaluation.report.overall.logloss == pytest.approx(logloss, abs=1e-7)
    assert evaluation.report.overall.logloss != pytest.approx(smoke["eval"]["logloss"], abs=1e-9)
    assert load_file(weights).keys() == load_file(before / "weights.safetensors").keys()
