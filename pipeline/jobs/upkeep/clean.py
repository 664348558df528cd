"""Removes what daily work leaves behind: run folders, versions, MLflow runs, snapshots, temporary files."""

import datetime
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, suppress
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from mlflow.entities.model_registry import ModelVersion
from pydantic import BaseModel

from pipeline.errors import ConfigError
from pipeline.jobs.console import step
from pipeline.jobs.reads import READS
from pipeline.jobs.training.job import PLANS
from pipeline.jobs.workspace import Workspace, exclusive_dir
from pipeline.preprocessing.cache.store import COLUMNS, remove_unused
from pipeline.registration.aliases import list_old_moves, list_spared
from pipeline.registration.retention import (
    list_all_versions,
    list_old_runs,
    list_old_versions,
    remove_run,
    remove_version,
)
from pipeline.registration.versions import IDENTITY, SIZE
from storage.artifacts import read_line, remove
from storage.snapshot.maintenance import drop_tags, expire, find_expired, list_tags, table_locations, vacuum

SHOWN = 20
"""Most names of a kind in the result."""
FOLDER = re.compile(r"-(?P<identity>[0-9a-f]{12})(-[0-9a-f]{8})?-\d+$")
"""End of the name of a folder of work, with the identity that its tags begin with."""
TAG = re.compile(r"train-(?P<identity>[0-9a-f]{12})-\d+")
TABLES = ("", "_quarantine", "_held", "_profile", "_features", "_scores")
"""Endings of the tables that belong to a data set."""
SCORES = re.compile(r"(?P<table>\w+?)(__((?!__)\w)*_[0-9a-f]{8}){1,2}_scores")
"""Tables with the scores of further models of a table, or of single versions."""
SEARCHES = ("sweeps", "releases", "backtests")
"""Folders of work that is kept until it is removed by hand, and whose snapshots are kept with it."""
TRAININGS = ("runs", "replays")
KINDS = (*TRAININGS, *SEARCHES)
DAY = "????-??-??"
"""Pattern of a day in the name of a file."""
RETIRED = "retired.txt"
"""File below `home`: the identities that `note_retired` has noted."""


class Removed(BaseModel, frozen=True):
    """What goes, of one kind."""

    kind: str
    count: int
    bytes: int
    names: tuple[str, ...]
    """The first of them."""


def clean(workspace: Workspace, dry_run: bool) -> dict[str, Any]:
    """Removes what `retention` no longer keeps, of the config's model, table and experiment.

    Kept are: every version with an alias, of any model; its run's folder; and the snapshots that kept versions and
    folders were trained on.

    Args:
        dry_run: Only lists what would go.
    """
    with workspace.lock(workspace.training_lock):
        versions = RetiredVersions(workspace)
        retired = note_retired(workspace, versions, dry_run)
        done = [
            remove_versions(workspace, versions, dry_run),
            remove_moves(workspace, dry_run),
            remove_folders(workspace, dry_run),
            *remove_notes(workspace, dry_run),
            remove_runs(workspace, versions, dry_run),
            remove_leftovers(workspace, dry_run),
            remove_columns(workspace, dry_run),
            *remove_snapshots(workspace, retired, dry_run),
        ]
    days = workspace.config.retention.prefect_days
    if days is not None:
        ended = workspace.console.clear_history(_before(days), dry_run)
        done.append(Removed(kind="flow runs", count=ended, bytes=0, names=()))
    for one in done:
        verb = "would go" if dry_run else "removed"
        workspace.console.log.info("%s: %s %s, %s bytes", one.kind, one.count, verb, f"{one.bytes:,}")
    if dry_run:
        workspace.console.log.info("dry_run=false removes them")
    total = sum(one.bytes for one in done)
    return {
        "status": "ok" if any(one.count for one in done) else "skipped",
        "dry_run": dry_run,
        "bytes": total,
        "removed": {one.kind: one.model_dump(exclude={"kind"}) for one in done},
    }


