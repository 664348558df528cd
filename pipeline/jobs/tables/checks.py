"""What the rules say of new days, shown: log lines, a table on the run's page, a figure and the numbers in files."""

from pathlib import Path
from typing import Any

from pipeline.extraction.checks import CheckResult
from pipeline.extraction.plots import day_figure
from pipeline.jobs.workspace import Workspace
from storage.artifacts import atomic_file, write_json

MOST_LINES = 10
"""Findings that get a line of their own in the log; the others are counted."""
MOST_ROWS = 500
"""Rows of the table on the run's page."""


def show_checks(workspace: Workspace, checked: CheckResult) -> None:
    """The findings of an ingest, where people look. What cannot be shown ends no ingest."""
    config = workspace.config
    logger = workspace.console.log
    for finding in checked.findings[:MOST_LINES]:
        logger.warning("%s: %s: expected %s, got %s", finding.outcome, finding.where, finding.expected, finding.got)
    if len(checked.findings) > MOST_LINES:
        logger.warning(
            "%s more findings; see %s", len(checked.findings) - MOST_LINES, report_folder(workspace, checked)
        )
    try:
        _write(workspace, checked)
        rows = [finding.model_dump() for finding in checked.findings[:MOST_ROWS]] or [{"findings": "none"}]
        about = f"Rules that new days of table {config.name} break: {len(checked.findings)} findings"
        workspace.console.show_table("checks", config.name, rows, about)
    except Exception as error:
        logger.warning("the checks are not shown on the run's page: %s", error)


def summarize_checks(workspace: Workspace, checked: CheckResult) -> dict[str, Any]:
    """What an ingest's result says of the rules: days by outcome, the findings, and where the report is."""
    if not checked.days:
        return {"findings": [], "report": None}
    found = [finding.model_dump(mode="json") for finding in checked.findings[:MOST_ROWS]]
    return checked.counts() | {"findings": found, "report": str(report_folder(workspace, checked))}


def report_folder(workspace: Workspace, checked: CheckResult) -> Path:
    """Where figure and numbers of an ingest are; the same days again replace them."""
    days = [one.day for one in checked.days if one.outcome != "stored"]
    return workspace.home / "reports" / f"ingest-{workspace.config.name}-{days[0]}-{days[-1]}"


def _write(workspace: Workspace, checked: CheckResult) -> None:
    folder = report_folder(workspace, checked)
    write_json(folder / "checks.json", checked.model_dump(mode="json"))
    with atomic_file(folder / "checks.png") as path:
        day_figure(f"New days of table {workspace.config.name}", checked).savefig(path, format="png")
