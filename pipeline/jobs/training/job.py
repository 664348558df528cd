"""A pinned training: what it reads, where it writes, and whether it is done. Also its MLflow run."""

import datetime
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
from pydantic import BaseModel

from pipeline.catalog.events import read_events, refuse_deprecated
from pipeline.config.files import ROOT
from pipeline.data.config import PARTS, Part
from pipeline.data.day_notes import open_days
from pipeline.data.joined.materialized import require_materialized
from pipeline.data.joined.reader import filter_schema, joined_schema
from pipeline.data.joined.source import PinnedSource
from pipeline.data.present import newest_day
from pipeline.data.profile import profiles
from pipeline.data.selection import Selection, check_sampling, select
from pipeline.errors import ColumnError, ConfigError, EmptyDatasetError
from pipeline.evaluation.config import GateConfig
from pipeline.extraction.config import refuse_outcomes
from pipeline.inference.request import check_defaults, columns_of
from pipeline.jobs.code_version import hash_lock_file, read_commit
from pipeline.jobs.columns import warn_of_clocks
from pipeline.jobs.leaks import refuse_leaks
from pipeline.jobs.training.identity import LEARNED, describe_rows, digest
from pipeline.jobs.training.identity import identity as identity_of
from pipeline.jobs.workspace import Workspace, exclusive_dir
from pipeline.preprocessing.dataset import DataSpec, count_rows, fit_plan, sort_sources
from pipeline.processes.build import hash_sources
from pipeline.registration.tracking import CONFIG, reporting_unreachable
from pipeline.registration.versions import IDENTITY, find_versions, is_intact
from pipeline.transforms.plan.carry_over import Start
from pipeline.transforms.plan.plan import Plan, build_plan
from pipeline.transforms.schema import resolve
from storage.arrow import is_text
from storage.artifacts import MADE_AGAIN, read_checked, read_line, read_note, write_checked, write_text
from storage.filters import check_filter
from storage.reader import DAY, SnapshotRef
from storage.warehouse import Warehouse

PLAN = "plan.json"
"""File in a run's folder, and artifact of its MLflow run: the fitted preprocessing plan."""
PLANS = "plans"
"""Folder below home with the plans that trainings have fitted, by table."""
ABOUT = "dlrm.about"
"""Tag of an MLflow run: what is special about it. Its name begins with the version and the verdict once it has some."""
RUN_ID = "mlflow_run_id"
"""File in a run's folder with the id of its MLflow run."""
REGISTERED = "registered"
"""File in a run's folder once its model is in the registry. A run without it is resumed."""
SNAPSHOT = "snapshot.json"
"""File in a run's folder with the snapshot of its checkpoints, which hold positions in the snapshot's files."""
JOB = "job.json"
"""File in a run's folder with the job itself, if config and snapshot alone do not determine it."""


def registered_model(folder: Path) -> str | None:
    """Returns the name of the model that a run was registered as. None: the run is not finished."""
    note = folder / REGISTERED
    return read_line(note).rpartition(" ")[0] if note.exists() else None


