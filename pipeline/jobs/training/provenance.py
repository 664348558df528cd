"""The record of a training: all that repeating it needs, and the differences when it is repeated."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow.exceptions import MlflowException
from pydantic import BaseModel, ValidationError

from pipeline.config import RunConfig, load
from pipeline.data.config import PARTS, Part
from pipeline.data.joined.source import PinnedSource
from pipeline.data.selection import Selection
from pipeline.errors import ConfigError, RegistryError
from pipeline.jobs.code_version import trained_by
from pipeline.jobs.console import one_line
from pipeline.jobs.training.job import TrainingJob, snapshot_tag
from pipeline.jobs.workspace import Workspace
from pipeline.processes.build import Build, read_build
from pipeline.registration.tracking import Tracker, is_disk_error, is_not_found, is_unreachable
from pipeline.registration.versions import TRAINED_FROM
from pipeline.training.launch.processes import resolve_threads
from pipeline.training.tables.plan import ShardingPlan
from storage.reader import SnapshotRef

RECORD = "record.json"
"""Artifact of a run, and file in the run's folder. A version's tag `record` holds its address."""
PLACE = re.compile(rf"runs:/[0-9a-f]{{32}}/{re.escape(RECORD)}")
"""Addresses that the tag `record` of a version may hold."""
HERE = ("home", "warehouse")
"""Locations: taken from the current config, not from the record."""


class Record(BaseModel, frozen=True):
    """All that a model was trained with."""

    identity: str
    snapshot: SnapshotRef
    snapshot_tag: str
    """Protects the snapshot from being expired."""
    config: Mapping[str, Any]
    """Without the keys that may hold passwords."""
    seeds: Mapping[str, int]
    """Key of the config -> seed."""
    plan_hash: str
    """Of the transforms with their fitted numbers."""
    placement: ShardingPlan
    """The sharding plan."""
    world_size: int
    threads_per_rank: int
    """As used, also if the config leaves it to the machine."""
    device: str
    commit: str
    """Commit of the code that trained. If it changed in between, all commits in order."""
    sources: str = ""
    """Hash of the source files at the start of the training."""
    lock_hash: str
    versions: Mapping[str, str]
    builds: tuple[Build, ...] = ()
    """Rank -> its host, code and packages. Empty: not recorded."""
    weights_sha256: str
    trained_on: tuple[Selection, ...] = ()
    """All rows that the model has seen, also in the trainings that it continues. Empty: not recorded."""
    day: str | None = None
    """The day, for a training by flows.recurring. It reads other rows than the config's split names."""
    rows: Mapping[Part, Selection] = {}
    """Part -> its rows. Empty: not recorded, the config's split tells."""
    continues: int | None = None
    """The version that this training continues."""
    days: Mapping[str, str] = {}
    """Learned day -> content of its rows, including the trainings that this one continues."""
    joined: tuple[PinnedSource, ...] = ()
    """Feature sources that were joined to the rows, histories and windows among them, as they were then."""

    @property
    def pinned(self) -> dict[Part, Selection | None]:
        """Part -> its rows, or None for no rows. Empty: not recorded."""
        return {part: self.rows.get(part) for part in PARTS} if self.rows else {}


def make_record(workspace: Workspace, job: TrainingJob, placement: ShardingPlan, summary: Mapping[str, Any]) -> Record:
    """Returns the record of a finished training.

    Args:
        summary: Of its ranks.
    """
    config, code = workspace.config, trained_by(Path(job.folder))
    values, training = config.shareable(), config.training
    return Record(
        identity=job.identity,
        snapshot=job.snapshot,
        snapshot_tag=snapshot_tag(job.identity, job.snapshot),
        config=values,
        seeds=dict(_find_seeds({key: value for key, value in values.items() if key not in ("sweep", "release")})),
        plan_hash=job.plan.hash,
        placement=placement,
        world_size=training.world_size,
        threads_per_rank=resolve_threads(training.threads_per_rank, training.world_size),
        device=summary["device"],
        commit=code.commit,
        sources=code.sources,
        lock_hash=code.lock_hash,
        versions=read_versions(),
        builds=summary["builds"],
        weights_sha256=summary["weights_sha256"],
        trained_on=job.trained_on,
        day=job.tags.get("day"),
        rows={part: spec.selection for part, spec in job.data.items()},
        continues=None if job.start is None else int(job.tags[TRAINED_FROM]),
        days=job.days,
        joined=job.data["train"].joined,
    )


def _find_seeds(value: Any, key: str = "") -> list[tuple[str, int]]:
    if isinstance(value, Mapping):
        return [pair for name, inner in value.items() for pair in _find_seeds(inner, f"{key}.{name}".lstrip("."))]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [pair for number, inner in enumerate(value) for pair in _find_seeds(inner, f"{key}.{number}")]
    return [(key, value)] if key.split(".")[-1] == "seed" and isinstance(value, int) else []


