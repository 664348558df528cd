"""The whole pipeline on a small sample: what it writes, what it skips, what it refuses."""

import json
import math
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import mlflow
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from prefect.exceptions import ParameterTypeError

from benchmarks.quality import judge, read_targets
from flows.end_to_end import end_to_end
from flows.ingest import ingest
from flows.score import score
from flows.train import train
from pipeline.config import load
from pipeline.errors import ConfigError
from pipeline.inference.model import LoadedModel
from pipeline.jobs.training import finish
from pipeline.jobs.training.job import open_training_run, resolve_job
from pipeline.jobs.training.summary import CURVES, STALL_CURVES
from pipeline.jobs.workspace import Workspace
from pipeline.preprocessing.worker import Worker
from pipeline.registration.aliases import list_versions
from pipeline.registration.register import raw_frame
from tests.homes import CONFIG, files_of, open_smoke
from tests.quality import quality


def test_result_has_what_scripts_rely_on(smoke):
    assert smoke["status"] == "ok"
    assert {"rows", "steps", "rows_per_second", "stall_fraction", "world_size", "weights_sha256"} <= smoke[
        "train"
    ].keys()
    assert {"rows", "ne", "logloss", "auc", "calibration", "ece", "ne_floor"} <= smoke["eval"].keys()
    assert smoke["train"]["rows"] == 10_000
    assert smoke["train"]["steps"] == 20
    assert smoke["train"]["world_size"] == 2
    assert smoke["eval"]["rows"] == 5_000
    assert smoke["model"] == {"name": "smoke", "version": 1, "alias": "champion"}
    assert smoke["gate"]["decision"] == "promote"
    assert smoke["gate"]["reason"].startswith("There is no champion yet, and NE 0.")
    json.dumps(smoke, allow_nan=False)


def test_the_result_agrees_with_the_registered_model_on_raw_rows(smoke, at_home):
    """Compares the pyfunc, loaded as any caller would, with the evaluation, on rows read by pyarrow."""
    config = load(CONFIG)
    files = files_of(at_home, "smoke", "2025-01-09")
    rows = pa.concat_tables([pq.read_table(file, partitioning=None) for file in files])
    mlflow.set_tracking_uri(Workspace(config).tracking.uri)
    model = mlflow.pyfunc.load_model(f"models:/smoke/{smoke['model']['version']}")
    columns = model.unwrap_python_model().loaded.columns
    scores = model.predict(raw_frame(rows, columns))["probability"].to_numpy()
    found = quality(rows.column("label").to_numpy(), scores)
    assert found.ne == pytest.approx(smoke["eval"]["ne"], abs=1e-7)
    assert found.auc == pytest.approx(smoke["eval"]["auc"], abs=1e-7)
    floor = quality(rows.column("label").to_numpy(), rows.column("true_probability").to_numpy()).ne
    assert smoke["eval"]["ne_floor"] == pytest.approx(floor)


def test_probabilities_equal_the_trainers(smoke, at_home):
    config = load(CONFIG)
    folder = at_home / "runs" / f"smoke-{smoke['identity'][:12]}-0"
    model = LoadedModel(folder / "model")
    job = resolve_job(Workspace(config), None, False)
    probe = finish._read_first_rows(Worker(job.data["test"], Workspace(config).warehouse), 256)
    expected = json.loads((folder / "probe.json").read_text())
    assert len(expected) == 256
    assert np.abs(model.score(probe) - np.array(expected)).max() <= 1e-6


def test_the_smoke_run_reaches_its_quality(smoke):
    target = read_targets()[CONFIG]
    assert judge(CONFIG, target, [smoke]).verdict == "ok"


