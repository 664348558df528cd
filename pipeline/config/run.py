"""RunConfig: the configs of all stages in one object, loaded from YAML."""

import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)
from pydantic_core import to_jsonable_python

from models.config import DLRMConfig
from pipeline.characterization.config import CharacterizeConfig
from pipeline.config.complaints import PRIVATE, explain
from pipeline.config.files import home_path, put, read_yaml
from pipeline.config.retention import RetentionConfig
from pipeline.data.config import SplitConfig
from pipeline.errors import ConfigError
from pipeline.evaluation.config import EvaluationConfig, GateConfig
from pipeline.evaluation.policy import Policy
from pipeline.extraction.config import EventTable, IngestConfig, SourceConfig
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.registration.config import RegistrationConfig
from pipeline.scoring.config import ScoringConfig
from pipeline.search.config import ReleaseConfig, SweepConfig
from pipeline.training.config import HOST_SHARDING, SPANS, TrainConfig, requested_sharding_types
from pipeline.transforms.joins import EventWindow, FeatureJoin, History, share_files
from pipeline.transforms.ops.sampling import Sampling
from pipeline.transforms.schema import FeatureSchema, SparseGroup
from storage.config import NAME, PARTS, StorageConfig, WarehouseConfig, find_owner
from storage.filters import check_filter

M = TypeVar("M", bound=BaseModel)
EXECUTION_KEYS = {
    "training": {
        "launcher",
        "resources",
        "labels",
        "send_ids_ahead",
        "cuda_graph",
        "device",
        "threads_per_rank",
        "log_every_steps",
        "checkpoint_every_steps",
        "checkpoint_every_seconds",
        "checkpoint_async",
        "keep_checkpoints",
        "least_ranks",
        "restart_limit",
        "hang_seconds",
        "deadline_seconds",
    },
    "preprocessing": set(PreprocessingConfig.model_fields) - {"shuffle_window_rows", "session_column"},
}
"""Keys that do not change what is learned, left out of a training's identity."""
NEW_KEYS: Mapping[type[BaseModel], Collection[str]] = {
    TrainConfig: ("lanes", "hosts", "network_bytes_per_second"),
    FeatureSchema: ("histories", "windows"),
    FeatureJoin: ("valid_from", "as_of", "delay_seconds"),
    History: ("stored",),
    EventWindow: ("stored",),
    SparseGroup: ("weights",),
}
"""Section -> keys that earlier versions lacked. A key at its default has no part in the identity."""
PLACEMENT_KEYS = {
    "world_size",
    "hosts",
    "network_bytes_per_second",
    "sharding",
    "partitioner",
    "memory_per_rank_bytes",
    "embedding_kernel",
}
"""Keys of `training` that do not change what is learned in lanes. Without lanes, they change the last bits."""


def check_name(text: str) -> str:
    """Refuses text that cannot name a table."""
    if not NAME.fullmatch(text):
        raise ConfigError("name", f"letters, digits and _, {NAME.pattern}", f"'{text}'", "Rename it.")
    owner = find_owner(text)
    if owner is not None:
        raise ConfigError(
            "name", "a name without one of the endings " + ", ".join(f"_{part}" for part in PARTS), f"'{text}'",
            f"Rename it: that table belongs to the config '{owner}'.",
        )  # fmt: skip
    return text


def _filter(text: str) -> str:
    check_filter(text, None)
    return text


KNOWN_TO_RAY = {
    "CPU": "Leave it out: a worker has one, and a rank as many as training.threads_per_rank.",
    "GPU": "Leave it out. training.device=cuda reserves one for each rank.",
    "memory": "Leave it out.",
    "object_store_memory": "Leave it out.",
}
"""Names that have a meaning of their own for Ray -> what to do about them."""
INCREMENTAL = {
    "epochs": 1,
    "max_steps": None,
    "patience": None,
    "warmup_steps": 0,
    **{key: None for pair in SPANS.items() for key in pair if key != "warmup_steps"},
}
"""Differences of incremental training from training from scratch. `recurring.training` overrides them."""


