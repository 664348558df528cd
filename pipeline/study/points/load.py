"""StudyConfig: the config of a run with the section of the efficiency study, from the same file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, model_validator

from pipeline.config.run import RunConfig, read_values, validate
from pipeline.errors import ConfigError
from pipeline.marks import APART
from pipeline.study.points.config import CharacterizeConfig


class StudyConfig(RunConfig, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """A run config with its section `characterize`, which `dlrm characterize` and `dlrm estimate` read."""

    characterize: Annotated[CharacterizeConfig, APART] = CharacterizeConfig()
    """The efficiency study, for `dlrm characterize` and `dlrm estimate` alone. Other commands refuse it."""

    @model_validator(mode="after")
    def _workload_has_pairs(self) -> Self:
        workload = self.characterize.workload
        alone = workload is not None and workload.sparse_features + bool(workload.dense_features) < 2
        if alone and self.model.interaction == "dot":
            where = "characterize.workload with model.interaction=dot"
            raise ConfigError(where, "at least two features", "one", "Raise sparse_features, or choose cat.")
        return self

    @property
    def run(self) -> RunConfig:
        """The config without the section, as all other commands know it."""
        return RunConfig.model_validate({key: getattr(self, key) for key in RunConfig.model_fields})


def load_study(
    config: str | Path | BaseModel | Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> StudyConfig:
    """Reads a config as `load` does, with its section `characterize`.

    Raises:
        ConfigError: If the file is absent, or a key is unknown or of the wrong type.
    """
    return validate(StudyConfig, *read_values(config, overrides))
