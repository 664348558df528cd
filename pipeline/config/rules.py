"""Rules about several sections of a config at once. `RunConfig` lists them all in one validator."""

import re
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase

from pydantic import ValidationError

from pipeline.errors import ConfigError
from pipeline.extraction.config import EventTable, SourceConfig
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.training.config import HOST_SHARDING, TrainConfig, requested_sharding_types
from pipeline.transforms.joins import AnySource, FeatureJoin, share_files
from pipeline.transforms.schema import FeatureSchema

KNOWN_TO_RAY = {
    "CPU": "Leave it out: a worker has one, and a rank as many as training.threads_per_rank.",
    "GPU": "Leave it out. training.device=cuda reserves one for each rank.",
    "memory": "Leave it out.",
    "object_store_memory": "Leave it out.",
}
"""Names that have a meaning of their own for Ray -> what to do about them."""


def require_event_tables(
    name: str, source: SourceConfig, tables: Mapping[str, EventTable], features: FeatureSchema
) -> None:
    """Event tables have a log, and histories and windows of one fit it."""
    if name in tables:
        raise ConfigError(f"events.{name}", "another name than the table of the samples", name, "Rename one of them.")
    generator = source.generator
    for table, events in tables.items():
        if events.path is None and (generator is None or not generator.watched_per_day):
            found = "none, and no generator that writes it"
            remedy = "Add it. For a generated log, set source.generator.watched_per_day."
            raise ConfigError(f"events.{table}", "`path` of the log", found, remedy)
    for log in features.logs:
        declared = tables.get(log.table or "")
        if declared is not None and (log.on, log.time) != (declared.key, declared.time):
            raise ConfigError(
                f"on and time of {log.place}", f"{', '.join(declared.key)} and {declared.time}, of its event table",
                f"{', '.join(log.on)} and {log.time}", "Leave them out.",
            )  # fmt: skip
        if log.stored and declared is not None and declared.keep_days is not None:
            raise ConfigError(
                f"stored of {log.place}", "an event table that keeps all days, because an old day would be written "
                "again without the events that are gone", f"keep_days={declared.keep_days}",
                "Leave out one of them.",
            )  # fmt: skip
        if log.stored and log.table == name:
            raise ConfigError(
                f"stored of {log.place}", "another table than that of the samples: materialization would change the "
                "log itself", "true", "Leave it out.",
            )  # fmt: skip


def are_ranks_elsewhere(training: TrainConfig, preprocessing: PreprocessingConfig) -> bool:
    """Whether ranks may run on other machines."""
    return training.launcher == "external" or (training.launcher == "ray" and preprocessing.ray_address is not None)


def require_reachable_rows(training: TrainConfig, preprocessing: PreprocessingConfig) -> None:
    """Batches reach the ranks."""
    elsewhere = are_ranks_elsewhere(training, preprocessing)
    if elsewhere and preprocessing.executor != "inline" and preprocessing.transport == "memory":
        raise ConfigError(
            f"preprocessing.transport with training.launcher={training.launcher}", "network or auto: other "
            "machines have no part in this machine's memory", "memory", "Leave preprocessing.transport out.",
        )  # fmt: skip


def require_known_hosts(training: TrainConfig, preprocessing: PreprocessingConfig) -> None:
    """Several hosts are on a cluster, and a plan by hosts knows them."""
    elsewhere = are_ranks_elsewhere(training, preprocessing)
    if training.hosts > 1 and not elsewhere:
        raise ConfigError(
            f"training.hosts with launcher={training.launcher}", "preprocessing.ray_address, the cluster that has "
            "them", "None, which starts Ray on this machine", "Set it, or leave out hosts.",
        )  # fmt: skip
    kinds = sorted(requested_sharding_types(training.sharding) & HOST_SHARDING)
    if elsewhere and training.hosts == 1 and kinds:
        raise ConfigError(
            f"training.sharding with launcher={training.launcher}", "types that do not divide a table among the "
            "ranks of one host, because training.hosts=1 names no hosts", ", ".join(kinds),
            "Set training.hosts, choose another type, or launcher: processes.",
        )  # fmt: skip


