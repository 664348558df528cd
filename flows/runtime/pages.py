"""What Prefect's pages show of a run beside its log: artifacts, and the tables and models that it made."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact
from prefect.assets import Asset, AssetProperties

from pipeline.config import RunConfig
from pipeline.jobs.training.reporting import PAGE
from pipeline.jobs.training.summary import artifact_key, run_address
from pipeline.registration.tracking import Tracker


def table_asset(config: RunConfig) -> Asset:
    """The table of a run, as Prefect knows it."""
    about = "Labelled samples by day, in the Iceberg warehouse."
    return Asset(
        key=f"iceberg://{config.warehouse.namespace}/{config.name}",
        properties=AssetProperties(name=f"table {config.name}", description=about),
    )


def model_asset(config: RunConfig) -> Asset:
    """The registered model of a run, as Prefect knows it."""
    about = "Versions in MLflow's registry; takes raw rows, returns probabilities."
    return Asset(
        key=f"mlflow://models/{re.sub('[^A-Za-z0-9_.-]+', '-', config.model_name)}",  # few characters are allowed
        properties=AssetProperties(name=f"model {config.model_name}", description=about),
    )


def show_result(config: RunConfig, version: str, text: str, tracker: Tracker, run_id: str) -> None:
    """Quality and verdict on the run's page, and the ways to the MLflow run and to its report.

    Args:
        version: What was made, in words.
        text: The page of the run, as markdown.
    """
    create_markdown_artifact(f"# {version}\n\n{text}", key=artifact_key("report", config.name), description=version)
    address = run_address(run_id, tracker)
    create_link_artifact(
        address, f"MLflow run {run_id[:8]}", key=artifact_key("mlflow", config.name), description=f"{version} in MLflow"
    )
    page = f"{address}/artifacts/{PAGE}"
    create_link_artifact(
        page, PAGE, key=artifact_key("html-report", config.name), description=f"{version}: the whole report"
    )


def show_table(kind: str, name: str, rows: Sequence[Mapping[str, Any]], description: str) -> None:
    """Rows as a table on the run's page."""
    shown = [{key: "" if value is None else f"{value}" for key, value in row.items()} for row in rows]
    create_table_artifact(shown, key=artifact_key(kind, name), description=description)