class RetiredVersions:
    """The versions of the config's model that may go.

    Attributes:
        retired: The oldest first.
    """

    def __init__(self, workspace: Workspace) -> None:
        retention, self._tracker = workspace.config.retention, workspace.tracking
        self.retired: list[ModelVersion] = []
        if retention.versions_days is not None:
            name, before = workspace.config.model_name, _before(retention.versions_days)
            old = list_old_versions(self._tracker, name, retention.versions_kept, before)
            spared = {version.version for version in list_spared(self._tracker) if version.name == name} if old else ()
            self.retired = [one for one in old if one.version not in spared]

    @cached_property
    def kept(self) -> list[ModelVersion]:
        """All other versions, of any model. MLflow takes seconds to list thousands."""
        going = {(one.name, one.version) for one in self.retired}
        return [one for one in list_all_versions(self._tracker) if (one.name, one.version) not in going]


@step("note what goes")
def note_retired(workspace: Workspace, versions: RetiredVersions, dry_run: bool) -> set[str]:
    """Returns the identities whose tags may go once nothing of this home needs them. Safe to repeat.

    These are of searches that were here, and of work that a clean of this home has removed or is about to. They are
    noted first, so the clean after a killed one knows them. Other homes tag snapshots of the same catalog, too.
    """
    note = workspace.home / RETIRED
    known = set(read_line(note).split()) if note.exists() else set()
    old = set(_old_folders(workspace))
    going = {version.tags.get(IDENTITY, "")[:12] for version in versions.retired} | {_identity(one) for one in old}
    going -= known
    if going:
        going -= _needed(versions, (one for one in _folders(workspace.home, KINDS) if one not in old))
    searches = {_identity(folder) for folder in _folders(workspace.home, SEARCHES)}
    new = (going | searches) - known - {""}
    if new and not dry_run:
        workspace.home.mkdir(parents=True, exist_ok=True)
        with note.open("a", encoding="utf-8") as file:  # in one piece: cleans of other models may write, too
            file.write("".join(f"{identity}\n" for identity in sorted(new)))
    return known | new


@step("clean versions")
def remove_versions(workspace: Workspace, versions: RetiredVersions, dry_run: bool) -> Removed:
    """Old versions without an alias -> removed. Safe to repeat."""
    gone = versions.retired
    if gone and not dry_run:
        spared = {(version.name, version.version) for version in list_spared(workspace.tracking)}  # by now
        gone = [one for one in gone if (one.name, one.version) not in spared]
        for version in gone:
            remove_version(workspace.tracking, version, versions.kept)
    sizes = sum(int(version.tags.get(SIZE, 0)) for version in gone)
    return _summarize("versions", [f"{one.name} {one.version}" for one in gone], sizes)


@step("clean moves")
def remove_moves(workspace: Workspace, dry_run: bool) -> Removed:
    """Records of old moves of the model's aliases -> removed. Safe to repeat. Those that rollbacks need stay."""
    retention, tracker, name = workspace.config.retention, workspace.tracking, workspace.config.model_name
    if retention.versions_days is None:
        return _summarize("moves of aliases", [])
    old = list_old_moves(tracker, name, retention.versions_kept, _before(retention.versions_days))
    if not dry_run:
        for tag in old:
            tracker.client.delete_registered_model_tag(name, tag)
    return _summarize("moves of aliases", old)


@step("clean notes")
def remove_notes(workspace: Workspace, dry_run: bool) -> list[Removed]:
    """Notes of daily work -> old ones removed. Safe to repeat: verdicts, reports, records of reads, fitted plans."""
    days, home, config = workspace.config.retention.runs_days, workspace.home, workspace.config
    places = {
        "verdicts": (home / "judged").glob(f"{config.model_name}-{DAY}.json"),
        "reports of ingests": chain.from_iterable(
            (home / "reports").glob(f"ingest-{table}-{DAY}-{DAY}") for table in (config.name, *config.events)
        ),
        "reports of consistency": (home / "reports").glob(f"consistency-{config.model_key}-{DAY}-{DAY}"),
        "records of reads": (home / READS / config.name).glob("*.json"),
        "fitted plans": (home / PLANS / config.name).glob("*.json"),
    }
    return [_remove_old(kind, [] if days is None else found, days or 0, dry_run) for kind, found in places.items()]


