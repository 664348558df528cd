"""Removes old versions and runs from MLflow, with their files."""

import datetime
from collections.abc import Iterator, Sequence
from contextlib import suppress

from mlflow.entities import Run, ViewType
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from pipeline.registration.mlflow_private import erase_run
from pipeline.registration.tracking import Tracker, is_not_found

PAGE = 500
"""Runs or versions in one answer of MLflow."""


def list_all_versions(tracker: Tracker, name: str | None = None) -> list[ModelVersion]:
    """Lists the versions of a model, or of all models, the oldest first."""
    return sorted(_search(tracker, name), key=lambda version: (version.name, int(version.version)))


def list_old_versions(tracker: Tracker, name: str, kept: int, before: datetime.datetime) -> list[ModelVersion]:
    """Lists the versions of a model from before a moment, without its newest `kept`, the oldest first.

    It does not ask for the others: MLflow takes a second for each thousand.
    """
    old, newer = list[ModelVersion](), 0
    for version in _search(tracker, name):
        if version.creation_timestamp < before.timestamp() * 1e3:
            old.append(version)
        elif (newer := newer + 1) >= kept:
            return old
    return old[: max(0, len(old) + newer - kept)]


def _search(tracker: Tracker, name: str | None) -> Iterator[ModelVersion]:
    token: str | None = None
    query, order = ("", None) if name is None else (f"name = '{name}'", ["version_number ASC"])
    while token != "":
        page = tracker.client.search_model_versions(query, max_results=PAGE, order_by=order, page_token=token)
        yield from page
        token = page.token or ""


def remove_version(tracker: Tracker, version: ModelVersion, others: Sequence[ModelVersion]) -> None:
    """Removes a version and the files that were registered for it. The run that made it stays.

    Args:
        others: All other versions. Files that one of them shares stay, such as those of a copy under another name.
    """
    model_id = (version.source or "").removeprefix("models:/")
    shared = any(
        one.source in (version.source, f"models:/{version.name}/{version.version}") or one.model_id == model_id
        for one in others
    )
    if model_id.startswith("m-") and not shared:  # files first: afterwards nobody would look for them
        with suppress(MlflowException):  # the files went with an interrupted attempt
            place = tracker.client.get_logged_model(model_id).artifact_location
            get_artifact_repository(place, tracking_uri=tracker.uri).delete_artifacts()
        try:
            tracker.client.delete_logged_model(model_id)
        except MlflowException as error:
            if not is_not_found(error):
                raise
    tracker.client.delete_model_version(version.name, version.version)


def list_old_runs(tracker: Tracker, before: datetime.datetime) -> Iterator[Run]:
    """Yields runs of our commands that ended before a moment. Leaves out other runs.

    Of a database, those are among them that are marked as deleted: `remove_run` erases them. A server keeps such runs
    until its own `mlflow gc`.
    """
    query = f"attributes.end_time < {int(before.timestamp() * 1e3)} AND tags.`mlflow.source.name` LIKE 'flows.%'"
    view = ViewType.ACTIVE_ONLY if tracker.uri.startswith("http") else ViewType.ALL
    token: str | None = None
    while token != "":
        page = tracker.client.search_runs([tracker.experiment_id], query, view, PAGE, page_token=token)
        yield from (run for run in page if run.info.status != "RUNNING")
        token = page.token or ""


def remove_run(tracker: Tracker, run: Run) -> None:
    """Removes a run and its files. A server only marks it as deleted. Its `mlflow gc` removes the rest."""
    run_id = run.info.run_id
    # Files first: a server's run that is marked as deleted is not found again.
    get_artifact_repository(run.info.artifact_uri, tracking_uri=tracker.uri).delete_artifacts()
    if run.info.lifecycle_stage == "active":
        tracker.client.delete_run(run_id)
    erase_run(tracker.client, run_id)
