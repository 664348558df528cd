"""A day of recurring training: its snapshot, its champion, the days new to it, and the training of the day."""

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pipeline.data.config import PARTS, Part, SplitConfig
from pipeline.data.day_notes import open_days
from pipeline.data.selection import Selection
from pipeline.errors import ConfigError, EmptyDatasetError, RegistryError
from pipeline.evaluation.policy import ChampionStanding, Decision
from pipeline.jobs.recurring.pending import PendingDays, find_open, find_pending
from pipeline.jobs.training.identity import describe_joined, digest, semantics
from pipeline.jobs.training.job import REGISTERED, TrainingJob, build_specs, find_begun, make_job, registered_model
from pipeline.jobs.training.provenance import find_record
from pipeline.jobs.training.rank.spec import WEIGHTS, checkpoint_identity
from pipeline.jobs.training.train import fetch_served
from pipeline.jobs.workspace import Workspace
from pipeline.preprocessing.dataset import DataSpec, count_rows
from pipeline.registration.aliases import CHALLENGER, CHAMPION, find_holder, list_spared, no_champion
from pipeline.registration.versions import TRAINED_FROM, find_versions
from pipeline.training.state import checkpoint
from pipeline.training.state.checkpoint_index import CheckpointIndex
from pipeline.transforms.plan.carry_over import Start, carry_over_fit
from pipeline.transforms.plan.plan import Plan
from storage.artifacts import inside
from storage.reader import SnapshotRef

DAY_TAG, TRAINING_TAG = "dlrm.day", "dlrm.training"
"""Tags of an MLflow run: its day, and the kind of training on it."""
FEW_ROWS = 1_000
"""Days of fewer rows may have none in the test part."""
CHECKPOINTS = "checkpoints"
"""Folder in a run's folder."""


class ChampionVersion(BaseModel, frozen=True):
    """The champion, and the days that its training covers."""

    version: int
    trained_to: datetime.date
    scratch_day: datetime.date
    run_folder: str
    days: Mapping[str, str] = {}
    """Learned day -> content of its rows. Empty: not recorded."""


class Today(BaseModel, frozen=True):
    """A day, its champion, and the days that are new to the champion."""

    day: datetime.date
    identity: str
    done: tuple[int | None, str] | None
    """(version, run id) of the finished work of this day. version: None where nothing was trained."""
    champion: ChampionVersion
    snapshot: SnapshotRef
    rows: int
    """Of the day."""
    new_days: tuple[datetime.date, ...]
    """Days to train on: closed days after the champion's last one, changed days, and the day itself."""
    new_rows: int
    rewritten_days: int
    """Learned days that have changed, if they are most of them. 0 otherwise."""
    scratch_days: tuple[datetime.date, ...]
    """Days of a training from scratch."""

    def make_standing(self, ne: float | None, calibration: float | None) -> ChampionStanding:
        """Returns what the policy decides by."""
        return ChampionStanding(
            trained_to=self.champion.trained_to,
            scratch_day=self.champion.scratch_day,
            new_rows=self.new_rows,
            rewritten_days=self.rewritten_days,
            ne=ne,
            calibration=calibration,
        )


def identity_of_day(workspace: Workspace, day: datetime.date) -> str:
    """Returns the identity of a day's work. It depends on day, model and config, not on the champion.

    Of a feature source with days it depends on the rows that join to the day. Those of another source may change each
    day, and finished days are not trained again then.
    """
    config = workspace.config
    left_out = {"policies", "keep_checkpoints", "closed_after_hours", "judge"}
    chosen = config.recurring.model_dump(mode="json", exclude=left_out)
    work = {"day": f"{day}", "model": config.model_name, "config": semantics(workspace), "recurring": chosen}
    dated = [pinned for pinned in workspace.feature_joins() if pinned.source.day_column is not None]
    return digest(work | describe_joined(workspace.warehouse, dated, None, [day]))


