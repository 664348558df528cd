"""RegistrationConfig: where runs and models are recorded."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel

from pipeline.errors import ConfigError
from pipeline.marks import LEARNED

Default = int | float | str | bool | None | tuple[int | float | str | None, ...]
"""Default of a raw column for requests that lack it."""
Weights = Literal["fp32", "int8"]


def _model_name(text: str) -> str:
    if set(text) & set("'/:"):
        raise ConfigError("registration.model_name", "a name without quotes, / and :", f'"{text}"', "Rename it.")
    return text


class RegistrationConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Where runs and models are recorded."""

    tracking_uri: str | None = None
    """MLflow server or database. None: MLFLOW_TRACKING_URI, else SQLite below `home`."""
    model_name: Annotated[str, AfterValidator(_model_name)] | None = None
    """Name in the registry. None: the config's name."""
    defaults: Mapping[str, Default] = {}
    """Raw column -> the value that the registered model uses if a request lacks the column or sends the wrong kind.

    Defaults are not part of a training's identity: a registered model takes new ones with `force=true` only."""
    weights: Annotated[Weights, LEARNED] = "fp32"
    """int8: embedding tables as bytes, (width + 8) / (4 width) of the size. The rest of the model stays fp32.

    The model is evaluated in the form that is registered.
    """
