"""Versions in the registry: found by what they were made from, checked against their hashes, fetched."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import mlflow
from mlflow.exceptions import MlflowException
from pydantic import BaseModel

from pipeline.errors import RegistryError
from pipeline.registration.tracking import Tracker, is_disk_error, is_unreachable
from storage.scratch import ScratchFolder

MODEL, PLAN, WEIGHTS = "model.json", "plan.json", "weights.safetensors"
"""Files of a packed model."""
IDENTITY = "identity"
"""Tag of a version: the identity of the work it was made from."""
TRAINED_FROM = "trained_from"
"""Tag of a daily version: the version that it continues, or `scratch`."""
PACKED = "artifacts/model"
"""Folder of the packed model among the files of a version."""
EXAMPLE = "serving_input_example.json"
"""File of a version: a body for /invocations, made of rows of the training."""
FILES = "files_sha256"
"""Tag of a version: names and hashes of the packed files as JSON, to detect later damage."""
HASHES = "hashes.json"
"""File with the same, which the served model finds beside its files."""


class ModelVersion(BaseModel, frozen=True):
    """A version in the registry."""

    name: str
    version: int
    alias: str | None


def find_registered(tracker: Tracker, name: str, run_id: str) -> ModelVersion | None:
    """Finds the version that an interrupted run has registered already. None: there is none."""
    found = tracker.client.search_model_versions(f"run_id = '{run_id}'")
    versions = [int(version.version) for version in found if version.name == name]
    return ModelVersion(name=name, version=max(versions), alias=None) if versions else None


def download_packed(tracker: Tracker, name: str, version: int, folder: Path) -> Path:
    """Downloads the packed model of a version from the registry into a folder.

    The 300 files of code that MLflow's own server needs stay where they are.

    Raises:
        RegistryError: If its files differ from the registered ones.
    """
    where = f"model '{name}', version {version}"
    hashes = _read_hashes(tracker.client.get_model_version(name, str(version)).tags.get(FILES), where)
    download_part(tracker, name, version, PACKED, folder)
    check_files(where, folder / PACKED, hashes)
    return folder / PACKED


def download_part(tracker: Tracker, name: str, version: int, path: str, folder: Path) -> None:
    """Downloads a file or folder of a version to the same path in `folder`, if the version has it."""
    uri = f"models:/{name}/{version}"
    parent = f"{uri}/{path}".rpartition("/")[0]
    present = mlflow.artifacts.list_artifacts(parent, tracking_uri=tracker.uri)
    if path in {one.path for one in present}:
        mlflow.artifacts.download_artifacts(f"{uri}/{path}", dst_path=str(folder), tracking_uri=tracker.uri)


def _read_hashes(tag: str | None, where: str) -> dict[str, str]:
    with suppress(ValueError, RecursionError):  # invalid JSON
        found = json.loads(tag or "null")
        if isinstance(found, dict) and set(found) == {MODEL, PLAN, WEIGHTS}:
            return found
    remedy = "Train another: python -m flows.train CONFIG force=true."
    raise RegistryError(where, f"hashes of its files in the tag {FILES}", "none", remedy)


def check_files(where: str, folder: Path, hashes: Mapping[str, str]) -> None:
    """Compares the files of a packed model with their hashes.

    Raises:
        RegistryError: If a file has changed or is missing. Names it.
    """
    for name, digest in hashes.items():
        if not (folder / name).is_file() or _hash_file(folder / name) != digest:
            remedy = "Restore them from a copy, or promote another version."
            raise RegistryError(where, "the files that were registered", f"another {name}", remedy)


def hash_files(folder: Path) -> dict[str, str]:
    """Returns name -> sha256 of the files that `pack` wrote."""
    return {name: _hash_file(folder / name) for name in (MODEL, PLAN, WEIGHTS)}


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_intact(tracker: Tracker, name: str, version: int, run_id: str) -> bool:
    """Says whether a version and the result of its run can be fetched as they were registered."""
    with ScratchFolder("dlrm-model-") as temporary:
        try:
            tracker.load_result(run_id)
            download_packed(tracker, name, version, Path(temporary))
        except (MlflowException, RegistryError, OSError, ValueError) as error:  # ValueError: invalid JSON
            if is_unreachable(error) or is_disk_error(error):
                raise
            return False
    return True


def find_versions(tracker: Tracker, name: str, identity: str) -> list[tuple[int, str]]:
    """Finds (version, run id) of the versions with this identity, oldest first."""
    try:
        versions = tracker.client.search_model_versions(f"name = '{name}' and tags.{IDENTITY} = '{identity}'")
    except MlflowException as error:
        if is_unreachable(error):
            raise
        return []
    return sorted((int(version.version), str(version.run_id)) for version in versions)
