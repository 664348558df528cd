"""Exported weights + plan + report -> a version in MLflow's registry that scores raw rows."""

import importlib.metadata
import json
import logging
import shutil
import sys
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlflow
import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
from mlflow.entities import LoggedModelOutput, LoggedModelStatus
from mlflow.exceptions import MlflowException
from mlflow.models import Model
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from safetensors.torch import load_file

from models.config import DLRMConfig
from models.quantised import write_quantised
from pipeline.errors import AccessError, RegistryError
from pipeline.inference.events import EventRecord
from pipeline.inference.files import FILES, MODEL, PACKED, PLAN, WEIGHTS
from pipeline.inference.mlflow_bodies import signature_of
from pipeline.inference.request import column_type, columns_of
from pipeline.registration.config import Default, Weights
from pipeline.registration.tracking import Tracker, is_denied, is_unreachable, local_path
from pipeline.registration.versions import ModelVersion, remove_spares
from pipeline.transforms.joins import EventWindow, History
from pipeline.transforms.plan.plan import Plan
from storage.artifacts import atomic_file, link_or_copy, write_json, write_text
from storage.scratch import ScratchFolder

log = logging.getLogger("dlrm")
CODE = "code.zip"
"""File of a stored model: the code that scores."""
EXAMPLE_ROWS = 3
TOLERANCE = 2.0**-14
"""Largest difference between the trainer's log-odds and the registered model's, relative to 1 + |log-odds|.

Both are float32 sums, in another order where batches or threads differ. A sum of a thousand terms loses at most 10 of
24 bits. Log-odds grow with the training, so no bound on probabilities holds for all: a wrong table or plan is seen by
a bound that is a thousand times wider."""
ROUGH_TOLERANCE = 0.02
"""The same if ranks exchange vectors of 11 bits or fewer."""
CERTAIN = 2.0**-24
"""Probabilities so close to each other are equal. Next to 0 and 1, float32 does not tell their log-odds apart."""
REQUIREMENTS = ("mlflow", "numba", "numpy", "pandas", "pyarrow", "pydantic", "safetensors", "torch")
"""Packages that every model needs to score."""
CROSS_REQUIREMENTS = ("fbgemm-gpu", "fbgemm-gpu-cpu", "torchrec")
"""Further ones of a model with TorchRec's cross layers. One of the first two is installed."""
LOG_REQUIREMENTS = ("duckdb", "filelock", "isal", "orjson", "pyiceberg", "sqlalchemy")
"""Further ones of a model that can read event logs."""


def pack(
    folder: Path,
    weights: Path,
    plan: Plan,
    model: DLRMConfig,
    schema: pa.Schema,
    form: Weights = "fp32",
    defaults: Mapping[str, Default] = MappingProxyType({}),
    logs: Sequence[History | EventWindow] = (),
) -> Path:
    """Packs everything a scorer needs into one folder: no pickle, and all but the weights readable.

    Args:
        weights: The exported weights, always float32. Nobody may change the file any more.
        form: int8 rounds the tables to bytes.
        defaults: Values of columns that a request lacks.
        logs: Histories and windows of the training. Those that the plan reads can be computed where the model is used.
    """
    shutil.rmtree(folder, ignore_errors=True)  # a killed attempt may have left a part of the weights
    folder.mkdir(parents=True)
    if form == "int8":
        with atomic_file(folder / WEIGHTS) as temporary:
            write_quantised(load_file(weights), temporary)
    else:
        link_or_copy(weights, folder / WEIGHTS)
    write_text(folder / PLAN, plan.model_dump_json(indent=2))
    record = {
        "model": model.model_dump(mode="json"),
        "columns": columns_of(plan, schema),
        "defaults": dict(defaults),
        "weights": form,
    }
    if read := [log for log in logs if any(map(log.may_add, plan.columns)) and {*log.on, log.as_of} <= {*schema.names}]:
        record["events"] = _record_events(read, schema)
    write_json(folder / MODEL, record)
    return folder


def _record_events(logs: Sequence[History | EventWindow], schema: pa.Schema) -> dict[str, Any]:
    names = dict.fromkeys(name for log in logs for name in [*log.on, log.as_of])
    columns = {name: column_type(schema.field(name).type, ["sparse"]) for name in names}
    return EventRecord(sources=tuple(logs), columns=columns).model_dump(mode="json")


