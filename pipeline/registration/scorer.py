"""The pyfunc: raw rows in, probabilities out. MLflow saves this file and runs it where the model is served."""

from pathlib import Path
from typing import Any

import mlflow.models
import pandas as pd
from mlflow.exceptions import MlflowException
from mlflow.models import Model
from mlflow.pyfunc import PythonModel, PythonModelContext

from pipeline.errors import InputError
from pipeline.inference.files import FILES, check_files
from pipeline.inference.mlflow_bodies import as_sent
from pipeline.inference.model import LoadedModel


class Scorer(PythonModel):
    """MLflow's view of a LoadedModel."""

    def load_context(self, context: PythonModelContext) -> None:
        """Loads the model from the artifact folder `model`.

        Raises:
            RegistryError: If a file of it is not the registered one.
            ConfigError: If the event logs of the configuration `events` do not fit the model.
        """
        folder = Path(context.artifacts["model"])
        check_files("served model", folder, (Model.load(folder.parents[1]).metadata or {})[FILES])
        self.loaded = LoadedModel(folder, logs=(context.model_config or {}).get("events") or {})

    def predict(
        self, context: PythonModelContext, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> pd.DataFrame:
        """Returns a column `probability`. Accepts all of `Rows`; MLflow warns of any type hint but that of a frame.

        Raises:
            MlflowException: If a row cannot be scored. Its code makes MLflow's server answer 400 with the reason.
        """
        try:
            return pd.DataFrame({"probability": self.loaded.probabilities(as_sent(model_input, self.loaded.inputs))})
        except InputError as error:
            raise MlflowException.invalid_parameter_value(str(error)) from error


mlflow.models.set_model(Scorer())
