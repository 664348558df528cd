"""A config that may lack features and split, for commands that look at rows before features are declared."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self, cast

from pydantic import AfterValidator, BaseModel, create_model, model_validator

from pipeline.config.files import home_path
from pipeline.config.run import RunConfig, check_name, read_values, validate
from pipeline.data.config import SplitConfig
from pipeline.evaluation.config import EvaluationConfig
from pipeline.extraction.config import LabelColumns, SourceConfig
from storage.config import WarehouseConfig

COLUMN_SECTIONS = ("features", "split", "sweep", "release", "recurring")
"""Sections that name columns or build on them. A draft keeps only the label columns, and the split as a proposal."""

PLACES = ("path", "table", "generator")
"""Keys that say where a source's rows are."""


class Draft(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """A run config without what depends on the columns. All other sections are checked as in a complete config."""

    name: Annotated[str, AfterValidator(check_name)] = "mine"
    home: str = ".dlrm"
    source: SourceConfig | None = None
    warehouse: WarehouseConfig = WarehouseConfig()
    features: LabelColumns = LabelColumns()
    evaluation: EvaluationConfig = EvaluationConfig()
    split: SplitConfig | None = None
    """The config's own split, which a suggestion keeps if it fits the rows."""
    source_keys: Mapping[str, Any] = {}
    """Keys of a source that does not say where its rows are. The command does."""

    unread: tuple[str, ...] = ()
    """Keys of the config's features that make columns. A suggestion does not have them."""

    @model_validator(mode="after")
    def _label_is_known(self) -> Self:
        if self.source is not None:
            self.source.check_label(self.features.label, self.features.weight)
        return self

    @property
    def home_path(self) -> Path:
        """The resolved `home`."""
        return home_path(self.home)

    @property
    def tables(self) -> WarehouseConfig:
        """The warehouse, with the samples under `name` if `source.table` has them."""
        return self.warehouse if self.source is None else self.source.add_table(self.warehouse, self.name)

    def sections(self) -> dict[str, Any]:
        """Returns what was chosen apart from features and split, in the order of a complete config."""
        values = self.model_dump(mode="json", exclude_defaults=True) | {"name": self.name}
        return {key: values[key] for key in RunConfig.model_fields if key in values and key not in COLUMN_SECTIONS}


_OTHERS: dict[str, Any] = {
    key: (field.annotation, field)
    for key, field in RunConfig.model_fields.items()
    if key not in COLUMN_SECTIONS and key not in Draft.model_fields
}
_FullDraft = cast("type[Draft]", create_model("_FullDraft", __base__=Draft, **_OTHERS))


def load_draft(
    config: str | Path | RunConfig | Draft | Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> Draft:
    """Reads a config as `load` does, but features and split are neither needed nor read.

    Raises:
        ConfigError: If the file is absent, or a key is unknown or of the wrong type.
    """
    if isinstance(config, Draft):
        config = config.model_dump(mode="json", exclude_unset=True)
    where, values = read_values(config, overrides)
    source = values.get("source")
    if isinstance(source, Mapping) and not any(source.get(key) for key in PLACES):
        values |= {"source": None, "source_keys": {**(values.get("source_keys") or {}), **source}}
    given = values.get("features") or {}
    split = values.get("split")
    if unread := [f"features.{key}" for key in ("derived", "joined", "histories", "windows") if given.get(key)]:
        values |= {"unread": unread}
    labels = {key: given[key] for key in ("label", "weight") if given.get(key)}
    values = {key: value for key, value in values.items() if key not in COLUMN_SECTIONS}
    return validate(_FullDraft, where, values | {"features": labels, "split": split})
