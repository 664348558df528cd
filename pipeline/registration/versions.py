"""Versions in the registry: found by what they were made from, checked against their hashes, fetched."""

import hashlib
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import mlflow
from mlflow.exceptions import MlflowException
from pydantic import BaseModel

from pipeline.errors import RegistryError
from pipeline.registration.tracking import Tracker, is_disk_error, is_unreachable

MODEL, PLAN, WEIGHTS = "model.json", "plan.json", "weights.safetensors"
"""Files of a packed model."""
IDENTITY = "identity"
"""Tag of a version: the identity of the work it was made from."""
FILES = "files_sha256"
"""Tag of a version: names and hashes of the packed files as JSON, to detect later damage."""


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
    """Downloads the packed model of a version from the registry into a folder."""
    mlflow.artifacts.download_artifacts(f"models:/{name}/{version}", dst_path=str(folder), tracking_uri=tracker.uri)
    return folder / "artifacts" / "model"


def hash_files(folder: Path) -> dict[str, str]:
    """Returns name -> sha256 of the files that `pack` wrote."""
    found = {}
    for name in (MODEL, PLAN, WEIGHTS):
        with (folder / name).open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def is_intact(tracker: Tracker, name: str, version: int, run_id: str) -> bool:
    """Says whether a version and the result of its run can be fetched as they were registered."""
    with TemporaryDirectory() as temporary:
        try:
            tracker.load_result(run_id)
            found = hash_files(download_packed(tracker, name, version, Path(temporary)))
        except (MlflowException, RegistryError, OSError, ValueError) as error:  # ValueError: invalid JSON
            if is_unreachable(error) or is_disk_error(error):
                raise
            return False
    tags = tracker.client.get_model_version(name, str(version)).tags
    return json.loads(tags.get(FILES, "null")) == found


def find_versions(tracker: Tracker, name: str, identity: str) -> list[tuple[int, str]]:
    """Finds (version, run id) of the versions with this identity, oldest first."""
    try:
        versions = tracker.client.search_model_versions(f"name = '{name}' and tags.{IDENTITY} = '{identity}'")
    except MlflowException as error:
        if is_unreachable(error):
            raise
        return []
    return sorted((int(version.version), str(version.run_id)) for version in versions)