class TrainingJob(BaseModel, frozen=True):
    """A pinned training."""

    identity: str
    snapshot: SnapshotRef
    folder: str
    data: Mapping[Part, DataSpec]
    done: tuple[int, str] | None
    """(version, run id) of the finished model of this identity. None: there is none."""
    start: Start | None = None
    """The training that this one continues. None: it starts from initial weights."""
    tags: Mapping[str, str] = {}
    """Further tags of the version."""
    notes: Mapping[str, Any] = {}
    """Further entries of the result."""
    days: Mapping[str, str] = {}
    """Learned day -> content of its rows, including the trainings that this one continues."""
    judged_later: bool = False
    """Whether the gate decides on another day, on rows that no model has seen."""
    earlier: tuple[Selection, ...] = ()
    """Rows that the continued training was trained on."""

    @property
    def rows(self) -> dict[Part, int]:
        """Of each part. Empty if the training is done: nothing is counted for it."""
        return {part: spec.rows for part, spec in self.data.items() if spec.rows is not None}

    @property
    def plan(self) -> Plan:
        """The fitted preprocessing plan."""
        return self.data["train"].plan

    @property
    def trained_to(self) -> datetime.date:
        """The last day that the model is trained or stopped on, of those that have begun."""
        days = [day for part in LEARNED if part in self.data for day in self.data[part].selection.days]
        return newest_day(days) or max(days)

    @property
    def trained_on(self) -> tuple[Selection, ...]:
        """All rows that the model has seen: trained or stopped on, in this training or one that it continues."""
        own = (self.data[part].selection for part in LEARNED if part in self.data)
        merged: dict[Selection, set[datetime.date]] = {}
        for one in (*self.earlier, *own):
            merged.setdefault(one.model_copy(update={"days": ()}), set()).update(one.days)
        return tuple(one.model_copy(update={"days": tuple(sorted(days))}) for one, days in merged.items())


def snapshot_tag(identity: str, snapshot: SnapshotRef) -> str:
    """Returns the tag that protects a snapshot for the work of an identity."""
    return f"train-{identity[:12]}-{snapshot.snapshot_id}"


def tag_inputs(warehouse: Warehouse, identity: str, snapshot: SnapshotRef, joined: Iterable[PinnedSource]) -> None:
    """Tags the snapshots that some work reads, also those of feature sources. Tagged snapshots are not expired."""
    for one in [snapshot, *(side.snapshot for side in joined if side.snapshot is not None)]:
        warehouse.tag(one, snapshot_tag(identity, one))


def resolve_job(workspace: Workspace, snapshot_id: int | None, force: bool) -> TrainingJob:
    """Pins the training of a config and a snapshot, and checks all that can be wrong with it.

    A version with missing or damaged files does not count as done. Nor does one with lost rows, unless
    `preprocessing.on_corrupt` is `quarantine`.

    Args:
        snapshot_id: None takes the newest.
        force: Trains again even if the training is in the registry.
    Raises:
        ConfigError: If the config does not fit the table.
        EmptyDatasetError: If a part of the split has no rows.
    """
    config = workspace.config
    snapshot, data = resolve_dataset(workspace, snapshot_id)
    warehouse, tracker = workspace.warehouse, workspace.tracking
    identity = identity_of(workspace, describe_rows(warehouse, data, LEARNED), data["train"].plan.hash)
    versions = [] if force else find_versions(tracker, config.model_name, identity)
    done = next(
        (
            one
            for one in reversed(versions)
            if is_intact(tracker, config.model_name, *one) and _suffices(workspace, one)
        ),
        None,
    )
    folder = workspace.unfinished_folder("runs", f"{config.model_key}-{identity[:12]}", REGISTERED)
    begun = None if done else find_begun(workspace, folder)
    if begun is not None and begun != snapshot:
        workspace.console.log.info("resumes on snapshot %s, which has the same rows", begun.snapshot_id)
        pinned = {part: data[part].selection if part in data else None for part in LEARNED}
        snapshot, data = resolve_dataset(workspace, begun.snapshot_id, pinned)
    plans = None if force else workspace.home / PLANS / config.name
    return make_job(folder, workspace, identity, (snapshot, data), done, plans)


def _suffices(workspace: Workspace, version: tuple[int, str]) -> bool:
    """Whether a version has no lost rows, or may have some."""
    if workspace.config.preprocessing.on_corrupt == "quarantine":
        return True
    result = workspace.tracking.load_result(version[1])
    lost = result["train"].get("preprocessing", {}).get("quarantined_rows", 0)
    if lost:
        workspace.console.log.info("version %s lacks %s quarantined rows, so it is trained again", version[0], lost)
    return not lost


