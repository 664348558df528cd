"""What the rules say of new days, shown: log lines, a table on the run's page, a figure and the numbers in files."""

from pathlib import Path
from typing import Any

from prefect import get_run_logger
from prefect.artifacts import create_table_artifact

from flows.config import RunConfig
from flows.record import artifact_key
from pipeline.extraction.checks import Checked, Finding
from pipeline.extraction.plots import day_figure
from storage.artifacts import atomic_file, write_json

MOST_LINES = 10
"""Findings that get a line of their own in the log; the others are counted."""
MOST_ROWS = 500
"""Rows of the table on the run's page."""


def show_checks(config: RunConfig, checked: Checked) -> None:
    """The findings of an ingest, where people look. What cannot be shown ends no ingest."""
    logger = get_run_logger()
    for finding in checked.findings[:MOST_LINES]:
        logger.warning("%s: %s: expected %s, got %s", finding.outcome, finding.where, finding.expected, finding.got)
    if len(checked.findings) > MOST_LINES:
        logger.warning("%s more findings; see %s", len(checked.findings) - MOST_LINES, report_folder(config, checked))
    try:
        _write(config, checked)
        create_table_artifact(
            [_row(finding) for finding in checked.findings[:MOST_ROWS]] or [{"findings": "none"}],
            key=artifact_key("checks", config.name),
            description=f"Rules that new days of table {config.name} break: {len(checked.findings)} findings",
        )
    except Exception as error:
        logger.warning("the checks are not shown on the run's page: %s", error)


def checks_result(config: RunConfig, checked: Checked) -> dict[str, Any]:
    """What an ingest's result says of the rules: days by outcome, the findings, and where the report is."""
    if not checked.days:
        return {"findings": [], "report": None}
    found = [finding.model_dump(mode="json") for finding in checked.findings[:MOST_ROWS]]
    return checked.counts() | {"findings": found, "report": str(report_folder(config, checked))}


def report_folder(config: RunConfig, checked: Checked) -> Path:
    """Where figure and numbers of an ingest are; the same days again replace them."""
    days = [one.day for one in checked.days if one.outcome != "stored"]
    return config.home_path / "reports" / f"ingest-{config.name}-{days[0]}-{days[-1]}"


def _write(config: RunConfig, checked: Checked) -> None:
    folder = report_folder(config, checked)
    write_json(folder / "checks.json", checked.model_dump(mode="json"))
    with atomic_file(folder / "checks.png") as path:
        day_figure(f"New days of table {config.name}", checked).savefig(path, format="png")


def _row(finding: Finding) -> dict[str, str]:
    return {key: str(value if value is not None else "") for key, value in finding.model_dump().items()}
