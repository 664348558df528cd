"""What comes out of an efficiency study: figures, a text that holds them against the paper, a table, a record."""

from collections import Counter
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from pipeline.characterization.findings import evaluate_claims, render_study
from pipeline.characterization.plots import draw_figures
from pipeline.characterization.results import StudyResults
from pipeline.config.files import ROOT
from pipeline.errors import TrainingError
from pipeline.jobs.study.job import RESULT, Work
from pipeline.jobs.study.run import in_words
from pipeline.jobs.training.summary import artifact_key
from pipeline.jobs.training.tasks import cosmetic
from storage.artifacts import atomic_file, write_json, write_text

STUDY = "study.json"
"""All results of a study: what figures and text are made of."""


@task(cache_policy=NO_CACHE, task_run_name="conclude")
def conclude(work: Work, report: str | None) -> dict[str, Any]:
    """All points -> figures, text and table. Safe to repeat: it replaces itself.

    Raises:
        TrainingError: If no point was measured.
    """
    config, tracker = work.config, work.tracker
    counts = Counter(result.state for result in work.results)
    if not counts["measured"]:
        reasons = [str(result.reason) for result in work.results]
        remedy = "Change the points, and run the command again."
        raise TrainingError("study", "one point that is measured", f"none; the first: {reasons[0]}", remedy)
    study = StudyResults(
        name=config.name, experiment=config.characterize.experiment, **work.code,
        config=config.characterize.model_dump(mode="json") | {"training": config.training.model_dump(mode="json")},
        machine=work.machine.model_dump(mode="json"), results=tuple(work.results),
    )  # fmt: skip
    write_json(work.folder / STUDY, study.model_dump(mode="json"))
    tracker.log_file(work.run_id, work.folder / STUDY)
    text, drawn = render_study(study), {}
    with cosmetic("figures"):
        drawn = draw_figures(study)
        tracker.log_figures(work.run_id, drawn)
    folder = work.folder if report is None else ROOT / report
    path = written(folder, (study.experiment or study.name).lower(), text, drawn)
    tracker.log_file(work.run_id, path)
    tracker.tag(work.run_id, {"mlflow.note.content": text[:5_000]})
    with cosmetic("page in Prefect"):
        create_markdown_artifact(text, key=artifact_key("characterize", config.name))
    found = evaluate_claims(study)
    for finding in found:
        get_run_logger().info("%s: %s (%s)", finding.verdict, finding.claim, finding.measured)
    if study.measured:
        best = max(study.measured, key=lambda one: one.measurement.rows_per_second.median if one.measurement else 0.0)
        get_run_logger().info("fastest: %s: %s", best.point.name, in_words(best))
    get_run_logger().info("report: %s", path)
    result = {
        "status": "ok", "study": work.job.name, "points": dict(counts), "snapshot_id": work.job.snapshot_id,
        "findings": [finding.model_dump(mode="json") for finding in found], "report": str(path),
        "machine": study.machine, "mlflow_run_id": work.run_id,
    }  # fmt: skip
    if not counts["failed"]:  # what failed is tried again by the same command
        write_json(work.folder / RESULT, result)
    return result


def written(folder: Path, name: str, text: str, drawn: dict[str, Figure]) -> Path:
    """The report as a file with its figures beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = []
    for title, figure in drawn.items():
        with atomic_file(folder / f"{name}-{title}.png") as temporary:
            figure.savefig(temporary, format="png")
        shown.append(f"![{title}]({name}-{title}.png)")
    path = folder / f"{name}.md"
    write_text(path, "\n\n".join([text, *shown]) + "\n")
    return path