class RecurringConfig(Policy, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """When and how `flows.recurring` trains a champion incrementally on new days."""

    training: Mapping[str, Any] = {}
    """Keys of `training` that differ in incremental training, such as `{dense_learning_rate: 5.0e-4}`. Defaults: one
    epoch, no warm-up, no decay, no validation, no averaging of the weights."""
    closed_after_hours: NonNegativeFloat | None = None
    """Hours from the end of a day (UTC) until it is closed. None: a later day in the table closes it. Without `day=`,
    flows.recurring trains on closed days alone."""
    keep_checkpoints: PositiveInt = 7
    """Number of newest days with kept checkpoints. Versions with an alias keep theirs, too. After a rollback, training
    can start from them."""
    judge: Literal["next_day", "same_day"] = "next_day"
    """When the gate judges the model of a day. next_day: on all rows of the next day, which no model has seen. Until
    then the last judged champion serves. same_day: at once, on the test rows of its own day. Effects of that day then
    count as gain."""
    policies: Mapping[str, Policy] = {}
    """Name -> policy, for `flows.backtest` to compare."""


class RunConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """A complete run: source, transforms, training and evaluation."""

    name: Annotated[str, AfterValidator(check_name)]
    """Name of the warehouse table, the MLflow experiment and the model."""
    home: str = ".dlrm"
    """Folder for everything a run writes, relative to the project or absolute. DLRM_HOME overrides it."""
    seed: NonNegativeInt = 1
    """Seeds initial weights, the order of rows and dropout."""
    source: SourceConfig
    events: Mapping[Annotated[str, AfterValidator(check_name)], EventTable] = {}
    """Table of the warehouse -> the log of events that an ingest keeps in it. A history or window reads it by `table`,
    and may leave out `on` and `time`: they are then `key` and `time` of the event table."""
    ingest: IngestConfig = IngestConfig()
    warehouse: WarehouseConfig = WarehouseConfig()
    storage: StorageConfig = StorageConfig()
    features: FeatureSchema
    filter: Annotated[str, AfterValidator(_filter)] | None = None
    """Rows to train and evaluate on, such as \"country = 'DE' and age >= 18\"."""
    sampling: Sampling | None = None
    """Share of the rows to train on. None takes all. Early stopping and evaluation take all rows."""
    split: SplitConfig
    preprocessing: PreprocessingConfig = PreprocessingConfig()
    model: DLRMConfig = DLRMConfig()
    training: TrainConfig = TrainConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    gate: GateConfig = GateConfig()
    registration: RegistrationConfig = RegistrationConfig()
    scoring: ScoringConfig = ScoringConfig()
    recurring: RecurringConfig = RecurringConfig()
    retention: RetentionConfig = RetentionConfig()
    sweep: SweepConfig = SweepConfig()
    release: ReleaseConfig = ReleaseConfig()
    characterize: CharacterizeConfig = CharacterizeConfig()

    @model_validator(mode="before")
    @classmethod
    def _add_keys_of_events(cls, values: Any) -> Any:
        """Gives histories and windows of an event table its key and its time."""
        given = isinstance(values, Mapping) and values.get("events")
        features = values.get("features") if given else None
        if not isinstance(given, Mapping) or not isinstance(features, Mapping):
            return values

        def completed(log: Any) -> Any:
            table = log.get("table") if isinstance(log, Mapping) else None
            events = given.get(table) if isinstance(table, str) else None
            if isinstance(events, EventTable):
                events = events.model_dump()
            if not isinstance(events, Mapping):
                return log
            own = {"on": events.get("key"), "time": events.get("time")}
            return {**{key: value for key, value in own.items() if value is not None}, **log}

        lists = {key: features[key] for key in ("histories", "windows") if isinstance(features.get(key), list | tuple)}
        added = {key: [completed(log) for log in logs] for key, logs in lists.items()}
        return {**values, "features": {**features, **added}}

    @model_validator(mode="after")
    def _logs_fit_event_tables(self) -> Self:
        if self.name in self.events:
            raise ConfigError(
                f"events.{self.name}", "another name than the table of the samples", self.name, "Rename one of them."
            )
        generator = self.source.generator
        for table, events in self.events.items():
            if events.path is None and (generator is None or not generator.watched_per_day):
                found = "none, and no generator that writes it"
                remedy = "Add it. For a generated log, set source.generator.watched_per_day."
                raise ConfigError(f"events.{table}", "`path` of the log", found, remedy)
        for log in self.features.logs:
            declared = self.events.get(log.table or "")
            if declared is not None and (log.on, log.time) != (declared.key, declared.time):
                raise ConfigError(
                    f"on and time of {log.place}",
                    f"{', '.join(declared.key)} and {declared.time}, of its event table",
                    f"{', '.join(log.on)} and {log.time}", "Leave them out.",
                )  # fmt: skip
            if log.stored and declared is not None and declared.keep_days is not None:
                raise ConfigError(
                    f"stored of {log.place}", "an event table that keeps all days, because an old day would be written "
                    "again without the events that are gone", f"keep_days={declared.keep_days}",
                    "Leave out one of them.",
                )  # fmt: skip
            if log.stored and log.table == self.name:
                raise ConfigError(
                    f"stored of {log.place}", "another table than that of the samples: each backfill would change the "
                    "log itself", "true", "Leave it out.",
                )  # fmt: skip
        return self

    @model_validator(mode="after")
    def _rows_reach_the_ranks(self) -> Self:
        executor = self.preprocessing.executor
        if self.ranks_are_elsewhere and executor != "inline" and self.preprocessing.transport == "memory":
            raise ConfigError(
                f"preprocessing.transport with training.launcher={self.training.launcher}", "network or auto: other "
                "machines have no part in this machine's memory", "memory", "Leave preprocessing.transport out.",
            )  # fmt: skip
        return self

    @property
    def ranks_are_elsewhere(self) -> bool:
        """Whether ranks may run on other machines."""
        on_cluster = self.training.launcher == "ray" and self.preprocessing.ray_address is not None
        return on_cluster or self.training.launcher == "external"

    @property
    def uses_cluster(self) -> bool:
        """Whether ranks or workers run on the nodes of a given Ray cluster."""
        on_ray = self.training.launcher == "ray" or self.preprocessing.executor == "ray"
        return on_ray and self.preprocessing.ray_address is not None

    @model_validator(mode="after")
    def _plans_fit_several_hosts(self) -> Self:
        training = self.training
        if training.hosts > 1 and not self.ranks_are_elsewhere:
            raise ConfigError(
                f"training.hosts with launcher={training.launcher}", "preprocessing.ray_address, the cluster that has "
                "them", "None, which starts Ray on this machine", "Set it, or leave out hosts.",
            )  # fmt: skip
        kinds = sorted(requested_sharding_types(training.sharding) & HOST_SHARDING)
        if self.ranks_are_elsewhere and training.hosts == 1 and kinds:
            raise ConfigError(
                f"training.sharding with launcher={training.launcher}", "types that do not divide a table among the "
                "ranks of one host, because training.hosts=1 names no hosts", ", ".join(kinds),
                "Set training.hosts, choose another type, or launcher: processes.",
            )  # fmt: skip
        return self

    @model_validator(mode="after")
    def _nodes_have_resources(self) -> Self:
        address = self.preprocessing.ray_address
        on_ray = {
            "training": self.training if self.training.launcher == "ray" else None,
            "preprocessing": self.preprocessing if self.preprocessing.executor == "ray" else None,
        }
        used = {
            f"{section}.{key}": getattr(values, key)
            for section, values in on_ray.items()
            for key in ("resources", "labels")
            if values is not None
        }
        for where, resources in used.items():
            if resources and address is None:
                raise ConfigError(
                    where, "preprocessing.ray_address, the cluster that has them",
                    "None, which starts Ray on this machine", f"Set it, or leave out the {where.rpartition('.')[2]}.",
                )  # fmt: skip
            known = KNOWN_TO_RAY.keys() if where.endswith(".resources") else set()
            for name in resources.keys() & known:
                raise ConfigError(where, "resources that your nodes were started with", name, KNOWN_TO_RAY[name])
        return self

    @model_validator(mode="after")
    def _ranks_lose_the_same_rows(self) -> Self:
        executor, ranks = self.preprocessing.executor, self.training.world_size
        if executor == "inline" and self.preprocessing.on_corrupt == "quarantine" and ranks > 1:
            raise ConfigError(
                "preprocessing.on_corrupt 'quarantine'", "one executor for all ranks: each inline rank would lose "
                "other rows", f"preprocessing.executor=inline, {ranks} ranks", "Set preprocessing.executor=process.",
            )  # fmt: skip
        return self

    @model_validator(mode="after")
    def _negatives_keep_their_weight(self) -> Self:
        self.source.check_label(self.features.label, self.features.weight)
        return self

    @model_validator(mode="after")
    def _logs_tell_no_label(self) -> Self:
        label, sources = self.features.label, self.features.sources
        outcomes = None if self.source.outcomes is None else self.source.outcomes.path
        samples = self.source.path if self.source.outcomes is None else None
        paths = {
            log: self.events[log.table].path if log.table and log.table in self.events else log.path for log in sources
        }
        own = [log for log in sources if log.table == self.name or share_files(paths[log], samples)]
        filtered = {log for log in self.features.logs if re.search(rf"\b{re.escape(label)}\b", log.where or "")}
        telling = [log for log in own if log in filtered or any(fnmatchcase(label, name) for name in log.columns)]
        shared = [log for log in sources if share_files(paths[log], outcomes)]
        sides = [side for side in self.source.lookups if share_files(side.path, outcomes)]
        for log in (*telling, *shared, *sides):
            if log.as_of is not None and not log.delay_seconds:
                raise ConfigError(
                    f"delay_seconds of {log.place}", "1 or more, because it has the labels", "0",
                    "Set it to the seconds after which a label is known when a row is served.",
                )  # fmt: skip
        return self

    @model_validator(mode="after")
    def _trains_incrementally(self) -> Self:
        where = "recurring.training"
        try:
            incremental = self.incremental
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join([where, *(str(part) for part in first["loc"])])
            raise ConfigError(key, "a key of `training` and a value that fits", first["msg"], "Correct it.") from None
        fixed = ("dense_optimizer", "table_optimizer", "table_precision", "sync", "world_size")
        for key in fixed:
            if getattr(incremental, key) != getattr(self.training, key):
                expected = f"training.{key}, {getattr(self.training, key)}: the state is kept"
                raise ConfigError(f"{where}.{key}", expected, f"{getattr(incremental, key)}", "Leave it out.")
        return self

    @model_validator(mode="after")
    def _workload_has_pairs(self) -> Self:
        workload = self.characterize.workload
        alone = workload is not None and workload.sparse_features + bool(workload.dense_features) < 2
        if alone and self.model.interaction == "dot":
            where = "characterize.workload with model.interaction=dot"
            raise ConfigError(where, "at least two features", "one", "Raise sparse_features, or choose cat.")
        return self

    @property
    def incremental(self) -> TrainConfig:
        """Settings of incremental training."""
        return TrainConfig.model_validate({**self.training.model_dump(), **INCREMENTAL, **self.recurring.training})

    @property
    def home_path(self) -> Path:
        """The resolved `home`."""
        return home_path(self.home)

    @property
    def tables(self) -> WarehouseConfig:
        """The warehouse, with the samples under `name` if `source.table` has them."""
        return self.source.add_table(self.warehouse, self.name)

    @property
    def model_name(self) -> str:
        """Name in the registry."""
        return self.registration.model_name or self.name

    def semantics(self) -> dict[str, Any]:
        """Returns what decides the trained model, apart from its data. Equal semantics are one training."""
        elsewhere = {"home", "source", "events", "ingest", "warehouse", "evaluation", "gate", "registration", "scoring"}
        elsewhere |= {"storage", "recurring", "retention", "sweep", "release", "characterize"}
        values = self.model_dump(mode="json", exclude=elsewhere)
        for section, keys in EXECUTION_KEYS.items():
            values[section] = {key: value for key, value in values[section].items() if key not in keys}
        values["training"] = _without_new(values["training"], TrainConfig)
        if self.training.lanes is not None:
            values["training"] = {key: value for key, value in values["training"].items() if key not in PLACEMENT_KEYS}
        hidden = ("allow_deprecated", "map_keys")  # names of keys are keys by now
        features = {key: value for key, value in values["features"].items() if key not in hidden}
        kinds: dict[str, type[BaseModel]] = {"joined": FeatureJoin, "histories": History, "windows": EventWindow}
        for key, kind in kinds.items():
            features[key] = [_without_new(one, kind) for one in features[key] if not one["stored"]]
        features = _without_new(features, FeatureSchema)
        features["sparse"] = [_without_new(one, SparseGroup) for one in features["sparse"]]
        for group in (*features["dense"], *features["sparse"]):
            del group["on_missing"]  # decides whether a training starts, not what it learns
        return values | {"features": features, "weights": self.registration.weights}

    def shareable(self) -> dict[str, Any]:
        """Returns the config without keys that may hold passwords: the catalog's properties and MLflow's address."""
        return self.model_dump(mode="json", exclude=PRIVATE)

    def flat(self) -> dict[str, Any]:
        """Returns dotted key -> value of all chosen settings, for MLflow's table of parameters."""
        hidden = PRIVATE | dict.fromkeys(("source", "events", "features", "sweep", "release", "characterize"), True)
        values = self.model_dump(mode="json", exclude_defaults=True, exclude=hidden)
        return dict(_flattened(values | self.model_dump(mode="json", include={"training", "model"})))


def _without_new(values: Mapping[str, Any], section: type[BaseModel]) -> dict[str, Any]:
    """Returns the values of a section without its new keys that are at their default."""
    new = {key: to_jsonable_python(section.model_fields[key].default) for key in NEW_KEYS[section]}
    return {key: value for key, value in values.items() if key not in new or value != new[key]}


def default_settings() -> dict[str, str]:
    """Returns dotted key -> default, as text, of the settings that `RunConfig.flat` always has."""
    values = {"training": TrainConfig().model_dump(mode="json"), "model": DLRMConfig().model_dump(mode="json")}
    return {key: str(value) for key, value in _flattened(values)}


def load(config: "str | Path | RunConfig | Mapping[str, Any]", overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Returns the checked config of a YAML file (or its content), with dotted keys put over it.

    Raises:
        ConfigError: If the file is absent, or a key is unknown or of the wrong type; names key and remedy.
    """
    return validate(RunConfig, *read_values(config, overrides))


def read_values(
    config: "str | Path | BaseModel | Mapping[str, Any]", overrides: Mapping[str, Any] | None
) -> tuple[str, dict[str, Any]]:
    """Returns what errors call the config, and its values, unchecked, with dotted keys put over them."""
    if isinstance(config, BaseModel):
        config = config.model_dump(mode="json")
    where = str(config) if isinstance(config, str | Path) else "config"
    values = read_yaml(Path(config)) if isinstance(config, str | Path) else dict(config)
    for key, value in (overrides or {}).items():
        values = put(values, key.split("."), value, key)
    return where, values


def validate(model: type[M], where: str, values: Mapping[str, Any]) -> M:
    """Checks a config's values. Raises ConfigError, which names key and remedy."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise explain(where, error, model) from None


def _flattened(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [pair for key, item in value.items() for pair in _flattened(item, f"{prefix}.{key}" if prefix else key)]
    return [(prefix, value)]
