"""Comparison of a study with the claims of the paper, and a table of all measurements."""

import textwrap
from collections.abc import Sequence
from typing import get_args

from pydantic import BaseModel

from pipeline.study.measure.results import PHASES, Measurement, PointResult, StudyResults
from pipeline.study.report.claims import CLAIMS, TABLE_III, Verdict


class StudyFinding(BaseModel, frozen=True):
    """A claim of the paper, compared with the measurements here."""

    experiment: str
    source: str
    """Figure or table of the paper."""
    claim: str
    measured: str
    verdict: Verdict
    """cannot tell: the repeats differ too much, or points are missing."""


def evaluate_claims(study: StudyResults) -> list[StudyFinding]:
    """Evaluates each claim of the study's experiment. Empty if the paper has no such experiment."""
    experiment = study.experiment or ""
    checked = [(claim, *claim.evaluate(study)) for claim in CLAIMS.get(experiment, ())]
    return [
        StudyFinding(experiment=experiment, source=one.source, claim=one.text, measured=measured, verdict=verdict)
        for one, verdict, measured in checked
    ]


def render_study(study: StudyResults) -> str:
    """Renders findings and a table of all points as a section of a page."""
    machine = study.machine
    facts = [
        str(machine["cpu"]) if "cpu" in machine else "",
        f"{machine['cores']} cores" if "cores" in machine else "",
        f"{machine['memory_bytes'] / 2**30:.0f} GiB" if "memory_bytes" in machine else "",
        str(machine.get("device_name") or ""),
        *(f"{name} {version}" for name, version in study.versions.items()),
        f"commit {study.commit}",
    ]
    found = evaluate_claims(study)
    rows = [(one.source, one.claim, one.measured, f"**{one.verdict}**") for one in found]
    shown = textwrap.fill(", ".join(fact for fact in facts if fact), 100, break_long_words=False)
    text = f"### {study.experiment or study.name}\n\n{shown}\n\n"
    if rows:
        text += f"{_verdict_of(found)}\n\n{_table(('paper', 'shape', 'measured here', 'this machine'), rows)}\n"
    if study.experiment == "E7":
        text += f"Table III of the paper:\n\n{_table(TABLE_III[0], TABLE_III[1:])}\n"
    return text + render_points(study.results)


def render_points(results: Sequence[PointResult]) -> str:
    """Renders all points as a markdown table. Points without a measurement show the reason."""
    evaluated = [result for result in results if result.quality is not None]
    if evaluated:
        header = ("point", *sorted({name for result in evaluated for name in result.quality or ()}))
        return _table(header, [(one.point.name, *(_ne(one, name) for name in header[1:])) for one in results])
    header = ("point", "samples/s", "low to high", "step ms", *(f"{phase} %" for phase in PHASES))
    header += ("bytes/sample", "peak MB", "GFLOP/s", "GB/s", "samples/s/core")
    rows = []
    for one in results:
        if one.measurement is None:
            rows.append((one.point.name, f"{one.state}: {one.reason or 'no reason known'}", *[""] * (len(header) - 2)))
        else:
            rows.append((one.point.name, *_cells(one.measurement)))
    return _table(header, rows)


def _cells(found: Measurement) -> list[str]:
    speed = found.rows_per_second
    cells = [f"{speed.median:,.0f}", f"{speed.low:,.0f} to {speed.high:,.0f}", f"{found.step_ms.median:.3g}"]
    cells += [f"{found.share(phase):.0%}"[:-1] for phase in PHASES]
    cells += [f"{found.load.sample_bytes:,.0f}", f"{found.peak_bytes / 1e6:,.0f}"]
    cells += [f"{found.gflop_per_second:.3g}", f"{found.gb_per_second:.3g}", f"{found.rows_per_second_per_core:,.0f}"]
    return cells


def _ne(result: PointResult, name: str) -> str:
    if result.quality is None:
        return f"{result.state}: {result.reason or 'no reason known'}"
    return f"{result.quality[name]:.4f}" if name in result.quality else ""


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    cells = [[cell.replace("|", "/").replace("\n", " ") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def _verdict_of(found: Sequence[StudyFinding]) -> str:
    """Summarises the findings in one sentence.

    Example:
        >>> one = StudyFinding(experiment="E3", source="figure 12", claim="flat", measured="0.9", verdict="agrees")
        >>> _verdict_of([one, one.model_copy(update={"verdict": "cannot tell"})])
        'Of 2 shapes of the paper this machine shows 1; it disagrees with 0 and cannot tell of 1.'
    """
    count = {verdict: sum(one.verdict == verdict for one in found) for verdict in get_args(Verdict)}
    return (
        f"Of {len(found)} shapes of the paper this machine shows {count['agrees']}; it disagrees with "
        f"{count['disagrees']} and cannot tell of {count['cannot tell']}."
    )