def raw_frame(rows: pa.Table, columns: Mapping[str, str]) -> pd.DataFrame:
    """Converts warehouse rows to the data frame a caller would send.

    Integer ids with a null among them are sent as lists of one: pandas, JSON readers and MLflow would convert them to
    floats, and large ids would lose their last digits.
    """
    series = {}
    for name, kind in columns.items():
        values = rows.column(name).to_pylist()
        if kind == "double":
            series[name] = pd.Series([np.nan if value is None else float(value) for value in values], dtype="float64")
        elif kind == "timestamp":
            series[name] = pd.Series(rows.column(name).cast(pa.timestamp("us")).to_numpy(), dtype="datetime64[us]")
        elif kind == "list<double>":
            series[name] = pd.Series([_numbers(value) for value in values], dtype="object")
        elif kind.startswith("list"):
            lists = [None if items is None else [item for item in items if item is not None] for items in values]
            series[name] = pd.Series(lists, dtype="object")  # no op sees nulls of a list either
        elif kind == "long" and None in values:
            series[name] = pd.Series([[] if value is None else [int(value)] for value in values], dtype="object")
        else:
            series[name] = pd.Series(values, dtype="int64" if kind == "long" else "object")
    return pd.DataFrame(series)


def _numbers(items: list[Any] | None) -> list[float] | None:
    """Replaces nulls in a list of scores by NaN, which keeps scores and ids aligned."""
    return None if items is None else [np.nan if item is None else float(item) for item in items]


def register(
    tracker: Tracker,
    run_id: str,
    name: str,
    folder: Path,
    probe: pa.Table,
    expected: list[float],
    tags: Mapping[str, str],
    root: Path,
    tolerance: float = TOLERANCE,
) -> ModelVersion:
    """Registers a packed model if a loaded copy gives the expected probabilities on the probe's raw rows.

    Args:
        probe: Raw rows, in the order of `expected`.
        tags: Of the version; `FILES` among them.
        root: Folder of the packages that are saved with the model.
        tolerance: Of the log-odds, as `TOLERANCE`.
    Raises:
        RegistryError: If the copy scores differently. Nothing is registered then.
    """
    record: dict[str, Any] = json.loads((folder / MODEL).read_text(encoding="utf-8"))
    frame = raw_frame(probe, record["columns"])
    with ScratchFolder("registered-", folder.parent) as scratch:  # on the filesystem of the weights, which are linked
        files = Path(scratch, "stored")
        model = _save(files, folder, record, json.loads(tags[FILES]), frame.head(EXAMPLE_ROWS), root)
        check_probabilities(run_id, _score(files, frame, record), expected, tolerance)
        logged = _upload(tracker, run_id, model, files, folder / WEIGHTS)
    with _permitted(name):
        try:
            tracker.client.create_registered_model(name)
        except MlflowException as error:  # it exists
            if is_unreachable(error):
                raise
        made = tracker.client.create_model_version(name, f"models:/{logged}", run_id, tags=dict(tags), model_id=logged)
    remove_spares(tracker, made)
    return ModelVersion(name=name, version=int(made.version), alias=None)


@contextmanager
def _permitted(name: str) -> Iterator[None]:
    """Names the model and the permission that lacks, if MLflow refuses to register a version.

    Raises:
        AccessError: Then.
    """
    try:
        yield
    except MlflowException as error:
        if not is_denied(error):
            raise
        ask = "Ask its owner for EDIT on it, or choose another name: registration.model_name."
        raise AccessError(f"model '{name}' in MLflow", "permission to register versions", "a refusal", ask) from None


def _save(
    files: Path, folder: Path, record: Mapping[str, Any], hashes: Mapping[str, str], example: pd.DataFrame, root: Path
) -> Model:
    """Writes a packed model as MLflow stores one. The weights are linked, and the code is one file.

    Args:
        record: The model's, as in its file.
        hashes: Of the packed files.
    """
    model, small = Model(), files.with_name(Path(PACKED).name)  # MLflow keeps the name
    shutil.copytree(folder, small, ignore=shutil.ignore_patterns(WEIGHTS))  # MLflow copies what it is given
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about type hints and integer columns, which the signature covers
        mlflow.pyfunc.save_model(
            files,
            mlflow_model=model,
            python_model=str(root / "pipeline" / "registration" / "scorer.py"),
            artifacts={"model": str(small)},
            signature=signature_of(record["columns"] | _event_columns(record)),
            metadata={"columns": record["columns"], "defaults": record["defaults"], FILES: dict(hashes)},
            input_example=example,
            pip_requirements=requirements_of(record),
            model_config=_without_logs(record),  # MLflow takes no other names when the model is loaded
        )
    link_or_copy(folder / WEIGHTS, files / PACKED / WEIGHTS)
    _write_code(files / CODE, root)
    model.flavors["python_function"]["code"] = CODE
    model.model_size_bytes = sum(path.stat().st_size for path in files.rglob("*") if path.is_file())
    model.save(str(files / "MLmodel"))
    return model