def find_begun(workspace: Workspace, folder: Path) -> SnapshotRef | None:
    """Returns the first snapshot of an interrupted training. None: it left no checkpoint, or the snapshot is gone.

    A checkpoint holds a position in its snapshot's files. A later snapshot may hold the same rows in another order.
    """
    note, warehouse = folder / SNAPSHOT, workspace.warehouse
    if not workspace.fetch_note(note):
        return None
    begun = read_note(note, SnapshotRef)
    return begun if warehouse.table(begun.table).snapshot_by_id(begun.snapshot_id) is not None else None


def begin(workspace: Workspace, job: TrainingJob) -> None:
    """Notes the snapshot of a training in its folder. Removes checkpoints that were trained on another one."""
    note, text = Path(job.folder) / SNAPSHOT, job.snapshot.model_dump_json()
    if workspace.fetch_note(note) and note.read_bytes() != text.encode():  # it has expired
        workspace.remove(note.parent / "checkpoints")
    write_text(note, text)
    workspace.share_note(note)


def note_registered(workspace: Workspace, job: TrainingJob, version: int) -> None:
    """Notes that the model of a training is in the registry."""
    note = Path(job.folder) / REGISTERED
    write_text(note, f"{workspace.config.model_name} {version}\n")
    workspace.share_note(note)


def make_job(
    folder: Path,
    workspace: Workspace,
    identity: str,
    pinned_data: tuple[SnapshotRef, dict[Part, DataSpec]],
    done: tuple[int, str] | None = None,
    plans: Path | None = None,
) -> TrainingJob:
    """Returns the training of a folder. Fits the plan, unless the folder already has it.

    Args:
        pinned_data: As `resolve_dataset` returns it.
        plans: Folder of the plans that other trainings have fitted to the same rows. None: they do not count.
    """
    warehouse = workspace.warehouse
    snapshot, data = pinned_data
    if done is None:
        data = count_parts(data, warehouse)
        sort_sources(data["train"], warehouse, workspace.console.log.info)
        data = _fit_plan(data, folder, warehouse, plans)
    contents = warehouse.day_contents(snapshot)
    days = {f"{day}": contents[day] for part in LEARNED if part in data for day in data[part].selection.days}
    return TrainingJob(identity=identity, snapshot=snapshot, folder=str(folder), data=data, done=done, days=days)


def resolve_dataset(
    workspace: Workspace, snapshot_id: int | None, pinned: Mapping[Part, Selection | None] = MappingProxyType({})
) -> tuple[SnapshotRef, dict[Part, DataSpec]]:
    """Returns the snapshot and the parts of its split, each with the plan before fitting.

    Args:
        snapshot_id: None takes the newest.
        pinned: As in `build_specs`.
    """
    refuse_leaks(workspace)
    config = workspace.config
    warehouse = workspace.warehouse
    snapshot = warehouse.current(config.name)
    if snapshot_id is not None:
        snapshot = SnapshotRef(table=config.name, snapshot_id=snapshot_id)
    if config.filter is not None:
        check_filter(config.filter, filter_schema(warehouse, snapshot, workspace.feature_joins(), config.filter))
    return snapshot, build_specs(workspace, snapshot, pinned)


def prepare_rows(workspace: Workspace, snapshot_id: int | None) -> tuple[SnapshotRef, DataSpec, int]:
    """Returns the snapshot, the training rows with their fitted plan, and the number of these rows."""
    warehouse = workspace.warehouse
    snapshot, data = resolve_dataset(workspace, snapshot_id)
    spec = count_parts(data, warehouse, ["train"])["train"]
    assert spec.rows is not None
    sort_sources(spec, warehouse, workspace.console.log.info)
    return snapshot, spec.model_copy(update={"plan": fit_plan(spec, warehouse)}), spec.rows


def count_parts(
    data: Mapping[Part, DataSpec], warehouse: Warehouse, parts: Collection[Part] = PARTS
) -> dict[Part, DataSpec]:
    """Returns a split with the number of rows of some parts.

    Raises:
        EmptyDatasetError: If one of them has none.
    """
    found = dict(data)
    for part in [part for part in parts if part in found]:
        rows = count_rows(found[part], warehouse)
        if rows == 0:
            raise EmptyDatasetError(f"split, part '{part}'", "at least one row", "none", "Change split or filter.")
        found[part] = found[part].model_copy(update={"rows": rows})
    return found