def find_next_days(
    workspace: Workspace, snapshot: SnapshotRef | None = None, champion: ChampionVersion | None = None
) -> PendingDays:
    """Returns the days that the champion has not learned as they are now.

    Args:
        snapshot: None: the newest one of the table.
        champion: None: it is looked up.
    """
    config, warehouse = workspace.config, workspace.warehouse
    champion = champion or require_champion(workspace)
    snapshot = snapshot or warehouse.current(config.name)
    contents, now = warehouse.day_contents(snapshot), datetime.datetime.now(datetime.UTC)
    not_closed = find_open(list(contents), config.recurring.closed_after_hours, now)
    if not config.split.open_days:
        not_closed |= open_days(warehouse, snapshot)
    return find_pending(contents, champion.days, champion.trained_to, not_closed, config.split)


def list_untested(workspace: Workspace, days: Sequence[datetime.date]) -> list[datetime.date]:
    """Returns those of some days that have no row in the test part of the split, as days of very few rows may have.

    No work of their own can be done on them. The training of the next day takes their rows.
    """
    warehouse = workspace.warehouse
    snapshot = warehouse.current(workspace.config.name)
    rows = warehouse.day_rows(snapshot)
    small = [day for day in days if rows[day] < FEW_ROWS]
    if not small:
        return []
    spec = build_specs(workspace, snapshot)["test"]
    return [day for day in small if count_rows(_replace_days(spec, (day,)), warehouse) == 0]


def pin_day(workspace: Workspace, day: datetime.date, force: bool) -> Today:
    """Pins a day of the newest snapshot, with the champion as it is before that day.

    Args:
        force: Does the work of a finished day once more.
    Raises:
        ConfigError: If the split is not `hash`.
        EmptyDatasetError: If the table has no such day.
        RegistryError: If there is no champion, or it has seen the day.
    """
    config = workspace.config
    require_hash_split(config.split)
    warehouse = workspace.warehouse
    snapshot = warehouse.current(config.name)
    rows = warehouse.day_rows(snapshot)
    if day not in rows:
        known = f"{min(rows)} to {max(rows)}"
        raise EmptyDatasetError(f"day {day}", f"a day of table '{config.name}', {known}", "none", "Write it first.")
    identity = identity_of_day(workspace, day)
    done = None if force else _find_done(workspace, identity)
    champion = require_champion(workspace)
    if done is None and champion.trained_to >= day:
        raise RegistryError(
            f"model '{config.model_name}', version {champion.version}", f"a champion that has not seen {day} yet",
            f"one trained to {champion.trained_to}", "Name a later day, or roll back to an earlier champion.",
        )  # fmt: skip
    pending = find_next_days(workspace, snapshot, champion)
    again = {*pending.changed, day}
    new = tuple(other for other in rows if other <= day and (other in again or other in pending.closed))
    upto = tuple(other for other in rows if other == day or (other < day and other not in pending.open))
    window = config.recurring.window_days
    return Today(
        day=day,
        identity=identity,
        done=done,
        champion=champion,
        snapshot=snapshot,
        rows=rows[day],
        new_days=new,
        new_rows=sum(rows[other] for other in new),
        rewritten_days=len(pending.changed) if pending.rewritten else 0,
        scratch_days=upto if window is None else upto[-window:],
    )


def require_hash_split(split: SplitConfig) -> None:
    """Refuses splits into whole days: each day needs rows to train on and rows to evaluate on.

    Raises:
        ConfigError: If the split is not `hash`.
    """
    if split.hash is None:
        raise ConfigError("split", "hash, which parts the rows of each day", "another kind", "See flights_daily.yaml.")


def _find_done(workspace: Workspace, identity: str) -> tuple[int | None, str] | None:
    tracker = workspace.tracking
    versions = find_versions(tracker, workspace.config.model_name, identity)
    if versions:
        return versions[-1]
    run = tracker.find_finished({"identity": identity, TRAINING_TAG: "none"})
    return None if run is None else (None, run)