def test_mlflow_holds_the_run(smoke, at_home):
    tracker = open_smoke().tracking
    run = tracker.client.get_run(smoke["mlflow_run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.metrics["eval/ne"] == pytest.approx(smoke["eval"]["ne"])
    sections = {name.partition("/")[0] for name in run.data.metrics}
    assert {"eval", "input", "system", "train", "valid"} <= sections
    ne = f"{smoke['eval']['ne']:.4f}"
    assert run.info.run_name.startswith(f"v1 promoted, NE {ne}, dot E8 B512 W2, epochs 1, rates ")
    assert run.data.tags["version"] == "1"
    assert run.data.tags["data"] == "10,000 of 2 days, 2025-01-06 to 2025-01-07"
    assert run.data.tags["snapshot_id"] == str(smoke["snapshot_id"])
    assert run.data.params["training.batch_rows"] == "512"
    assert run.inputs.dataset_inputs[0].dataset.name == "smoke"
    curve = tracker.load_curves(smoke["mlflow_run_id"], CURVES)
    assert [step for step, _ in curve["train_ne_window"]] == [5, 10, 15, 20]
    assert [step for step, _ in curve["valid_ne"]] == [20]
    names = {item.path for item in tracker.client.list_artifacts(smoke["mlflow_run_id"])}
    jsons = {
        f"{name}.json"
        for name in (
            "config",
            "data",
            "features",
            "plan",
            "preprocessing",
            "record",
            "report",
            "result",
            "sharding_plan",
        )
    }
    assert jsons | {"plots", "report.html"} <= names
    assert any(name.startswith("system/cpu") for name in run.data.metrics)
    plots = {item.path for item in tracker.client.list_artifacts(smoke["mlflow_run_id"], "plots")}
    named = (
        "calibration", "importance", "learning_curve", "placement", "precision_recall", "roc", "slices", "stall_timeline",
    )  # fmt: skip
    assert plots == {f"plots/{name}.svg" for name in named}


def test_mlflow_has_the_time_of_each_preprocessing_part(smoke, at_home):
    tracker = open_smoke().tracking
    curves = tracker.load_curves(smoke["mlflow_run_id"], STALL_CURVES)
    assert curves.keys() == {
        "stall_fraction_window", "batch_extract_seconds", "batch_transform_seconds", "batch_wait_seconds",
    }  # fmt: skip
    for name, points in curves.items():
        assert [step for step, _ in points] == [5, 10, 15, 20]
        assert all(0.0 <= value < (1.0 if name == "stall_fraction_window" else math.inf) for _, value in points)
    assert min(value for _, value in curves["batch_extract_seconds"] + curves["batch_transform_seconds"]) > 0.0
    waited = [5 * value for _, value in curves["batch_wait_seconds"]]  # of rank 0, like the fractions
    busy = sum(w / f for w, (_, f) in zip(waited, curves["stall_fraction_window"], strict=True) if f)
    assert sum(waited) <= busy
    kept = artifact(tracker, smoke["mlflow_run_id"], "preprocessing.json")
    assert smoke["train"]["preprocessing"] == {
        "executor": "process", "workers": kept["workers"], "restarts": 0, "quarantined_rows": 0,
    }  # fmt: skip
    assert kept["workers"] >= 1
    assert (kept["executor"], kept["quarantined"], kept["late_results"]) == ("process", [], 0)
    assert kept["costs"]["bytes_stored"] > kept["costs"]["bytes_read"] > 0
    [*_, (step, stalled)] = tracker.load_curves(smoke["mlflow_run_id"], ("stall_fraction",))["stall_fraction"]
    assert step == 20
    assert stalled == pytest.approx(smoke["train"]["stall_fraction"])


def artifact(tracker, run_id: str, name: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        return json.loads(Path(tracker.client.download_artifacts(run_id, name, folder)).read_text(encoding="utf-8"))


def test_model_version_is_recorded(smoke, at_home):
    tracker = open_smoke().tracking
    version = tracker.client.get_model_version("smoke", "1")
    assert version.run_id == smoke["mlflow_run_id"]
    assert version.tags["weights_sha256"] == smoke["train"]["weights_sha256"]
    assert (version.tags["gate"], version.tags["gate_reason"]) == ("promote", smoke["gate"]["reason"])
    assert {"snapshot_id", "plan_hash", "git_commit", "lock_hash", "seed"} <= version.tags.keys()
    info = mlflow.models.get_model_info("models:/smoke/1")
    names = [column.name for column in info.signature.inputs]
    assert {"num_price", "list_interests"} <= set(names)
    assert info.metadata is not None
    assert info.metadata["columns"]["list_interests"] == "list<long>"
    assert info.saved_input_example_info is not None


SCORES = """
import sys, mlflow, numpy as np
model = mlflow.pyfunc.load_model(sys.argv[1])
import pipeline.inference.model
assert "code.zip" in pipeline.inference.model.__file__, pipeline.inference.model.__file__
print(*model.predict(model.input_example)["probability"])
"""


def test_a_version_is_a_dozen_files_and_scores_with_the_code_among_them(smoke, at_home, tmp_path):
    """MLflow sends a file a request. The process that scores stands in a folder without the project."""
    uri = open_smoke().tracking.uri
    mlflow.set_tracking_uri(uri)
    place = Path(mlflow.artifacts.download_artifacts("models:/smoke/1", dst_path=str(tmp_path / "version")))
    files = {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert len(files) <= 12
    assert {"code.zip", "MLmodel", "artifacts/model/weights.safetensors"} <= files
    assert (
        mlflow.models.Model.load(place).model_size_bytes
        >= (place / "artifacts/model/weights.safetensors").stat().st_size
    )
    words = [sys.executable, "-c", SCORES, str(place)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    example = mlflow.pyfunc.load_model(str(place)).input_example
    expected = LoadedModel(place / "artifacts" / "model")
    scores = expected.score(expected.table_of(example))
    assert [float(one) for one in done.stdout.split()] == pytest.approx(scores.tolist(), abs=1e-7)


def test_no_pickle_is_left(smoke, at_home):
    assert not [path for path in at_home.rglob("*") if path.suffix in (".pkl", ".pickle", ".pt", ".pth")]


def test_the_snapshot_is_tagged(smoke, at_home):
    refs = open_smoke().warehouse.table("smoke").refs()
    assert refs[f"train-{smoke['identity'][:12]}-{smoke['snapshot_id']}"].snapshot_id == smoke["snapshot_id"]


def test_the_same_training_is_skipped(smoke, command, home):
    code, result, log = command(end_to_end, CONFIG, "training.log_every_steps=7", home=home)
    assert code == 0
    assert result["status"] == "skipped"
    assert result["ingest"]["status"] == "skipped"
    assert {key: result[key] for key in ("model", "mlflow_run_id", "train", "eval")} == {
        key: smoke[key] for key in ("model", "mlflow_run_id", "train", "eval")
    }
    assert "skipped: smoke version 1 has the same rows and config; force=true trains again" in log


def test_a_new_slice_evaluates_again_and_trains_nothing(smoke, command, copied):
    words = ["evaluation.slices=[cat_country]", "evaluation.importance_rows=null"]
    code, result, log = command(train, CONFIG, *words, home=copied)
    assert (code, result["status"]) == (0, "ok")
    assert "its evaluation has other settings or rows now" in log
    same = ("model", "gate", "identity", "mlflow_run_id", "train", "eval")
    assert {key: result[key] for key in same} == {key: smoke[key] for key in same}
    tracker = open_smoke().tracking
    assert list_versions(tracker, "smoke") == [1]
    report = tracker.read_json(result["mlflow_run_id"], "report.json")
    assert {one["column"] for one in report["slices"]} == {"cat_country"}
    assert tracker.load_result(result["mlflow_run_id"])["status"] == "ok"
    description = tracker.client.get_model_version("smoke", "1").description
    assert "cat_country" in description
    assert tracker.client.get_run(result["mlflow_run_id"]).data.tags["mlflow.note.content"] == description
    code, again, _ = command(train, CONFIG, *words, home=copied)
    assert (code, again["status"], again["eval"]) == (0, "skipped", result["eval"])


@pytest.mark.nightly
def test_force_trains_the_same_weights_into_a_challenger(smoke, command, copied):
    code, result, _ = command(train, CONFIG, "force=true", "evaluation.importance_rows=null", home=copied)
    assert code == 0
    assert result["model"]["alias"] == "challenger"
    assert result["model"]["version"] > 1
    assert result["gate"]["decision"] == "hold"
    assert result["gate"]["difference"] == {"ne": 0.0, "low": 0.0, "high": 0.0, "units": 5_000}
    assert result["train"]["weights_sha256"] == smoke["train"]["weights_sha256"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["training.epochs=two"], "configs/smoke.yaml, key 'training.epochs': expected a valid integer, unable to parse string as an integer, got 'two'. Correct the value."),
        (["colour=red"], "argument 'colour': expected a parameter of this flow (snapshot_id, force) or a config key, got neither. Write config keys with their section, like training.epochs=2."),
    ],
)  # fmt: skip
def test_a_bad_config_is_refused_before_anything_runs(command, tmp_path, words, sentence):
    code, result, log = command(train, CONFIG, *words, home=tmp_path)
    assert (code, result) == (1, {"status": "failed", "error": sentence})
    assert log.strip().splitlines() == [f"error: {sentence}"]
    assert list(tmp_path.iterdir()) == []


def test_a_config_that_does_not_fit_the_data_is_refused_before_training(smoke, command, home, at_home):
    runs, versions = sorted((home / "runs").iterdir()), _versions()
    code, result, log = command(train, CONFIG, "evaluation.slices=[contry]", home=home)
    sentence = "evaluation 'contry': expected a column of the table, got none of that name. Correct the name."
    assert (code, result) == (1, {"status": "failed", "error": sentence})
    assert "Traceback" not in log
    assert sorted((home / "runs").iterdir()) == runs
    assert _versions() == versions


@pytest.mark.parametrize(
    ("flow", "words", "sentence"),
    [
        (ingest, ["day=2030-01-01"], "day 2030-01-01: expected a day of the source, 2025-01-06 to 2025-01-09, got no row of it. Name another day."),
        (score, ["start=2030-01-01"], "days to score: expected days among 2025-01-06 to 2025-01-09, got none from 2030-01-01 to the last. Change start and end."),
    ],
)  # fmt: skip
def test_nothing_to_read_ends_the_run(command, copied, flow, words, sentence):
    versions = _versions()
    code, result, log = command(flow, CONFIG, *words, home=copied)
    assert (code, result) == (1, {"status": "failed", "error": sentence})
    assert "Traceback" not in log
    assert _versions() == versions
    assert not (copied / "runs").exists()


def test_a_run_of_prefect_with_a_bad_filter_fails_before_anything_runs(prefect, tmp_path, monkeypatch):
    """A worker calls the flow with `overrides`, or with the whole config as a parameter, which Prefect validates."""
    monkeypatch.setenv("DLRM_HOME", str(tmp_path / "home"))
    bad = {"filter": "1=1; drop table x"}
    for given in ({"config": CONFIG, "overrides": bad}, {"config": load(CONFIG).model_dump(mode="json") | bad}):
        with pytest.raises((ConfigError, ParameterTypeError), match="expected comparisons of columns with constants"):
            train(**given)
    assert not (tmp_path / "home").exists()


def _versions() -> int:
    return len(open_smoke().tracking.client.search_model_versions("name = 'smoke'"))


def _source(folder: Path, **columns) -> list[str]:
    rows = {
        "day": ["2025-01-06"] * 200,
        "label": [0, 1] * 100,
        "num_a": [0.5] * 200,
        "cat_a": list(range(200)),
    } | columns
    pq.write_table(pa.table(rows), folder / "rows.parquet")
    return [
        "source.generator=null", "source.outcomes=null", f"source.path={folder}/rows.parquet", "source.day_column=day",
        "features.dense=[{columns: num_a}]", "features.sparse=[{columns: cat_a, transforms: [{kind: sigrid_hash, size: 100}]}]",
        "evaluation.slices=[]", "evaluation.true_probability=null",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"label": [2] * 20 + [0, 1] * 90}, "labels of 1 day(s), worst 2025-01-06: expected at most 1.00% bad rows a day, and at least one good row, got 20 of 200 (label is not 0 or 1). Correct the source, or raise ingest.max_quarantined_share."),
        ({"num_a": ["x"] * 200}, "dense column 'num_a': expected numbers, got text such as 'x' in 200 rows. Clean the column, or declare it under features.sparse."),
        ({"day": [None] * 200}, "source.day_column 'day': expected a date in every row, got no date in 200 rows, such as null in 'rows.parquet'. Write ISO dates, times in UTC, or set source.date_format; or filter those rows out."),
    ],
)  # fmt: skip
def test_bad_rows_are_refused_and_nothing_is_written(command, tmp_path, columns, sentence):
    home = tmp_path / "home"
    code, result, _ = command(ingest, CONFIG, *_source(tmp_path, **columns), home=home)
    assert (code, result) == (1, {"status": "failed", "error": sentence})
    assert not list(home.rglob("*.parquet"))