def _build_plan(workspace: Workspace, snapshot: SnapshotRef, schema: pa.Schema) -> Plan:
    """Builds the plan. Raises if a column is missing, has a wrong type or is deprecated."""
    config = workspace.config
    where = f"snapshot {snapshot.snapshot_id} of table '{snapshot.table}'"
    try:
        plan = build_plan(config.features, schema)
    except ColumnError as error:
        raise error.at(where) from None
    if not config.features.allow_deprecated:
        refuse_deprecated(read_events(workspace.warehouse, config.name), where, plan.columns)
    return plan


def build_specs(
    workspace: Workspace, snapshot: SnapshotRef, pinned: Mapping[Part, Selection | None] = MappingProxyType({})
) -> dict[Part, DataSpec]:
    """Returns the parts of a snapshot's split, with the plan for its columns.

    Args:
        pinned: Part -> its rows, chosen and checked by an earlier run, or None for no rows. It is not checked again
            whether their days are open and materialized: the answer may be another one now.
    Raises:
        ConfigError: If the config does not fit the table, the split names an open day, or a day lacks a column that
            the config reads as materialized.
    """
    config = workspace.config
    warehouse, joined = workspace.warehouse, workspace.feature_joins()
    schema = joined_schema(warehouse, snapshot, joined, config.features.named_columns())
    plan = _build_plan(workspace, snapshot, schema)
    _check_columns(workspace, schema, plan)
    session = config.preprocessing.session_column
    names = [feature.name for feature in plan.sparse]
    once = resolve(config.preprocessing.deduplicate, names, "preprocessing.deduplicate", "a sparse feature")
    extra = tuple(dict.fromkeys([*config.evaluation.columns, DAY, *_list_resample_columns(config.gate)]))
    chosen = [part for part in PARTS if part not in pinned]
    days, not_final = list(warehouse.day_rows(snapshot)), open_days(warehouse, snapshot) if chosen else set()
    if not_final and not config.split.open_days:
        workspace.console.log.info("%s open days are left out, the first is %s", len(not_final), min(not_final))
    found: dict[Part, DataSpec] = {}
    for part in PARTS:
        selection = pinned.get(part)
        if part in chosen:
            selection = select(config.split, part, days, config.filter, config.sampling, not_final)
        if selection is not None:
            found[part] = DataSpec(
                warehouse=config.tables,
                home=str(warehouse.home),
                snapshot=snapshot,
                selection=selection,
                plan=plan,
                label=config.features.label,
                weight=config.features.weight,
                extra=extra if part == "test" else (),
                joined=joined,
                session=session if part == "train" or (part == "valid" and once) else None,
                deduplicate=() if part == "test" else tuple(once),
                cache_bytes=config.preprocessing.cache_bytes,
            )
    _say_keyless(workspace, snapshot, found["train"].selection.days)
    warn_of_clocks(joined, snapshot, warehouse, workspace.console.log)
    new = [spec for part, spec in found.items() if part in chosen]
    columns = {name for spec in new for name in spec.columns}
    read = {day for spec in new for day in spec.selection.days}
    require_materialized(config.features.sources, warehouse, snapshot, columns, read, ROOT)
    return found


def list_roles(workspace: Workspace) -> list[tuple[str, str]]:
    """Returns (column, key of the config) for the columns that a training reads for another purpose than features."""
    config = workspace.config
    split, weight, session = config.split, config.features.weight, config.preprocessing.session_column
    found = [(name, "evaluation") for name in config.evaluation.columns]
    found += [(name, "gate.resample_by") for name in _list_resample_columns(config.gate)]
    found += [(split.column.name, "split.column.name")] if split.column else []
    found += [(name, "split.hash.key") for name in split.hash.columns] if split.hash else []
    found += [(config.features.label, "features.label")]
    found += [(weight, "features.weight")] if weight is not None else []
    found += [(session, "preprocessing.session_column")] if session else []
    return found


