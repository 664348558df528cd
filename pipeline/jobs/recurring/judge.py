"""Judges the model of an earlier day on a whole day that neither it nor the champion has seen."""

import datetime
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pipeline.evaluation.evaluate import EvalReport
from pipeline.evaluation.gate import Verdict
from pipeline.jobs.console import step
from pipeline.jobs.recurring.day import Today, select_day_rows
from pipeline.jobs.training.evaluate import decide, download_scorer, evaluate_model, hold_if_overtaken, score_both
from pipeline.jobs.training.finish import log_verdict, write_pages
from pipeline.jobs.training.identity import digest
from pipeline.jobs.workspace import Workspace
from pipeline.registration.aliases import CHALLENGER, CHAMPION, REFERENCE, end_challenge, find_holder, move_alias
from pipeline.registration.tracking import RESULT, is_unreachable
from pipeline.registration.versions import TRAINED_FROM
from storage.artifacts import MADE_AGAIN, read_note, write_text

Numbers = Mapping[str, Any]
"""Metrics by name."""


class DayVerdict(BaseModel, frozen=True):
    """The gate's decision on a day, with the quality of the versions that scored the whole day."""

    day: datetime.date
    challenger: int
    champion: int
    """The version that served the day."""
    gate: Verdict
    quality: Mapping[int, Numbers]
    work: str = ""
    """Identifies the rows of the day, the compared trainings and the rule of the gate. Empty: not recorded."""


@step("judge")
def judge_challenger(workspace: Workspace, today: Today, folder: Path) -> DayVerdict | None:
    """Compares the model of an earlier day with the champion on the whole day, and moves the alias.

    Safe to repeat: writes the verdict to a file before it moves anything. Returns None if there is nothing to judge.

    Args:
        folder: Holds the downloaded models.
    """
    note = workspace.home / "judged" / f"{workspace.config.model_name}-{today.day}.json"
    verdict = read_note(note, DayVerdict, MADE_AGAIN) if note.exists() else None
    if verdict is not None and verdict.work != _name_work(workspace, today, verdict.challenger, verdict.champion):
        verdict = None  # of other rows, of other models with these numbers, or by another rule
    challenger = _find_challenger(workspace, today)
    if challenger is None:
        return verdict  # of an interrupted attempt, if any
    if verdict is None or (verdict.challenger, verdict.champion) != (challenger, today.champion.version):
        verdict = _judge(workspace, today, challenger, folder)
        write_text(note, verdict.model_dump_json(indent=1))
    return _carry_out(workspace, verdict)


def _name_work(workspace: Workspace, today: Today, challenger: int, champion: int) -> str:
    """Returns a hash of all that a verdict is about. A registry that was made anew counts its versions from 1 again."""
    tracker, config = workspace.tracking, workspace.config
    found = [tracker.get_version(config.model_name, str(number)) for number in (challenger, champion)]
    return digest(
        {
            "rows": workspace.warehouse.day_names(today.snapshot)[today.day],
            "versions": [challenger, champion],
            "runs": [None if version is None else version.run_id for version in found],
            "gate": config.gate.model_dump(mode="json"),
        }
    )


def _find_challenger(workspace: Workspace, today: Today) -> int | None:
    """Returns the version of an earlier day that waits for its verdict. None: there is none."""
    tracker, name, champion = workspace.tracking, workspace.config.model_name, today.champion.version
    version = find_holder(tracker, name, CHALLENGER)
    if version is None or version == champion:
        return None
    tags = tracker.client.get_model_version(name, str(version)).tags
    if "day" not in tags or datetime.date.fromisoformat(tags["trained_to"]) >= today.day:
        return None
    if tags[TRAINED_FROM] not in ("scratch", str(champion)):
        workspace.console.log.warning(
            "version %s is not judged: it continues version %s, which is no longer champion",
            version, tags[TRAINED_FROM],
        )  # fmt: skip
        return None
    return version