def test_an_unknown_day_is_refused(command, tmp_path):
    code, result, _ = command(ingest, CONFIG, "day=2030-01-01", *_source(tmp_path), home=tmp_path / "home")
    assert code == 1
    assert (
        result["error"]
        == "day 2030-01-01: expected a day of the source, 2025-01-06 to 2025-01-06, got no row of it. Name another day."
    )


def test_a_damaged_day_is_repaired_by_ingesting_it_again(command, tmp_path):
    """A file of the same size looks whole until it is read. `force` rewrites its day."""
    words, home = _source(tmp_path), tmp_path / "home"
    first = command(ingest, CONFIG, *words, home=home)[1]
    [file] = home.rglob("smoke/data/day=2025-01-06/*.parquet")
    file.write_bytes(bytes(file.stat().st_size))
    assert command(ingest, CONFIG, *words, home=home)[1]["status"] == "skipped"
    code, result, _ = command(ingest, CONFIG, *words, "force=true", home=home)
    assert (code, result["rows"], result["days_written"]) == (0, 200, 1)
    assert result["snapshot_id"] != first["snapshot_id"]


def test_a_file_named_twice_is_read_once(command, tmp_path):
    words = _source(tmp_path)
    (tmp_path / "latest.parquet").symlink_to(tmp_path / "rows.parquet")
    twice = f"source.path=[{tmp_path}/*.parquet, {tmp_path}/../{tmp_path.name}/rows.parquet]"
    assert command(ingest, CONFIG, *words, twice, home=tmp_path / "home")[1]["rows"] == 200