def require_cluster_for_resources(training: TrainConfig, preprocessing: PreprocessingConfig) -> None:
    """Resources and labels are those of a cluster's nodes."""
    on_ray = {"training": training} if training.launcher == "ray" else {}
    workers = {"preprocessing": preprocessing} if preprocessing.executor == "ray" else {}
    used = {
        f"{section}.{key}": getattr(values, key)
        for section, values in (on_ray | workers).items()
        for key in ("resources", "labels")
    }
    for where, resources in used.items():
        if resources and preprocessing.ray_address is None:
            raise ConfigError(
                where, "preprocessing.ray_address, the cluster that has them",
                "None, which starts Ray on this machine", f"Set it, or leave out the {where.rpartition('.')[2]}.",
            )  # fmt: skip
        known = KNOWN_TO_RAY.keys() if where.endswith(".resources") else set()
        for name in resources.keys() & known:
            raise ConfigError(where, "resources that your nodes were started with", name, KNOWN_TO_RAY[name])


def require_shared_losses(training: TrainConfig, preprocessing: PreprocessingConfig) -> None:
    """All ranks leave out the same corrupt rows."""
    inline, ranks = preprocessing.executor == "inline", training.world_size
    if inline and preprocessing.on_corrupt == "quarantine" and ranks > 1:
        raise ConfigError(
            "preprocessing.on_corrupt 'quarantine'", "one executor for all ranks: each inline rank would lose "
            "other rows", f"preprocessing.executor=inline, {ranks} ranks", "Set preprocessing.executor=process.",
        )  # fmt: skip


Paths = str | tuple[str, ...] | None


def require_known_labels(
    name: str,
    source: SourceConfig,
    tables: Mapping[str, EventTable],
    features: FeatureSchema,
    share: Callable[[Paths, Paths], bool] = share_files,
) -> None:
    """No joined log has the label of a row before it is known.

    Args:
        share: Whether two values of `path` have files in common. A config alone compares their spellings.
    """
    label, sources = features.label, features.sources
    own_names = {label, *(old for old, new in source.rename.items() if new == label)}
    outcomes = None if source.outcomes is None else source.outcomes.path
    samples = source.path if source.outcomes is None else None
    paths = {log: tables[log.table].path if log.table and log.table in tables else log.path for log in sources}
    own = [log for log in sources if log.table == name or share(paths[log], samples)]
    telling = [log for log in own if _reads(log, _names_in(log, own_names, tables, name, label))]
    shared = [log for log in sources if share(paths[log], outcomes)]
    sides = [side for side in source.lookups if share(side.path, outcomes)]
    for log in (*telling, *shared, *sides):
        if log.as_of is None and not getattr(log, "lag_days", 0):
            raise ConfigError(
                f"as_of of {log.place}", "the column with the time of the rows, and delay_seconds, because it has the "
                "labels", "none", "Add them: without a time, each row reads its own label.",
            )  # fmt: skip
        if log.as_of is not None and not log.delay_seconds:
            raise ConfigError(
                f"delay_seconds of {log.place}", "1 or more, because it has the labels", "0",
                "Set it to the seconds after which a label is known when a row is served.",
            )  # fmt: skip


def _names_in(
    log: AnySource, names: Collection[str], tables: Mapping[str, EventTable], samples: str, label: str
) -> set[str]:
    """Returns what a log calls the label: as its files do, as its event table, or as the table of samples.

    Args:
        names: The label's names in the files of the samples.
    """
    if log.table == samples:
        return {label}
    declared = tables.get(log.table or "")
    renamed = {} if declared is None else declared.rename
    return {renamed.get(name, name) for name in names}


def _reads(log: AnySource, names: Collection[str]) -> bool:
    """Whether a log adds a column of one of the names, or filters by it."""
    where = None if isinstance(log, FeatureJoin) else log.where
    patterns = [rf"\b{re.escape(name)}\b" for name in names]
    return any(re.search(pattern, where or "") for pattern in patterns) or any(
        fnmatchcase(name, column) for name in names for column in log.columns
    )


def derive_incremental(training: TrainConfig, changes: Mapping[str, object]) -> TrainConfig:
    """Returns the training with the changes of `recurring.training`, which keep the state.

    Raises:
        ConfigError: If they do not fit.
    """
    where = "recurring.training"
    try:
        incremental = TrainConfig.model_validate({**training.model_dump(), **changes})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join([where, *(str(part) for part in first["loc"])])
        raise ConfigError(key, "a key of `training` and a value that fits", first["msg"], "Correct it.") from None
    for key in ("dense_optimizer", "table_optimizer", "table_precision", "sync", "world_size"):
        if getattr(incremental, key) != getattr(training, key):
            expected = f"training.{key}, {getattr(training, key)}: the state is kept"
            raise ConfigError(f"{where}.{key}", expected, f"{getattr(incremental, key)}", "Leave it out.")
    return incremental