def _event_columns(record: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = record.get("events", {}).get("columns", {})
    return found


def _without_logs(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the configuration of a model that reads no event logs. None: it could not read any."""
    return {"events": {}} if _event_columns(record) else None


def _write_code(path: Path, root: Path) -> None:
    """Writes the modules of the project's packages into an archive, from which Python imports.

    MLflow sends and fetches a file a request, and there are more than 400 modules.
    """
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for package in ("pipeline", "models", "storage"):
            for module in sorted((root / package).rglob("*.py")):
                member = zipfile.ZipInfo(f"{module.relative_to(root)}")  # its time is fixed: equal code, equal bytes
                archive.writestr(member, module.read_bytes(), zipfile.ZIP_DEFLATED)


def _score(files: Path, frame: pd.DataFrame, record: Mapping[str, Any]) -> npt.NDArray[np.float64]:
    """Loads a model as its users will, and returns its probabilities.

    Explicitly without logs: a variable may name some for each model that is loaded.
    """
    paths = sys.path  # MLflow puts the model's code first
    try:
        found = mlflow.pyfunc.load_model(str(files), model_config=_without_logs(record)).predict(frame)
    finally:
        sys.path = paths
        for compiled in [*files.rglob("__pycache__")]:
            shutil.rmtree(compiled)
    return found["probability"].to_numpy()


def _upload(tracker: Tracker, run_id: str, model: Model, files: Path, weights: Path) -> str:
    """Sends a saved model to the store of the run's experiment, a request a file. Returns its id in MLflow.

    Raises:
        RegistryError: If the store says that a file has another size.
    """
    client, params = tracker.client, tracker.client.get_run(run_id).data.params
    logged = client.create_logged_model(tracker.experiment_id, "model", source_run_id=run_id, params=params)
    model.run_id, model.artifact_path = run_id, logged.artifact_location
    model.model_id = model.model_uuid = logged.model_id
    model.save(str(files / "MLmodel"))
    sizes = {f"{path.relative_to(files)}": path.stat().st_size for path in files.rglob("*") if path.is_file()}
    store = get_artifact_repository(logged.artifact_location, tracking_uri=tracker.uri)
    (files / PACKED / WEIGHTS).unlink()  # links are copied, but it can be a link where the store is on this filesystem
    store.log_artifacts(str(files))
    if (place := local_path(logged.artifact_location)) is not None:
        link_or_copy(weights, place / PACKED / WEIGHTS)
    else:
        log.info("uploading the model: %d files, %.1f MB", len(sizes), sum(sizes.values()) / 1e6)
        store.log_artifact(str(weights), PACKED)
    stored = {one.path: one.file_size for part in (None, PACKED) for one in store.list_artifacts(part)}
    if wrong := [name for name, size in sizes.items() if stored.get(name) != size]:
        raise RegistryError(
            f"{wrong[0]} of the model of run {run_id} in MLflow's store", f"{sizes[wrong[0]]} bytes",
            f"{stored.get(wrong[0], 'none')}", "Look at its disk and its limits, then register the run again.",
        )  # fmt: skip
    client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, step=0)])
    client.finalize_logged_model(logged.model_id, LoggedModelStatus.READY)
    return str(logged.model_id)


def check_probabilities(
    run_id: str, actual: npt.NDArray[np.float64], expected: Sequence[float], tolerance: float
) -> None:
    """Compares probabilities with the expected ones.

    Args:
        tolerance: Largest difference of the log-odds, relative to 1 + |log-odds|.
    Raises:
        RegistryError: If a probability differs by more than the tolerance. It names the row that differs most.
    """
    where, remedy = (
        f"model of run {run_id}",
        "It is not registered; compare its plan and weights with the checkpoint's.",
    )
    if len(actual) != len(expected):
        counts = f"{len(expected)} probabilities", f"{len(actual)}"
        raise RegistryError(where, *counts, remedy)
    wanted = np.array(expected, np.float64)
    inner = np.clip(wanted, 1e-300, 1 - 2.0**-53)
    odds = np.abs(np.log(inner) - np.log1p(-inner))
    # The slope of a probability over its log-odds is p (1 - p).
    bound = np.maximum(tolerance * (1 + odds) * inner * (1 - inner), CERTAIN)
    excess = np.abs(actual - wanted) / bound
    if not (excess <= 1).all():  # also if one is not a number
        row = int(np.nan_to_num(excess, nan=np.inf).argmax())
        raise RegistryError(
            f"{where}, row {row} of its probe",
            f"{wanted[row]:.9g} within {bound[row]:.2g}, the rounding of float32 sums",
            f"{actual[row]:.9g}, which is {np.abs(actual - wanted)[row]:.2g} apart", remedy,
        )  # fmt: skip


def requirements_of(record: Mapping[str, Any]) -> list[str]:
    """Returns the packages that a packed model needs to score, pinned at the versions of this environment.

    Args:
        record: The model's, as in its file.
    """
    packages = [*REQUIREMENTS]
    if record["model"]["interaction"] == "dcn":
        packages += CROSS_REQUIREMENTS
    if "events" in record:
        packages += LOG_REQUIREMENTS
    found = []
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package}=={importlib.metadata.version(package).split('+')[0]}")
    return found