def _remove_old(kind: str, places: Iterable[Path], days: float, dry_run: bool) -> Removed:
    """Removes the files and folders that nothing has changed for some days."""
    old = [path for path in sorted(places) if _changed(path) < _before(days)]
    size = sum(map(_size, old))
    if not dry_run:
        for path in old:
            remove(path)
    return _summarize(kind, [path.name for path in old], size)


@step("clean runs")
def remove_folders(workspace: Workspace, dry_run: bool) -> Removed:
    """Folders of old trainings -> removed. Safe to repeat. One that another process works in stays."""
    gone, size = list[str](), 0
    for folder in _old_folders(workspace):
        size += _size(folder)
        gone.append(folder.name)
        if not dry_run:
            try:
                with exclusive_dir(folder):
                    workspace.remove(folder)
            except ConfigError:  # another process works in it
                gone.pop()
    return _summarize("run folders", gone, size)


@step("clean MLflow")
def remove_runs(workspace: Workspace, versions: RetiredVersions, dry_run: bool) -> Removed:
    """Old MLflow runs -> removed, those of kept versions excepted. Safe to repeat."""
    days, tracker = workspace.config.retention.mlflow_days, workspace.tracking
    old = [] if days is None else list(list_old_runs(tracker, _before(days)))
    spared = {str(version.run_id) for version in versions.kept} if old else ()
    old = [run for run in old if run.info.run_id not in spared]
    places = [Path(run.info.artifact_uri.removeprefix("file://")) for run in old]
    size = sum(_size(place.parent) for place in places if place.is_absolute() and place.exists())
    if not dry_run:
        for run in old:
            remove_run(tracker, run)
    return _summarize("MLflow runs", [run.info.run_id for run in old], size)


@step("clean temporary files")
def remove_leftovers(workspace: Workspace, dry_run: bool) -> Removed:
    """Temporary files of killed work -> removed. Safe to repeat."""
    places = (path for root in ("tmp", "warehouse/tmp") for path in (workspace.home / root).glob("*"))
    return _remove_old("temporary files", places, workspace.config.retention.leftovers_days, dry_run)


@step("clean the cache")
def remove_columns(workspace: Workspace, dry_run: bool) -> Removed:
    """Columns that no run has used for long -> removed. Safe to repeat: a run makes those that it lacks."""
    before = _before(workspace.config.retention.leftovers_days).timestamp()
    gone = remove_unused(workspace.warehouse.home / COLUMNS, before, dry_run)
    return _summarize("cached columns", [one.path for one in gone], sum(one.size for one in gone))