def read_versions() -> dict[str, str]:
    """Returns what the bits of a training depend on besides the code: packages, Python and processor features."""
    import torch  # takes seconds, and the command that starts ranks needs nothing else of it

    return {**read_build().versions, "processor": torch.backends.cpu.get_cpu_capability()}


def fetch_record(tracker: Tracker, name: str, version: int) -> Record:
    """Fetches the record of a version in the registry.

    Raises:
        RegistryError: If there is no such version, or it has no record, or a damaged one.
    """
    found = find_record(tracker, name, version)
    if found is None:
        raise RegistryError(
            f"model '{name}', version {version}", "a record of its training", "none",
            "It is not from flows.train. Train another version.",
        )  # fmt: skip
    return found


def find_record(tracker: Tracker, name: str, version: int) -> Record | None:
    """Fetches the record of a version in the registry. None: it was not trained here, and has none.

    Raises:
        RegistryError: If there is no such version, or its record is damaged.
    """
    where = f"model '{name}', version {version}"
    try:
        place = tracker.client.get_model_version(name, str(version)).tags.get("record")
    except MlflowException as error:
        if not is_not_found(error):
            raise
        raise RegistryError(where, "a version of the registry", "none", "Name another: version=N.") from None
    if place is None:
        return None
    if not PLACE.fullmatch(place):
        raise RegistryError(where, f"a record at {PLACE.pattern}", f"'{place}'", "Do not trust this version.")
    try:
        return Record.model_validate(tracker.read_json(place.split("/")[1], RECORD))
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
        raise RegistryError(
            f"{RECORD} of {where}", "a record of its training", f"other content at '{key}'",
            "Train another version.",
        ) from None  # fmt: skip


def trained_sources(workspace: Workspace, version: int) -> tuple[PinnedSource, ...]:
    """Returns the feature sources of a version's training. Empty: it had none, or was not trained here.

    Warns if its record is lost or damaged, and returns none.
    """
    try:
        record = find_record(workspace.tracking, workspace.config.model_name, version)
    except Exception as error:  # of many kinds: MLflow, the store of its files, the disk
        if is_unreachable(error) or is_disk_error(error):
            raise
        workspace.console.log.warning(
            "the record of version %s cannot be read (%s). Histories, windows and joined features are read as the "
            "config declares them", version, one_line(error),
        )  # fmt: skip
        return ()
    return () if record is None else record.joined


def restore_config(record: Record, workspace: Workspace) -> RunConfig:
    """Returns the config of a record, with the home, warehouse and MLflow server of the workspace."""
    here = workspace.config
    values = {**record.config, **here.model_dump(mode="json", include=set(HERE))}
    registration = {**values.get("registration", {}), "tracking_uri": here.registration.tracking_uri}
    return load(values | {"registration": registration})


def override_recorded(config: RunConfig, overrides: Mapping[str, Any]) -> RunConfig:
    """Returns a recorded config with overrides that do not change what is learned.

    Raises:
        ConfigError: If a key changes what is learned. Names the key.
    """
    for key, value in overrides.items():
        other = load(config, {key: value})
        if other.semantics() != config.semantics():
            raise ConfigError(
                f"override '{key}'", "a key that does not change what is learned, such as preprocessing.workers",
                f"{json.dumps(value, default=str)}, which the version was not trained with", "Leave it out.",
            )  # fmt: skip
    return load(config, overrides)


def list_differences(old: Record, new: Record, planned: ShardingPlan) -> list[str]:
    """Returns the differences between two records in words.

    Args:
        planned: The sharding plan that would be made now. The recorded one was used.
    """
    found = [
        f"{name}: {getattr(old, name)} recorded, {getattr(new, name)} now"
        for name in ("weights_sha256", "plan_hash", "commit", "lock_hash", "world_size", "threads_per_rank", "device")
        if getattr(old, name) != getattr(new, name)
    ]
    if old.sources and old.sources != new.sources and old.commit == new.commit:
        found.append(f"sources: {old.sources} recorded, {new.sources} now, with the same commit")
    if "+" in old.commit:
        found.append(f"commit: {old.commit} had uncommitted changes")
    for name in sorted({*old.versions, *new.versions}):
        before, now = old.versions.get(name, "none"), new.versions.get(name, "none")
        found += [f"{name}: {before} recorded, {now} now"] if before != now else []
    if _strip_estimates(old.placement) != _strip_estimates(planned):
        found.append("placement: another sharding plan would be made now; the recorded one was used")
    return found


def _strip_estimates(placement: ShardingPlan) -> list[Any]:
    """Returns a sharding plan without the planner's estimates."""
    return [table.model_dump(exclude={"pieces": {"__all__": {"bytes", "milliseconds"}}}) for table in placement]
