"""RunConfig: the configs of all stages in one object, loaded from YAML."""

from collections.abc import Mapping
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

from models.config import DLRMConfig
from pipeline.config import rules
from pipeline.config.files import home_path, put, read_yaml, start_paths
from pipeline.config.retention import RetentionConfig
from pipeline.config.validation_messages import PRIVATE, explain
from pipeline.data.config import SplitConfig
from pipeline.errors import ConfigError
from pipeline.evaluation.config import EvaluationConfig, GateConfig
from pipeline.evaluation.policy import Policy
from pipeline.extraction.config import EventTable, IngestConfig, SourceConfig
from pipeline.marks import APART, learned_values
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.registration.config import RegistrationConfig
from pipeline.scoring.config import ScoringConfig
from pipeline.search.config import ReleaseConfig, SweepConfig
from pipeline.training.config import SPANS, TrainConfig
from pipeline.transforms.ops.sampling import Sampling
from pipeline.transforms.schema import FeatureSchema
from storage.config import NAME, PARTS, StorageConfig, WarehouseConfig, find_owner, name_apart
from storage.filters import check_filter

M = TypeVar("M", bound=BaseModel)


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
    """Hours from the end of a day (UTC) until it is closed. None: a later day in the table, which has begun, closes it.
    Without `day=`, flows.recurring trains on closed days alone."""
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
    home: Annotated[str, APART] = ".dlrm"
    """Folder for everything a run writes, relative to the project or absolute. DLRM_HOME overrides it."""
    seed: NonNegativeInt = 1
    """Seeds initial weights, the order of rows and dropout."""
    source: Annotated[SourceConfig, APART]
    events: Annotated[Mapping[Annotated[str, AfterValidator(check_name)], EventTable], APART] = {}
    """Table of the warehouse -> the log of events that an ingest keeps in it. A history or window reads it by `table`,
    and may leave out `on` and `time`: they are then `key` and `time` of the event table."""
    ingest: Annotated[IngestConfig, APART] = IngestConfig()
    warehouse: Annotated[WarehouseConfig, APART] = WarehouseConfig()
    storage: Annotated[StorageConfig, APART] = StorageConfig()
    features: FeatureSchema
    filter: Annotated[str, AfterValidator(_filter)] | None = None
    """Rows to train and evaluate on, such as \"country = 'DE' and age >= 18\"."""
    sampling: Sampling | None = None
    """Share of the rows to train on. None takes all. Early stopping and evaluation take all rows."""
    split: SplitConfig
    preprocessing: Annotated[PreprocessingConfig, APART] = PreprocessingConfig()
    model: DLRMConfig = DLRMConfig()
    training: TrainConfig = TrainConfig()
    evaluation: Annotated[EvaluationConfig, APART] = EvaluationConfig()
    gate: Annotated[GateConfig, APART] = GateConfig()
    registration: Annotated[RegistrationConfig, APART] = RegistrationConfig()
    scoring: Annotated[ScoringConfig, APART] = ScoringConfig()
    recurring: Annotated[RecurringConfig, APART] = RecurringConfig()
    retention: Annotated[RetentionConfig, APART] = RetentionConfig()
    sweep: Annotated[SweepConfig, APART] = SweepConfig()
    release: Annotated[ReleaseConfig, APART] = ReleaseConfig()

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
    def _sections_fit(self) -> Self:
        logs = (self.name, self.source, self.events, self.features)
        ranks = (self.training, self.preprocessing)
        rules.require_event_tables(*logs)
        rules.require_reachable_rows(*ranks)
        rules.require_known_hosts(*ranks)
        rules.require_cluster_for_resources(*ranks)
        rules.require_shared_losses(*ranks)
        self.source.check_label(self.features.label, self.features.weight)  # negatives keep their weight
        rules.require_known_labels(*logs)
        _ = self.incremental  # refuses what does not fit
        return self

    @property
    def ranks_are_elsewhere(self) -> bool:
        """Whether ranks may run on other machines."""
        return rules.are_ranks_elsewhere(self.training, self.preprocessing)

    @property
    def uses_cluster(self) -> bool:
        """Whether ranks or workers run on the nodes of a given Ray cluster."""
        on_ray = self.training.launcher == "ray" or self.preprocessing.executor == "ray"
        return on_ray and self.preprocessing.ray_address is not None

    @property
    def incremental(self) -> TrainConfig:
        """Settings of incremental training."""
        return rules.derive_incremental(self.training, {**INCREMENTAL, **self.recurring.training})

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

    @property
    def model_key(self) -> str:
        """Begins the names of what belongs to the model and not to its table: other models may be trained on it."""
        return self.name if self.model_name == self.name else name_apart(self.name, self.model_name)

    def semantics(self) -> dict[str, Any]:
        """Returns what decides the trained model, apart from its data. Equal semantics are one training."""
        values = learned_values(self, lanes=self.training.lanes is not None)
        for key in ("joined", "histories", "windows"):
            logs = zip(getattr(self.features, key), values["features"][key], strict=True)
            values["features"][key] = [log for source, log in logs if not source.stored]
        return values

    def shareable(self) -> dict[str, Any]:
        """Returns the config without keys that may hold passwords: the catalog's properties and MLflow's address."""
        return self.model_dump(mode="json", exclude=PRIVATE)

    def flat(self) -> dict[str, Any]:
        """Returns dotted key -> value of all chosen settings, for MLflow's table of parameters."""
        hidden = PRIVATE | dict.fromkeys(("source", "events", "features", "sweep", "release"), True)
        values = self.model_dump(mode="json", exclude_defaults=True, exclude=hidden)
        return dict(_flattened(values | self.model_dump(mode="json", include={"training", "model"})))


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
    """Returns what errors call the config, and its values, unchecked, with dotted keys put over them.

    Relative data paths of overrides, and of a config that is no file, start at the current folder.
    """
    if isinstance(config, BaseModel):
        config = config.model_dump(mode="json")
    where = str(config) if isinstance(config, str | Path) else "config"
    here = Path.cwd()
    values = read_yaml(Path(config)) if isinstance(config, str | Path) else start_paths(dict(config), here)
    for key, value in (overrides or {}).items():
        values = put(values, key.split("."), start_paths(value, here, key), key)
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