@step("clean snapshots")
def remove_snapshots(workspace: Workspace, retired: Collection[str], dry_run: bool) -> list[Removed]:
    """Tags of retired work, old snapshots and files without one -> removed. Safe to repeat.

    Args:
        retired: Of `note_retired`. Tags of other identities stay.
    """
    warehouse, days = workspace.warehouse, workspace.config.retention.snapshots_days
    if days is None:
        return []
    config, age = workspace.config, datetime.timedelta(days=days)
    longest_write = datetime.timedelta(days=config.retention.leftovers_days)
    gone = set(_old_folders(workspace)) if dry_run else set()  # the others have been removed, or are in use
    left = (folder for folder in _folders(workspace.home, KINDS) if folder not in gone)
    tables = [config.name, *config.events]
    names = [f"{table}{end}" for table in tables for end in TABLES]
    known = sorted(row[-1] for row in warehouse.catalog.list_tables(warehouse.config.namespace))
    names += [name for name in known if (found := SCORES.fullmatch(name)) and found["table"] in tables]
    names = [name for name in names if warehouse.has_table(name) and not warehouse.is_foreign(name)]
    tags, snapshots, files, size = list[str](), 0, 0, 0
    with ExitStack() as locks:  # an ingest's files belong to no snapshot yet
        for table in sorted(tables):
            locks.enter_context(workspace.lock(workspace.lock_of(table)))
        places = table_locations(warehouse)
        old_tags = {
            name: [
                (tag, found["identity"]) for tag, made in list_tags(warehouse, name).items()
                if (found := TAG.fullmatch(tag)) and found["identity"] in retired and made < _before(days)
            ]
            for name in names
        }  # fmt: skip
        some = any(old_tags.values())
        needed = _needed(RetiredVersions(workspace), left) if some else ()  # others may have registered some meanwhile
        for name in names:
            old = [tag for tag, identity in old_tags[name] if identity not in needed]
            tags += old
            if not dry_run:
                drop_tags(warehouse, name, old)
            expired = find_expired(warehouse, name, age, old) if dry_run else set()
            snapshots += len(expired) if dry_run else expire(warehouse, name, age).snapshots
            removed = vacuum(warehouse, name, max(age, longest_write), dry_run, expired, places)
            files, size = files + removed.files, size + removed.bytes
    return [
        _summarize("tags of snapshots", tags),
        Removed(kind="snapshots", count=snapshots, bytes=0, names=()),
        Removed(kind="files without a snapshot", count=files, bytes=size, names=()),
    ]


def _old_folders(workspace: Workspace) -> list[Path]:
    """Returns the folders of the model's trainings that may go."""
    days = workspace.config.retention.runs_days
    if days is None:
        return []
    served = {version.tags.get("run_folder") for version in list_spared(workspace.tracking)}
    own = _folders(workspace.home, TRAININGS, f"{workspace.config.model_key}-")
    return [folder for folder in own if folder.name not in served and _changed(folder) < _before(days)]


def _needed(versions: RetiredVersions, folders: Iterable[Path]) -> set[str]:
    """Returns the identities of folders, and of the versions of any model that stay."""
    identities = {version.tags.get(IDENTITY, "")[:12] for version in versions.kept}
    return identities | {_identity(folder) for folder in folders}


def _folders(home: Path, kinds: Iterable[str], prefix: str = "") -> Iterator[Path]:
    """Yields folders of work, of any config: configs may join the tables of others."""
    for kind in kinds:
        yield from (path for path in sorted((home / kind).glob(f"{prefix}*")) if path.is_dir())


def _identity(folder: Path) -> str:
    found = FOLDER.search(folder.name)
    return found["identity"] if found else ""


def _before(days: float) -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=days)


def _changed(path: Path) -> datetime.datetime:
    """Returns when a file, or the newest file in a folder, was last changed."""
    newest = max((status.st_mtime for status in _stat(path)), default=0.0)
    return datetime.datetime.fromtimestamp(newest, datetime.UTC)


def _size(path: Path) -> int:
    """Returns the bytes that a file or folder frees. A file that has another name elsewhere stays."""
    names: dict[int, list[os.stat_result]] = {}
    for status in _stat(path):
        if stat.S_ISREG(status.st_mode):
            names.setdefault(status.st_ino, []).append(status)
    return sum(found[0].st_size for found in names.values() if found[0].st_nlink <= len(found))


def _stat(path: Path) -> Iterator[os.stat_result]:
    """Yields the status of a file, or of a folder and all in it."""
    for one in (path, *path.rglob("*")):
        with suppress(FileNotFoundError):  # removed meanwhile
            yield one.lstat()


def _summarize(kind: str, names: list[str], size: int = 0) -> Removed:
    return Removed(kind=kind, count=len(names), bytes=size, names=tuple(names[:SHOWN]))
