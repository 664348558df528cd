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
        ('skipped, v7 is there', 'skipped: version 7 is there from the same work.')
        >>> describe_outcome({"status": "ok", "days_written": 3, "days_held": 1})
        ('3 days written, 1 held back', '3 days written, 1 held back.')
    """
    if not isinstance(result, Mapping) or "status" not in result:
        return "", ""
    if result["status"] == "skipped":
        return _describe_skipped(_version(result))
    for describe in (_describe_day, _describe_version, _describe_days, _describe_scores, _describe_sweep):
        if found := describe(result):
            return found
    return "", ""


def summarize(result: Mapping[str, Any]) -> list[str]:
    """Returns what a person at a terminal wants to know of a result, in a few lines.

    Example:
        >>> quality = {"ne": 0.85, "auc": 0.75, "rows": 5_000}
        >>> for line in summarize({"status": "ok", "days_written": 3, "eval": quality, "path": "a.html", "days": [1]}):
        ...     print(line)
        ok: 3 days written.
        evaluated: NE 0.8500, AUC 0.7500, 5,000 rows
        days_written: 3, path: a.html
        --json prints all of it
    """
    said = describe_outcome(result)[1]
    lines = [f"{result['status']}: {said}" if result["status"] == "ok" and said else said or f"{result['status']}"]
    if quality := result.get("judged_eval") or result.get("eval"):
        values = [f"NE {format_metric(quality.get('ne'))}", f"AUC {format_metric(quality.get('auc'))}"]
        lines.append(f"evaluated: {', '.join(values)}, {quality.get('rows', 0):,} rows")
    if (train := result.get("train")) and "rows" in train:
        lines.append(
            f"trained: {train['rows']:,} rows, {train['steps']:,} steps, {train['rows_per_second']:,.0f} rows/s"
        )
    own = {key: one for key, one in result.items() if isinstance(one, str | int | float) and one and key != "status"}
    shown = [
        f"{key}: {one:,}" if isinstance(one, int) and one is not True and not key.endswith("_id") else f"{key}: {one}"
        for key, one in own.items()
    ]
    if shown and "train" not in result:
        lines.append(", ".join(shown))
    return [*lines, "--json prints all of it"]


def _version(result: Mapping[str, Any]) -> int | None:
    model = result.get("model")
    return model.get("version") if isinstance(model, Mapping) else None


def _describe_skipped(version: int | None) -> tuple[str, str]:
    if version is None:
        return "skipped", "skipped: all of it is done."
    return f"skipped, v{version} is there", f"skipped: version {version} is there from the same work."


def _describe_day(result: Mapping[str, Any]) -> tuple[str, str] | None:
    """Describes a day of recurring training: the verdict on the model of the day before, then the new model."""
    day, decision, judged = result.get("day"), result.get("decision"), result.get("judged")
    if day is None or decision is None:
        return None
    version, gate, verdict = _version(result), result.get("gate"), None
    trained = gate is not None and decision["training"] != "none"
    if judged is not None:
        verdict = _describe_verdict(judged["version"], judged["gate"], judged["eval"])
    elif trained and gate and not gate.get("pending"):  # recurring.judge: same_day
        return _on_day(day, *_describe_verdict(version, gate, result.get("eval")))
    after = f"v{version} trained" if trained else "no training"
    long = f"version {version} is judged on the next day" if trained else f"no training: {decision['reason']}"
    if verdict is None:
        return _on_day(day, after, f"{long}.")
    return _on_day(day, f"{verdict[0]}; {after}", f"{verdict[1]} Then {long}.")


def _on_day(day: str, short: str, long: str) -> tuple[str, str]:
    return f"{day} {short}", f"{day}: {long}"


def _describe_verdict(
    version: int | None, gate: Mapping[str, Any], quality: Mapping[str, Any] | None
) -> tuple[str, str]:
    decided = "to be judged" if gate.get("pending") else DECIDED[gate["decision"]]
    ne = (quality or {}).get("ne")
    return f"v{version} {decided}, NE {format_metric(ne)}", f"version {version}, {decided}: {gate['reason']}"


def _describe_version(result: Mapping[str, Any]) -> tuple[str, str] | None:
    version, gate = _version(result), result.get("gate")
    return (
        None
        if version is None or not gate
        else _describe_verdict(version, gate, result.get("judged_eval") or result.get("eval"))
    )


def _describe_days(result: Mapping[str, Any]) -> tuple[str, str] | None:
    """Describes an ingest or a backfill by its numbers of days."""
    words = {"days_written": "written", "days_held": "held back", "days_trained": "trained", "days_judged": "evaluated"}
    first = next((key for key in words if key in result), None)
    counts = [(result[key], word) for key, word in words.items() if result.get(key) or key == first]
    if first is None or "decision" in result:
        return None
    (count, word), *others = counts
    text = ", ".join([f"{count} days {word}", *(f"{number} {what}" for number, what in others)])
    return text, f"{text}."


def _describe_scores(result: Mapping[str, Any]) -> tuple[str, str] | None:
    if "mean_probability" not in result:
        return None
    text = f"v{result['version']} scored {len(result['days'])} days, {result['rows']:,} rows"
    return text, f"{text}, in table {result['table']}."


def _describe_sweep(result: Mapping[str, Any]) -> tuple[str, str] | None:
    if "best" not in result or "trials" not in result:
        return None
    count, ne = sum(result["trials"].values()), format_metric(result["best"]["valid_ne"])
    return f"{count} trials, best NE {ne}", f"{count} trials; the best has NE {ne}: {result['config_path']}"


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
        workspace.console.show_text(
            "outcome", workspace.config.model_key, f"# {short}\n\n{long}\n\n{table}\n\n{link}", long
        )


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
