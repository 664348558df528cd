"""Reports the checks of new days: log lines, a table on the run's page, a figure and a JSON file."""

from pathlib import Path
from typing import Any

from pipeline.extraction.checks import CheckResult
from pipeline.jobs.workspace import Workspace
from storage.artifacts import atomic_file, write_json

MOST_LINES = 10
"""Most findings that are logged. Further ones are counted."""
MOST_ROWS = 500
"""Most rows of the table on the run's page."""


def show_checks(workspace: Workspace, table: str, checked: CheckResult) -> None:
    """Shows the findings of an ingest. A failure to show them does not end the ingest."""
    logger = workspace.console.log
    for finding in checked.findings[:MOST_LINES]:
        logger.warning("%s: %s: expected %s, got %s", finding.outcome, finding.where, finding.expected, finding.got)
    if len(checked.findings) > MOST_LINES:
        logger.warning(
            "%s more findings are in %s", len(checked.findings) - MOST_LINES, report_folder(workspace, table, checked)
        )
    try:
        folder = report_folder(workspace, table, checked)
        write_json(folder / "checks.json", checked.model_dump(mode="json"))
        _draw(folder, table, checked)
        rows = [finding.model_dump() for finding in checked.findings[:MOST_ROWS]] or [{"findings": "none"}]
        about = f"Rules that new days of table {table} break: {len(checked.findings)} findings"
        workspace.console.show_table("checks", table, rows, about)
    except Exception as error:
        logger.warning("the checks are missing on the run's page: %s", error)


def summarize_checks(workspace: Workspace, table: str, checked: CheckResult) -> dict[str, Any]:
    """Returns the checks for an ingest's result: days by outcome, the findings, and the report's folder."""
    if not checked.days:
        return {"findings": [], "report": None}
    found = [finding.model_dump(mode="json") for finding in checked.findings[:MOST_ROWS]]
    return checked.counts() | {"findings": found, "report": str(report_folder(workspace, table, checked))}


def report_folder(workspace: Workspace, table: str, checked: CheckResult) -> Path:
    """Returns the folder for figure and numbers of an ingest. Another ingest of the same days replaces them."""
    days = [one.day for one in checked.days if one.outcome != "stored"]
    return workspace.home / "reports" / f"ingest-{table}-{days[0]}-{days[-1]}"


def _draw(folder: Path, table: str, checked: CheckResult) -> None:
    from pipeline.jobs.ingest.plots import day_figure  # imports matplotlib, which takes a third of a second

    with atomic_file(folder / "checks.png") as path:
        day_figure(f"New days of table {table}", checked).savefig(path, format="png")