def _judge(workspace: Workspace, today: Today, challenger: int, folder: Path) -> DayVerdict:
    champion, log = today.champion.version, workspace.console.log
    shutil.rmtree(folder, ignore_errors=True)  # of an attempt that failed
    spec = select_day_rows(workspace, today)
    scorer = download_scorer(workspace, challenger, spec, folder / "challenger")
    quality: dict[int, Numbers] = {}
    if scorer.model is None:
        reason = f"Version {challenger}, the challenger, cannot score these rows: {scorer.error}."
        gate = Verdict(decision="hold", reason=reason, champion=champion)
    else:
        spec = scorer.add_columns(spec)
        with workspace.console.progress() as progress:
            scored = score_both(
                workspace, spec, today.rows, scorer.model, champion, folder, progress, names=scorer.read.names
            )
        gate = decide(workspace, scored, champion)
        quality[challenger] = list_numbers(scored.report)
        if scored.error is None:
            found = scored.evaluation.champion.quality()
            quality[champion] = found.model_dump(exclude={"undefined"}) | {"undefined": dict(found.undefined)}
    log.info("gate: %s version %s on %s. %s", gate.decision, challenger, today.day, gate.reason)
    work = _name_work(workspace, today, challenger, champion)
    return DayVerdict(day=today.day, challenger=challenger, champion=champion, gate=gate, quality=quality, work=work)


def _carry_out(workspace: Workspace, verdict: DayVerdict) -> DayVerdict:
    """Writes the verdict to the version, its run and its page, and moves the alias last.

    Safe to repeat: it replaces itself. The version stays challenger until the alias moves.

    Returns:
        The verdict, or a hold if a person has moved the champion since.
    """
    tracker, name, version = workspace.tracking, workspace.config.model_name, verdict.challenger
    present = find_holder(tracker, name, CHAMPION)
    gate = verdict.gate if present == version else hold_if_overtaken(verdict.gate, present)
    if gate != verdict.gate:
        workspace.console.log.warning("gate: %s version %s after all. %s", gate.decision, version, gate.reason)
    alias = CHAMPION if present == version else {"promote": CHAMPION, "hold": CHALLENGER, "reject": None}[gate.decision]
    run_id = str(tracker.client.get_model_version(name, str(version)).run_id)
    result = tracker.load_result(run_id)
    judged = {"judged_on": f"{verdict.day}", "judged_eval": verdict.quality.get(version)}
    result |= {"gate": gate.model_dump(), "model": result["model"] | {"alias": alias}} | judged
    log_verdict(workspace, version, run_id, gate, int(result["train"]["steps"]), judged)
    tracker.log_json(run_id, result, RESULT)
    write_pages(workspace, version, run_id)
    if alias == CHAMPION:
        move_alias(tracker, name, CHAMPION, version, "gate", gate.reason)
    elif alias is None:
        end_challenge(tracker, name)
    return verdict.model_copy(update={"gate": gate})


def list_numbers(report: EvalReport) -> Numbers:
    """Returns the metrics of a report, and the reasons of undefined ones."""
    return report.numbers | {"undefined": dict(report.overall.undefined)}


def choose_reference(workspace: Workspace, today: Today) -> int:
    """Returns the reference. If no version has the alias, gives it to the champion, for good."""
    name = workspace.config.model_name
    version = find_holder(workspace.tracking, name, REFERENCE)
    if version is None:
        version = today.champion.version
        move_alias(workspace.tracking, name, REFERENCE, version, "gate", "The first champion of recurring training.")
    return version


def evaluate_reference(workspace: Workspace, today: Today, version: int, folder: Path) -> Numbers | None:
    """Evaluates the reference on the whole day. Returns None and logs the reason if it cannot score the day."""
    spec = select_day_rows(workspace, today)
    scorer = download_scorer(workspace, version, spec, folder / "reference")
    error = scorer.error
    if scorer.model is not None:
        try:
            with workspace.console.progress() as progress:
                report = evaluate_model(workspace, spec, today.rows, scorer.model, progress, scorer.read)
            return list_numbers(report)
        except Exception as problem:  # the day must not fail because of the reference
            if is_unreachable(problem):
                raise
            error = f"{problem}"
    workspace.console.log.warning("version %s, the reference, cannot score %s: %s", version, today.day, error)
    return None
