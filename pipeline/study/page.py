"""The report of an efficiency study: plots, a text that compares them with the paper, a table and a JSON file."""

from collections import Counter
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from pipeline.errors import TrainingError
from pipeline.jobs.console import step
from pipeline.study.job import RESULT, OpenStudy
from pipeline.study.measure.results import PointResult, StudyResults
from pipeline.study.report.findings import evaluate_claims, render_study
from pipeline.study.report.plots import draw_figures
from storage.artifacts import atomic_file, write_json, write_text

STUDY = "study.json"
"""File with all results of a study. Plots and text are made from it."""


@step("conclude")
def conclude(work: OpenStudy, report: str | None) -> dict[str, Any]:
    """All points -> plots, text and table. Safe to repeat: it replaces itself.

    Raises:
        TrainingError: If no point was measured.
    """
    config, settings, tracker = work.workspace.config, work.job.settings, work.workspace.tracking
    counts = Counter(result.state for result in work.results)
    if not counts["measured"]:
        reasons = [str(result.reason) for result in work.results]
        remedy = "Change the points, and run the command again."
        raise TrainingError("study", "one point that is measured", f"none; the first: {reasons[0]}", remedy)
    study = StudyResults(
        name=config.name, experiment=settings.experiment, **work.code,
        config=settings.model_dump(mode="json") | {"training": config.training.model_dump(mode="json")},
        machine=work.machine.model_dump(mode="json"), results=tuple(work.results),
    )  # fmt: skip
    write_json(work.folder / STUDY, study.model_dump(mode="json"))
    tracker.log_file(work.run_id, work.folder / STUDY)
    text, drawn = render_study(study), {}
    with work.workspace.best_effort("figures"):
        drawn = draw_figures(study)
        tracker.log_figures(work.run_id, drawn)
    folder = work.folder if report is None else Path.cwd() / report
    path = write_page(folder, (study.experiment or study.name).lower(), text, drawn)
    tracker.log_file(work.run_id, path)
    tracker.tag(work.run_id, {"mlflow.note.content": text[:5_000]})
    with work.workspace.best_effort("page in Prefect"):
        work.console.show_text("characterize", config.name, text)
    found = evaluate_claims(study)
    for finding in found:
        work.console.log.info("%s: %s (%s)", finding.verdict, finding.claim, finding.measured)
    if study.measured:
        best = max(study.measured, key=lambda one: one.measurement.rows_per_second.median if one.measurement else 0.0)
        work.console.log.info("fastest: %s: %s", best.point.name, describe_result(best))
    work.console.log.info("report: %s", path)
    result = {
        "status": "ok", "study": work.job.name, "points": dict(counts), "snapshot_id": work.job.snapshot_id,
        "findings": [finding.model_dump(mode="json") for finding in found], "report": str(path),
        "machine": study.machine, "mlflow_run_id": work.run_id,
    }  # fmt: skip
    if not counts["failed"]:  # the same command measures failed points again
        write_json(work.folder / RESULT, result)
    return result


def write_page(folder: Path, name: str, text: str, drawn: dict[str, Figure]) -> Path:
    """Writes the report and its plots into a folder. Returns the path of the report."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = []
    for title, figure in drawn.items():
        with atomic_file(folder / f"{name}-{title}.png") as temporary:
            figure.savefig(temporary, format="png")
        shown.append(f"![{title}]({name}-{title}.png)")
    path = folder / f"{name}.md"
    write_text(path, "\n\n".join([text, *shown]) + "\n")
    return path


def describe_result(result: PointResult) -> str:
    """Returns the result of a point as one line."""
    if result.quality is not None:
        return ", ".join(f"{name} {value:.4f}" for name, value in result.quality.items())
    if result.measurement is None:
        return f"{result.state}: {result.reason}"
    one = result.measurement
    parts = sorted(one.split_ms.items(), key=lambda part: -part[1])[:3]
    split = ", ".join(f"{name} {value / one.step_ms.median:.0%}" for name, value in parts)
    spread = (one.step_ms.high - one.step_ms.low) / one.step_ms.median
    return f"{one.rows_per_second.median:,.0f} rows/s, step {one.step_ms.median:.1f} ms (spread {spread:.0%}): {split}"
