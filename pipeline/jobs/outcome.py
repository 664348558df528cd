"""What came of a command, in words, from its result line."""

import os
from collections.abc import Mapping
from typing import Any

from pipeline.evaluation.metrics import format_metric
from pipeline.jobs.workspace import Workspace

DECIDED = {"promote": "promoted", "hold": "held", "reject": "rejected"}
"""Decision of the gate -> what it has done with a version."""
MLFLOW_ADDRESS = "mlflow_address"
"""File below `home/ui` that `make ui` leaves: where it shows MLflow."""
UI = "http://127.0.0.1:5000"
"""Where `make ui` shows MLflow by default."""


def describe_outcome(result: Any) -> tuple[str, str]:
    """Returns what came of a command, in a few words and in a sentence. Empty texts: nothing that lists should show.

    Example:
        >>> model, gate = {"name": "demo", "version": 7}, {"decision": "reject", "reason": "NE is higher."}
        >>> describe_outcome({"status": "ok", "model": model, "gate": gate, "eval": {"ne": 0.86421}})
        ('v7 rejected, NE 0.8642', 'version 7, rejected: NE is higher.')
        >>> describe_outcome({"status": "skipped", "model": model})
        ('skipped, v7 is there', 'skipped: version 7 is there from the same work. force=true does it again.')
        >>> describe_outcome({"status": "ok", "days_written": 3, "days_held": 1})
        ('3 days written, 1 held back', '3 days written, 1 held back.')
    """
    if not isinstance(result, Mapping) or "status" not in result:
        return "", ""
    model, gate = result.get("model"), result.get("gate")
    version = model.get("version") if isinstance(model, Mapping) else None
    if result["status"] == "skipped":
        if version is None:
            return "skipped", "skipped: all of it is done. force=true does it again."
        return f"skipped, v{version} is there", (
            f"skipped: version {version} is there from the same work. force=true does it again."
        )
    if version is not None and gate:
        decided, ne = DECIDED[gate["decision"]], (result.get("eval") or {}).get("ne")
        return f"v{version} {decided}, NE {format_metric(ne)}", f"version {version}, {decided}: {gate['reason']}"
    if "days_written" in result:
        parts = [f"{result['days_written']} days written"]
        parts += [f"{result['days_held']} held back"] if result.get("days_held") else []
        return ", ".join(parts), f"{', '.join(parts)}."
    return "", ""


def show_outcome(workspace: Workspace, result: Mapping[str, Any]) -> None:
    """Shows what a run inside this one has made, with its metrics, on the page of this one.

    Args:
        result: Its result line.
    """
    short, long = describe_outcome(result)
    metrics = {key: value for key, value in (result.get("eval") or {}).items() if isinstance(value, int | float)}
    rows = [
        f"| {key} | {value if isinstance(value, int) else format_metric(value)} |" for key, value in metrics.items()
    ]
    table = "\n".join(["| metric | value |", "|---|---|", *rows])
    with workspace.best_effort("the outcome on the run's page"):
        link = f"[MLflow run]({run_address(workspace, result['mlflow_run_id'])})"
        workspace.console.show_text("outcome", workspace.config.name, f"# {short}\n\n{long}\n\n{table}\n\n{link}", long)


def run_address(workspace: Workspace, run_id: str) -> str:
    """Returns where a browser finds an MLflow run, without a password.

    That is at DLRM_MLFLOW_UI, at MLflow's own server, or where `make ui` of this home shows MLflow, or did last.
    """
    from pipeline.registration.tracking import redact  # loads MLflow, which a run that is skipped may not need

    tracker, note = workspace.tracking, workspace.home / "ui" / MLFLOW_ADDRESS
    address = os.environ.get("DLRM_MLFLOW_UI") or (redact(tracker.uri) if tracker.uri.startswith("http") else None)
    if address is None:
        address = note.read_text(encoding="utf-8").strip() if note.exists() else UI
    return f"{address}/#/experiments/{tracker.experiment_id}/runs/{run_id}"
