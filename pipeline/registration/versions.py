"""Versions in the registry: found by what they were made from, checked against their hashes, fetched."""

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities.model_registry import ModelVersion as RegisteredVersion
from mlflow.exceptions import MlflowException
from pydantic import BaseModel

from pipeline.errors import RegistryError
from pipeline.inference.files import FILES, MODEL, PACKED, PLAN, WEIGHTS, check_files
from pipeline.registration.tracking import (
    Tracker,
    explain,
    is_disk_error,
    is_unreachable,
    local_path,
    require_folder,
)
from storage.artifacts import link_or_copy
from storage.scratch import ScratchFolder

log = logging.getLogger("dlrm")
IDENTITY = "identity"
"""Tag of a version: the identity of the work it was made from."""
TRAINED_FROM = "trained_from"
"""Tag of a daily version: the version that it continues, or `scratch`."""
SIZE = "size_bytes"
"""Tag of a version: bytes of its weights."""


class ModelVersion(BaseModel, frozen=True):
    """A version in the registry."""

    name: str
    version: int
    alias: str | None


def find_registered(tracker: Tracker, name: str, run_id: str) -> ModelVersion | None:
    """Finds the version that an interrupted run has registered already. None: there is none."""
    found = _versions_of(tracker, name, run_id)
    if not found:
        return None
    made = max(found, key=lambda one: int(one.version))
    remove_spares(tracker, made)
    return ModelVersion(name=name, version=int(made.version), alias=None)


def remove_spares(tracker: Tracker, made: RegisteredVersion) -> None:
    """Removes other versions of the same files of the same run.

    MLflow's client repeats a request whose answer was lost, and so may have made two. One with an alias stays.
    """
    for spare in _versions_of(tracker, made.name, str(made.run_id)):
        if int(spare.version) == int(made.version) or spare.source != made.source:
            continue
        try:
            if not tracker.client.get_model_version(spare.name, str(spare.version)).aliases:
                tracker.client.delete_model_version(spare.name, str(spare.version))
        except MlflowException as error:
            log.warning(
                "version %s of '%s' is a copy of %s: %s", spare.version, spare.name, made.version, explain(error)
            )


def _versions_of(tracker: Tracker, name: str, run_id: str) -> list[RegisteredVersion]:
    return [one for one in tracker.client.search_model_versions(f"run_id = '{run_id}'") if one.name == name]


def download_packed(tracker: Tracker, name: str, version: int, folder: Path) -> Path:
    """Fetches the packed model of a version from the registry into a folder, and checks it.

    Raises:
        RegistryError: If its files differ from the registered ones.
    """
    packed, check = fetch_packed(tracker, name, version, folder)
    check()
    return packed


def fetch_packed(tracker: Tracker, name: str, version: int, folder: Path) -> tuple[Path, Callable[[], None]]:
    """Fetches as `download_packed`, but leaves a check to the caller that reads the weights, however many they are.

    The code that MLflow's own server needs stays where it is.
    """
    where, hashes, _ = _registered(tracker, name, version)
    download_part(tracker, name, version, PACKED, folder)
    packed = folder / PACKED
    check_files(where, packed, {file: digest for file, digest in hashes.items() if file != WEIGHTS})
    return packed, partial(check_files, where, packed, hashes)


def download_part(tracker: Tracker, name: str, version: int, path: str, folder: Path) -> None:
    """Fetches a file or folder of a version to the same path in `folder`, if the version has it.

    Files of a registry on this filesystem are linked.

    Raises:
        RegistryError: If they are on this filesystem, and their folder is gone.
    """
    address = tracker.client.get_model_version_download_uri(name, str(version))
    require_folder(f"model '{name}', version {version}", address)
    if (place := local_path(address)) is not None:
        for source in (place / path, *(place / path).rglob("*")):
            if source.is_file():
                link_or_copy(source, folder / source.relative_to(place))
        return
    uri = f"models:/{name}/{version}"
    parent = f"{uri}/{path}".rpartition("/")[0]
    present = mlflow.artifacts.list_artifacts(parent, tracking_uri=tracker.uri)
    if path in {one.path for one in present}:
        mlflow.artifacts.download_artifacts(f"{uri}/{path}", dst_path=str(folder), tracking_uri=tracker.uri)


def _registered(tracker: Tracker, name: str, version: int) -> tuple[str, dict[str, str], Any]:
    """Returns a version in words, the hashes of its files, and what MLflow has of it."""
    where, known = f"model '{name}', version {version}", tracker.client.get_model_version(name, str(version))
    return where, _read_hashes(known.tags.get(FILES), where), known


def _read_hashes(tag: str | None, where: str) -> dict[str, str]:
    with suppress(ValueError, RecursionError):  # invalid JSON
        found = json.loads(tag or "null")
        if isinstance(found, dict) and set(found) == {MODEL, PLAN, WEIGHTS}:
            return found
    remedy = "Train another: python -m flows.train CONFIG force=true."
    raise RegistryError(where, f"hashes of its files in the tag {FILES}", "none", remedy)


def is_intact(tracker: Tracker, name: str, version: int, run_id: str) -> bool:
    """Says whether a version and the result of its run can be fetched as they were registered.

    Weights on this machine with the size and a time of the registration are not read. Who loads them reads them.
    """
    try:
        tracker.load_result(run_id)
        place = local_path(tracker.client.get_model_version_download_uri(name, str(version)))
        if place is None:
            with ScratchFolder("dlrm-model-") as temporary:
                download_packed(tracker, name, version, Path(temporary))
        else:
            where, hashes, known = _registered(tracker, name, version)
            read = {file: hashes[file] for file in hashes if not _is_old(place / PACKED / file, known)}
            check_files(where, place / PACKED, read)
    except (MlflowException, RegistryError, OSError, ValueError) as error:  # ValueError: invalid JSON
        if is_unreachable(error) or is_disk_error(error):
            raise
        return False
    return True


def _is_old(path: Path, version: Any) -> bool:
    """Whether a file of weights has the registered size, and was written before the version."""
    found = path.stat() if path.name == WEIGHTS and path.is_file() else None
    return (
        found is not None
        and f"{found.st_size}" == version.tags.get(SIZE)
        and found.st_mtime * 1e3 < version.creation_timestamp
    )


def find_versions(tracker: Tracker, name: str, identity: str) -> list[tuple[int, str]]:
    """Finds (version, run id) of the versions with this identity, oldest first."""
    try:
        versions = tracker.client.search_model_versions(f"name = '{name}' and tags.{IDENTITY} = '{identity}'")
    except MlflowException as error:
        if is_unreachable(error):
            raise
        return []
    return sorted((int(version.version), str(version.run_id)) for version in versions)