def is_changed(workspace: Workspace, today: Today, version: int) -> bool:
    """Whether the day has other rows than a version has learned. False if its days are not recorded."""
    record = find_record(workspace.tracking, workspace.config.model_name, version)
    learned = None if record is None else record.days.get(f"{today.day}")
    return learned not in (None, workspace.warehouse.day_contents(today.snapshot)[today.day])


def has_champion(workspace: Workspace) -> bool:
    """Whether the model has a champion."""
    return _find_version(workspace)[0] is not None


def list_aliased_folders(workspace: Workspace) -> list[Path]:
    """Returns the folders of the runs that made champion and challenger."""
    found = (_find_version(workspace, alias)[1] for alias in (CHAMPION, CHALLENGER))
    return [inside(workspace.home / "runs", tags["run_folder"]) for tags in found if "run_folder" in tags]


def _find_version(workspace: Workspace, alias: str = CHAMPION) -> tuple[int | None, Mapping[str, str]]:
    """Returns version and tags of the champion, or of another alias. (None, {}) if no version has it."""
    tracker, name = workspace.tracking, workspace.config.model_name
    version = find_holder(tracker, name, alias)
    return version, {} if version is None else tracker.client.get_model_version(name, str(version)).tags


def require_champion(workspace: Workspace) -> ChampionVersion:
    """Returns the champion and its learned days.

    Raises:
        RegistryError: If there is none, or its days are not recorded.
    """
    version, tags = _find_version(workspace)
    where = f"model '{workspace.config.model_name}'"
    if version is None:
        raise no_champion(workspace.tracking, workspace.config.model_name)
    if "trained_to" not in tags:
        raise RegistryError(
            f"{where}, version {version}", "a record of the days it was trained on", "none",
            "Train another: python -m flows.train CONFIG force=true.",
        )  # fmt: skip
    fields = {key: tags[key] for key in ("trained_to", "scratch_day", "run_folder")}
    record = find_record(workspace.tracking, workspace.config.model_name, version)
    return ChampionVersion(version=version, days={} if record is None else record.days, **fields)


def find_start(workspace: Workspace, champion: ChampionVersion, plan: Plan) -> Start:
    """Finds the checkpoint that the champion was exported from.

    Args:
        plan: The champion's.
    Raises:
        RegistryError: If the checkpoint is gone.
        CheckpointError: If it is damaged, or of another model or optimizer than the config's.
    """
    root = inside(workspace.home / "runs", champion.run_folder) / CHECKPOINTS
    fetch_served(workspace, root)
    found = checkpoint.find_served(root)
    if found is None:
        where = f"model '{workspace.config.model_name}', version {champion.version}"
        raise RegistryError(where, f"its checkpoint in '{root}'", "none", "Train from scratch: scratch=true.")
    config = workspace.config
    checkpoint.require_identity(found, checkpoint_identity(config.model, config.training, plan))
    store = workspace.stored(root)
    shared = store is not None and found.name in CheckpointIndex(store).read()
    return Start(checkpoint=str(found), plan=plan, store=store.address if store is not None and shared else None)


def select_day_rows(workspace: Workspace, today: Today) -> DataSpec:
    """Returns all rows of the day. The champion is evaluated on them before any training."""
    return _replace_days(_select_parts(workspace, today, (today.day,))["test"], (today.day,), hash_keys=())


def _select_parts(workspace: Workspace, today: Today, days: Sequence[datetime.date]) -> dict[Part, DataSpec]:
    """Returns the split's parts of some days. The test part has the newest day alone."""
    data = build_specs(workspace, today.snapshot)
    chosen: Mapping[Part, Sequence[datetime.date]] = {"train": days, "valid": days, "test": (today.day,)}
    return {part: _replace_days(spec, chosen[part]) for part, spec in data.items()}


def exclude_test_rows(data: Mapping[Part, DataSpec]) -> DataSpec:
    """Returns the rows for incremental training: all but the test share.

    There is no early stopping, so validation rows train, too.
    """
    return _replace_days(
        data["train"], data["train"].selection.days, hash_range=(0, data["test"].selection.hash_range[0])
    )