@pytest.mark.slow
def test_a_run_that_died_before_its_record_is_finished_by_the_next(copied, plain, monkeypatch):
    over = {"training.world_size": 1, "training.threads_per_rank": 1, "preprocessing.executor": "inline", "seed": 7}
    over |= {"evaluation.importance_rows": None, "filter": "label >= 0"}
    with monkeypatch.context() as broken:
        broken.setattr(finish, "publish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(config=CONFIG, overrides=over)
    version = len(list_versions(open_smoke().tracking, "smoke"))
    result = train(config=CONFIG, overrides=over)
    assert (result["status"], result["model"]["version"]) == ("ok", version)
    assert result["gate"]["champion"] != version
    for file in (copied / "warehouse").rglob("*.parquet"):
        file.unlink()  # to skip it, no row is read, although a filter decides on rows
    assert train(config=CONFIG, overrides=over)["status"] == "skipped"


def test_few_bad_labels_are_counted(command, tmp_path):
    words = _source(tmp_path, label=[None, 7] + [0, 1] * 99)
    code, result, _ = command(ingest, CONFIG, *words, "ingest.max_quarantined_share=0.02", home=tmp_path / "home")
    assert code == 0
    assert result["rows"] == 198
    assert result["quarantined"] == {"label is not 0 or 1": 1, "label is null": 1}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "words",
    [
        [
            "training.table_precision=fp16",
            "training.vector_communication=fp16",
            "training.dense_precision=bf16",
            "evaluation.importance_rows=null",
        ],
    ],
)
def test_lower_precision_and_other_optimizers_are_registered_too(smoke, command, home, at_home, words):
    """The registered model gives the trainer's probabilities. Its NE is near that of the default training."""
    code, result, log = command(train, CONFIG, "registration.model_name=other", *words, home=home)
    assert code == 0, log
    assert result["model"]["name"] == "other"
    assert result["eval"]["ne"] == pytest.approx(smoke["eval"]["ne"], abs=0.05)
    processor = torch.cpu.get_capabilities()
    if processor["architecture"] == "x86_64":
        instructions = (processor["avx512_bf16"], processor["amx_bf16"], processor["avx_ne_convert"])
        assert ("bf16 is slow here" in log) != any(instructions)