def _list_resample_columns(gate: GateConfig) -> list[str]:
    return [] if gate.resample_by in (None, "row") else [gate.resample_by]


def _say_keyless(workspace: Workspace, snapshot: SnapshotRef, days: Collection[datetime.date]) -> None:
    """Says how many rows of some days lack a key that keeps rows together, as the statistics of the ingest tell."""
    config = workspace.config
    roles: dict[str, Sequence[str]] = {
        "split.hash.key": config.split.hash.columns if config.split.hash else (),
        "sampling.inputs": config.sampling.inputs if config.sampling else (),
        "gate.resample_by": _list_resample_columns(config.gate),
    }
    keys = {name for names in roles.values() for name in names}
    if not keys:
        return
    counts = dict.fromkeys(keys, (0, 0))
    for row in profiles(workspace.warehouse, snapshot.table, days).to_pylist():
        if (name := row["column"]) in counts:
            counts[name] = counts[name][0] + row["rows"] - row["present"], counts[name][1] + row["rows"]
    for role, names in roles.items():
        missing, rows = min((counts[name] for name in names), default=(0, 0))
        if missing:
            text = "%s of %s rows have no %s: as keys of %s, each is on its own"
            workspace.console.log.info(text, f"{missing:,}", f"{rows:,}", " or ".join(names), role)


def _check_columns(workspace: Workspace, schema: pa.Schema, plan: Plan) -> None:
    """Refuses columns that are missing, or that have a type which the config cannot read."""
    config = workspace.config
    evaluation, weight, session = config.evaluation, config.features.weight, config.preprocessing.session_column
    if config.source.outcomes is not None:
        refuse_outcomes(plan.columns, config.source.outcomes.columns(config.features.label))
    for name, where in list_roles(workspace):
        if name not in schema.names:
            raise ConfigError(f"{where} '{name}'", "a column of the table", "none of that name", "Correct the name.")
    grouped = [(name, "evaluation.slices") for name in evaluation.slices]
    grouped += [(name, "gate.resample_by") for name in _list_resample_columns(config.gate)]
    grouped += [(evaluation.group_by, "evaluation.group_by")] if evaluation.group_by else []
    for name, where in grouped:
        if pa.types.is_nested(schema.field(name).type):
            raise ConfigError(f"{where} '{name}'", "one value a row", f"{schema.field(name).type}", "Name another.")
    kind = None if weight is None else schema.field(weight).type
    if kind is not None and not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise ConfigError(f"features.weight '{weight}'", "a column of numbers", f"{kind}", "Name another.")
    check_defaults(config.registration.defaults, columns_of(plan, schema))
    truth = evaluation.true_probability
    if truth is not None and not pa.types.is_floating(schema.field(truth).type):
        found = f"{schema.field(truth).type}"
        raise ConfigError(f"evaluation.true_probability '{truth}'", "a column of floats", found, "Name another.")
    if config.sampling is not None:
        check_sampling(config.sampling, schema)
    if config.model.interaction == "dot" and len(plan.sparse) + bool(plan.dense) < 2:
        raise ConfigError("model.interaction 'dot'", "at least two features", "one", "Add a feature, or choose cat.")
    kind = None if session is None else schema.field(session).type
    if kind is not None and not (pa.types.is_integer(kind) or is_text(kind)):
        raise ConfigError(f"preprocessing.session_column '{session}'", "integers or text", f"{kind}", "Name another.")