def _replace_days(spec: DataSpec, days: Sequence[datetime.date], **more: Any) -> DataSpec:
    return spec.model_copy(update={"selection": spec.selection.model_copy(update={"days": tuple(days), **more})})


def make_day_job(
    workspace: Workspace, today: Today, decision: Decision, known: Plan, notes: Mapping[str, Any]
) -> TrainingJob:
    """Returns the training of a day. An interrupted one is found again in its folder.

    Args:
        known: The champion's plan. Incremental training keeps its fitted numbers.
        notes: Further entries of the result.
    """
    from_scratch = decision.training == "scratch"
    days = today.scratch_days if from_scratch else today.new_days
    # Another champion, other rows or another kind of training must not resume from these checkpoints.
    contents = workspace.warehouse.day_contents(today.snapshot)
    work = [decision.training, today.champion.version, *(contents[day] for day in (*days, today.day))]
    joined = describe_joined(workspace.warehouse, workspace.feature_joins(), today.snapshot, (*days, today.day))
    name = f"{workspace.config.model_key}-{today.day}-{today.identity[:12]}-{digest({'work': work} | joined)[:8]}"
    folder = workspace.unfinished_folder("runs", name, REGISTERED)
    begun = find_begun(workspace, folder)
    data, start = _select_parts(workspace, today, days), None
    if begun is not None and begun != today.snapshot:
        today = today.model_copy(update={"snapshot": begun})
        data = build_specs(workspace, begun, {part: data[part].selection if part in data else None for part in PARTS})
    before: Mapping[str, str] = {}
    tags = {"day": f"{today.day}", TRAINED_FROM: "scratch" if from_scratch else f"{today.champion.version}"}
    if not from_scratch:
        plan = carry_over_fit(data["train"].plan, known)
        data = {"train": exclude_test_rows(data), "test": data["test"]}
        data = {part: spec.model_copy(update={"plan": plan}) for part, spec in data.items()}
        tags["scratch_day"] = f"{today.champion.scratch_day}"
        before = today.champion.days
    if decision.training == "incremental":
        start = find_start(workspace, today.champion, known)
    job = make_job(folder, workspace, today.identity, (today.snapshot, data))
    more: dict[str, Any] = {"start": start, "tags": tags, "notes": dict(notes), "days": {**before, **job.days}}
    more |= {"earlier": () if from_scratch else _list_seen_rows(workspace, today.champion.version)}
    return job.model_copy(update=more | {"judged_later": workspace.config.recurring.judge == "next_day"})


def _list_seen_rows(workspace: Workspace, version: int) -> tuple[Selection, ...]:
    """Returns the rows that a version was trained on, as its record has them."""
    record = find_record(workspace.tracking, workspace.config.model_name, version)
    return () if record is None else record.trained_on


def clear_old_runs(workspace: Workspace, day: datetime.date) -> list[str]:
    """Removes models and checkpoints from the folders of earlier days. Returns the names of these folders.

    Leaves out unfinished runs, runs of other models, the newest `recurring.keep_checkpoints`, and the folders of
    versions that have an alias or that a rollback would go back to.
    """
    config, prefix = workspace.config, f"{workspace.config.model_key}-"
    served = {version.tags.get("run_folder") for version in list_spared(workspace.tracking)}
    days = (workspace.home / "runs").glob(f"{prefix}????-??-??-*")
    done = [path for path in days if (path / CHECKPOINTS).exists() and registered_model(path) == config.model_name]
    old = [path for path in done if path.name not in served]
    old = sorted((path for path in old if path.name.removeprefix(prefix)[:10] <= f"{day}"), reverse=True)
    cleared = []
    for folder in old[config.recurring.keep_checkpoints :]:
        for part in (WEIGHTS, "model", "int8", CHECKPOINTS):  # checkpoints last: they mark a folder as not cleared
            workspace.remove(folder / part)
        cleared.append(folder.name)
    return cleared