def test_a_second_process_on_the_same_training_is_refused(smoke, at_home):
    from filelock import FileLock

    config = load(CONFIG, {"seed": 99})
    job = resolve_job(Workspace(config), None, False)
    with (
        FileLock(Path(job.folder) / "lock"),
        pytest.raises(Exception, match="is in use by another process"),
        open_training_run(Workspace(config), job),
    ):
        pass


def test_an_interrupted_run_is_ended_and_resumed_as_one(copied):
    config = load(CONFIG, {"seed": 98})
    job = resolve_job(Workspace(config), None, False)
    tracker = Workspace(config).tracking
    with pytest.raises(KeyboardInterrupt), open_training_run(Workspace(config), job) as first:
        raise KeyboardInterrupt
    assert tracker.client.get_run(first).info.status == "KILLED"
    with pytest.raises(ValueError, match="RUNNING"), open_training_run(Workspace(config), job) as second:
        raise ValueError(tracker.client.get_run(second).info.status)
    assert second == first
    assert tracker.client.get_run(first).info.status == "FAILED"


def interrupted(*arguments):
    raise ConfigError("test", "an interruption", "one", "Run again.")


QUARANTINE = [
    "warehouse.row_group_rows=500", "preprocessing.split_rows=1", "training.world_size=1",
    "training.threads_per_rank=1", "preprocessing.workers=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def corrupt_file(plainly, tmp_path_factory):
    """A copy of a warehouse file with one column of one row group that cannot be decoded."""
    folder = tmp_path_factory.mktemp("corrupt")
    with plainly(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("DLRM_HOME", str(folder))
        ingest(config=CONFIG, overrides=dict(word.split("=") for word in QUARANTINE))
    file = sorted((folder / "warehouse").rglob("smoke/data/day=2025-01-07/*.parquet"))[0]
    group = pq.ParquetFile(file).metadata.row_group(3)
    assert group.num_rows == 500
    chunk = next(c for c in map(group.column, range(group.num_columns)) if c.path_in_schema == "cat_item")
    content = bytearray(file.read_bytes())
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    content[start : start + chunk.total_compressed_size] = bytes(chunk.total_compressed_size)
    file.write_bytes(content)
    return file


@pytest.fixture
def corrupt_home(corrupt_file, tmp_path, monkeypatch):
    """Returns (folder, file): a home with that file in its catalog and its own registry."""
    monkeypatch.setenv(
        "MLFLOW_TRACKING_URI", ""
    )  # MLflow sets it for the whole process; it must not be the smoke run's
    [catalog] = (parent / "warehouse" for parent in corrupt_file.parents if (parent / "warehouse").is_dir())
    shutil.copytree(catalog, tmp_path / "warehouse")
    return tmp_path, corrupt_file


@pytest.mark.slow
def test_unreadable_rows_are_quarantined_if_configured(command, corrupt_home):
    home, file = corrupt_home
    with pytest.MonkeyPatch.context() as patch:  # interrupted after the ranks ended
        patch.setattr("pipeline.jobs.training.finish.finish", interrupted)
        code, _, first = command(train, CONFIG, *QUARANTINE, "preprocessing.on_corrupt=quarantine", home=home)
    assert code == 1
    code, result, _ = command(train, CONFIG, *QUARANTINE, home=home)
    assert code == 1
    assert "expected all rows, because preprocessing.on_corrupt is fail, got a training without 500" in result["error"]
    code, result, log = command(train, CONFIG, *QUARANTINE, "preprocessing.on_corrupt=quarantine", home=home)
    assert code == 0, log
    assert "500 rows were quarantined before this step" in log
    assert result["train"]["rows"] == 9_500
    assert result["train"]["preprocessing"] | {"workers": 2} == {
        "executor": "process", "workers": 2, "restarts": 0, "quarantined_rows": 500,
    }  # fmt: skip
    kept = artifact(open_smoke().tracking, result["mlflow_run_id"], "preprocessing.json")
    [entry] = kept["quarantined"]
    assert {key: entry[key] for key in ("path", "row_group", "rows", "day", "data", "epoch")} == {
        "path": f"file://{file}", "row_group": 3, "rows": 500, "day": "2025-01-07", "data": "train", "epoch": 0,
    }  # fmt: skip
    assert str(file) in entry["reason"]
    assert f"quarantined 500 rows of row group 3 of file 'file://{file}': {entry['reason']}" in first
    assert any("WARNING" in line and "quarantined 500 rows" in line for line in first.splitlines())
    job, quarantine = dict(word.split("=") for word in QUARANTINE), {"preprocessing.on_corrupt": "quarantine"}
    assert resolve_job(open_smoke(job), None, False).done is None  # it lacks rows, so it is trained again
    assert resolve_job(Workspace(load(CONFIG, job | quarantine)), None, False).done is not None


@pytest.mark.nightly
def test_unreadable_rows_end_the_training(command, corrupt_home):
    home, file = corrupt_home
    code, result, log = command(train, CONFIG, *QUARANTINE, home=home)
    assert code == 1
    snapshot = open_smoke().warehouse.current("smoke").snapshot_id
    assert result["error"].startswith(f"file 'file://{file}' of snapshot {snapshot} of table 'smoke': expected a whole")
    assert result["error"].endswith("Ingest its day with force=true.")
    assert f"error: {result['error']}" in log
    assert "Traceback" not in log
    tracker = open_smoke().tracking
    assert tracker.client.search_model_versions("name = 'smoke'") == []
    [run] = tracker.client.search_runs([tracker.experiment_id])
    assert run.info.status == "FAILED"