def _fit_plan(
    data: dict[Part, DataSpec], folder: Path, warehouse: Warehouse, plans: Path | None
) -> dict[Part, DataSpec]:
    """Fits the plan on the training rows, or loads the plan that an interrupted run or another training has fitted."""
    path = folder / PLAN
    if path.exists():
        plan = read_note(path, Plan)
    else:
        plan = fit_plan(data["train"], warehouse) if plans is None else _fit_once(data["train"], warehouse, plans)
        write_text(path, plan.model_dump_json(indent=2))
    return {part: spec.model_copy(update={"plan": plan}) for part, spec in data.items()}


def _fit_once(spec: DataSpec, warehouse: Warehouse, plans: Path) -> Plan:
    """Fits the plan on the rows, or loads it if a training has fitted it to them before.

    The same rows in another snapshot do not count: in another order their sums may be rounded in another way.

    Args:
        plans: Folder of the fitted plans.
    """
    if not spec.plan.unfitted():
        return spec.plan
    fitted_on = spec.model_dump(mode="json", include={"snapshot", "selection", "plan", "joined"})
    path = plans / f"{digest({'code': hash_sources(), 'libraries': hash_lock_file(), **fitted_on})}.json"
    if path.exists():
        return read_checked(path, Plan, MADE_AGAIN)
    plan = fit_plan(spec, warehouse)
    write_checked(path, plan.model_dump_json())
    return plan


def describe_span(job: TrainingJob, part: Part) -> str:
    """Returns the rows and days of a part in words."""
    days = job.data[part].selection.days
    span = f"{min(days)} to {max(days)}" if len(days) > 1 else f"{days[0]}"
    return f"{job.rows[part]:,} of {len(days)} days, {span}"


@contextmanager
def open_training_run(
    workspace: Workspace, job: TrainingJob, name: str | None = None, more: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Opens the MLflow run of a training; see `open_run`.

    Args:
        name: Of the run. None: made from the main settings.
        more: Further tags.
    """
    config = workspace.config
    if name is None:
        model, training = config.model, config.training
        size = f"E{model.embedding_width} B{training.batch_rows} W{training.world_size}"
        rates = f"{training.table_learning_rate:g}/{training.dense_learning_rate:g}"
        name = f"{model.interaction} {size}, epochs {training.epochs}, rates {rates}, seed {config.seed}"
    tags = {
        "mlflow.runName": name,
        ABOUT: name,
        IDENTITY: job.identity,
        "snapshot_id": str(job.snapshot.snapshot_id),
        "data": describe_span(job, "train"),
        "plan_hash": job.plan.hash,
        "git_commit": read_commit(),
        "mlflow.source.name": "flows.train",
    } | dict(more or {})
    features = f"{len(job.plan.dense)} dense + {len(job.plan.sparse)} sparse, plan {job.plan.hash[:8]}"
    again = f"Once it answers, run the same command again: it resumes from '{job.folder}'."
    with (
        exclusive_dir(Path(job.folder)) as folder,
        open_run(folder, workspace, name, config.flat() | {"features": features}, tags, again) as (run_id, new),
    ):
        if new:
            tracker = workspace.tracking
            with reporting_unreachable(again):
                tracker.log_snapshot(run_id, job.snapshot.table, job.snapshot.snapshot_id, job.rows["train"])
                tracker.log_json(run_id, config.shareable(), CONFIG)
                tracker.log_json(run_id, job.plan.model_dump(mode="json"), PLAN)
        yield run_id


@contextmanager
def open_run(
    folder: Path, workspace: Workspace, name: str, params: Mapping[str, Any], tags: Mapping[str, str], again: str
) -> Iterator[tuple[str, bool]]:
    """Opens the MLflow run of a folder. Yields its id, and whether it is new. Ends the run in any case.

    Args:
        again: Remedy of the error if MLflow does not answer.
    Raises:
        TrackingError: If MLflow does not answer.
    """
    tracker, note = workspace.tracking, folder / RUN_ID
    resume = read_line(note) if note.exists() else None
    with reporting_unreachable(again):
        tracker.reap()
        run_id = tracker.start(name, params, tags, resume)
    write_text(note, run_id)
    with tracker.ending(run_id):
        yield run_id, run_id != resume
