"""The report shows its values, loads nothing from outside, and never turns a value into markup."""

import base64
import re
from html.parser import HTMLParser

import numpy as np
import pyarrow as pa
import pytest

from pipeline.evaluation.config import EvaluationConfig
from pipeline.evaluation.evaluate import ScoredRows
from pipeline.evaluation.html import render_report
from pipeline.evaluation.plots import draw_run
from pipeline.evaluation.record import FeatureImportance, RunRecord
from pipeline.figure import to_svg
from tests.quality import evaluate

TRAIN = {
    "rows": 6_000, "steps": 12, "world_size": 2, "rows_per_second": 1234.5, "stall_fraction": 0.25, "best_step": 12,
}  # fmt: skip


def record(title, shift, **parameters):
    random = np.random.default_rng(1)
    truth = random.beta(2, 5, 2_000)
    labels = (random.random(2_000) < truth).astype(float)
    country = pa.array([["<b>A</b>", "B"][i % 40 == 0] for i in range(2_000)])
    scored = ScoredRows(labels, np.clip(truth + shift, 0.01, 0.99), pa.table({"country": country}))
    report = evaluate([scored], EvaluationConfig(slices=("country",), small_slice_rows=100)).report()
    feature = FeatureImportance(
        name="price", kind="dense", ne_loss=0.0123, low=0.01, high=0.02, coverage=0.875, mean_length=None,
        truncated=None, collisions=None, droppable=False,
    )  # fmt: skip
    gate = {"decision": "hold", "reason": "It may be chance.", "champion_ne": 0.8123}
    curves = {"valid_ne": [(6, 0.9), (12, 0.85)]}
    drawn = draw_run(curves, 12, report, [feature], [], 2)
    return RunRecord(
        title=title, report=report, features=(feature,), parameters={"seed": "1"} | parameters,
        result={"gate": gate, "train": TRAIN, "git_commit": "abc", "snapshot_id": 7, "mlflow_run_id": "f" * 32},
        plots={name: to_svg(figure) for name, figure in drawn.items()}, data={"table": "ads", "train rows": "6,000 of 2 days"},
        curves=curves, chosen=("colour",), about={"config": "ads", "begun": "2026-01-02 03:04 UTC", "duration": "0:05:00"},
        address="http://127.0.0.1:5000/#/experiments/1/runs/f",
    )  # fmt: skip


class Page(HTMLParser):
    """Collects the rows of all tables and the sources of images, links and scripts."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.sources, self.links, self.tags, self.cell = [], [], [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.sources += [value for name, value in attributes if name == "src" or (name == "href" and tag != "a")]
        self.links += [value for name, value in attributes if name == "href" and tag == "a"]
        if tag == "tr":
            self.rows.append([])
        self.cell = "" if tag in ("td", "th") else self.cell

    def handle_data(self, data):
        self.cell = None if self.cell is None else self.cell + data

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.rows[-1].append(self.cell)
            self.cell = None


@pytest.fixture(scope="module")
def one():
    return record("ads version 3", 0.0)


def test_a_report_shows_its_values(one):
    page = Page(text := render_report([one]))
    assert ["NE", f"{one.report.overall.ne:.4f}"] in page.rows
    assert ["NE of the champion at the time", "0.8123"] in page.rows
    assert ["price", "0.0123", "0.0100 to 0.0200", "87.5%", "–", "–", "–", ""] in page.rows
    assert ["train rows", "6,000 of 2 days"] in page.rows
    assert ["seed", "1"] in page.rows
    assert "It may be chance." in text
    assert "1,234 rows/s, 25.0% of the time waiting for data" in text
    assert "config ads, begun 2026-01-02 03:04 UTC, duration 0:05:00, commit abc" in text
    assert page.links == [one.address]
    low, high = one.report.ne_low, one.report.ne_high
    assert low < one.report.overall.ne < high
    assert ["interval of NE", f"{low:.4f} to {high:.4f}"] in page.rows


def test_chosen_settings_come_first_and_the_defaults_are_folded():
    page = Page(text := render_report([record("ads version 3", 0.0, colour="red")]))
    before, folded = text.split("<details>")
    assert "<td>colour</td>" in before
    assert "<td>seed</td>" not in before
    assert "1 settings with their defaults" in folded
    assert ["seed", "1"] in page.rows


def test_it_needs_nothing_from_outside(one):
    page = Page(render_report([one]))
    assert len(page.sources) >= 5
    assert all(source.startswith("data:image/svg+xml;base64,") for source in page.sources)
    assert not {"script", "link", "iframe"} & set(page.tags)
    figures = [base64.b64decode(source.split(",")[1]).decode() for source in page.sources]
    assert all(figure.rstrip().endswith("</svg>") for figure in figures)
    for figure in figures:  # names of vocabularies are not fetched
        assert not re.findall(r'(?:href|src)="http', figure)


def test_values_do_not_become_markup(one):
    page = Page(text := render_report([one]))
    assert "<b>" not in text
    assert any(row[0] == "country = <b>A</b>" for row in page.rows)


@pytest.mark.nightly
def test_two_runs_stand_side_by_side(one):
    other = record("ads version 4", 0.2, colour="red")
    page = Page(text := render_report([one, other]))
    assert ["", "ads version 3", "ads version 4", "difference"] in page.rows
    apart = one.report.overall.ne - other.report.overall.ne
    assert apart < 0
    row = next(row for row in page.rows if row and row[0] == "NE")
    assert row[1:] == [f"{one.report.overall.ne:.4f}", f"{other.report.overall.ne:.4f}", f"{apart:+.4f}"]
    assert f'<td class="number better">{apart:+.4f}</td>' in text
    assert 'class="number worse"' not in text
    assert 'class="number worse"' in render_report([other, one])
    assert ["colour", "–", "red"] in page.rows
    assert not any(row[0] == "seed" for row in page.rows if row)
    together = ("learning_curve", "calibration", "roc", "precision_recall")
    single, alone = len(one.plots), len([name for name in one.plots if name not in together])
    assert len(page.sources) == len(together) + 2 * alone < 2 * single
    assert f"ads version 3 has the lower NE, which is better: by {-apart:.4f} below ads version 4." in text


def test_a_report_of_two_begins_with_what_differs(one):
    """Features that were added, dropped or changed, then settings. What a run does not tell does not differ."""
    same = {"age": "dense, age, fill_null"}
    first = one.model_copy(
        update={"columns": same | {"user": "sparse, user, sigrid_hash size=100", "old": "dense, old"}}
    )
    second = record("ads version 4", 0.2, colour="red").model_copy(
        update={"columns": same | {"user": "sparse, user, sigrid_hash size=900", "new": "dense, new"}}
    )
    text = render_report([first, second])
    rows = [row for row in Page(text).rows if row]
    assert ["user", "sparse, user, sigrid_hash size=100", "sparse, user, sigrid_hash size=900"] in rows
    assert ["old", "dense, old", "–"] in rows
    assert ["new", "–", "dense, new"] in rows
    assert not any(row[0] == "age" for row in rows)
    titles = ["Features, where they differ", "Config, where it differs", "Learning"]
    assert sorted(titles, key=text.index) == titles
    assert titles[0] not in render_report([first, one])
    assert titles[0] not in render_report([first, first.model_copy(update={"title": "again"})])


@pytest.mark.nightly
def test_the_interval_of_a_difference_is_that_of_the_gate(one):
    """The sign is that of the first run less the second, whichever of them was the champion."""
    champion, other = (record(f"ads version {number}", 0.2 * number) for number in (0, 1))
    found = {"ne": 0.05, "low": 0.04, "high": 0.06, "units": 9}
    gate = other.result["gate"] | {"champion": 3, "difference": found}
    champion = champion.model_copy(update={"result": champion.result | {"model": {"version": 3}}})
    other = other.model_copy(update={"result": other.result | {"gate": gate, "model": {"version": 4}}})
    for records, shown in (((other, champion), "+0.0400 to +0.0600"), ((champion, other), "-0.0600 to -0.0400")):
        text = render_report(records)
        assert next(row for row in Page(text).rows if row and row[0] == "interval of NE")[-1] == shown
        assert "ads version 0 has the lower NE, which is better: by" in text
        assert f", difference {shown}." in text


def test_the_markdown_page_shows_the_same_figures(one):
    text = one.render_markdown("http://mlflow/run")
    overall = one.report.overall
    assert text.startswith(f"Hold, NE {overall.ne:.4f} on 2,000 rows: It may be chance.\n\n- evaluation: NE ")
    assert f"- evaluation: NE {overall.ne:.4f}, log loss {overall.logloss:.4f}, AUC {overall.auc:.4f}, calib" in text
    assert "1,234 rows/s, 25.0% of the time waiting for data" in text
    assert "Snapshot `7` of table `ads`; [MLflow run ffffffff](http://mlflow/run)." in text
    [line] = [line for line in text.splitlines() if line.startswith("- country = B: NE ")]
    assert line.endswith(", 50 rows (few)")
    assert "|" not in text  # MLflow's pages show the cells of a table without any space between them


def test_pages_say_which_day_the_verdict_is_about(one):
    """A daily model is evaluated on the test rows of its own day, and judged on all rows of a later one."""
    overall, gate = one.report.overall, {**one.result["gate"], "decision": "promote", "champion_ne": 0.9911}
    own = {"day": "2013-03-08", "champion": 2, "gate": {**one.result["gate"], "pending": True}}
    waiting = one.model_copy(update={"result": {**one.result, **own}})
    text = waiting.render_markdown("http://x")
    assert text.startswith(f"To be judged, NE {overall.ne:.4f} on 2,000 rows: ")
    assert f"- test rows of 2013-03-08: NE {overall.ne:.4f}, " in text
    judged = {"ne": 0.9844, "logloss": 0.5, "auc": 0.61, "calibration": 1.01, "ece": 0.02, "rows": 7520}
    result = {**waiting.result, "gate": gate, "judged_on": "2013-03-09", "judged_eval": judged}
    after = one.model_copy(update={"result": result})
    text = after.render_markdown("http://x")
    assert text.startswith("Promote, NE 0.9844 on 7,520 rows of 2013-03-09: ")
    judged_line = "NE 0.9844, log loss 0.5000, AUC 0.6100, calibration 1.0100, ECE 0.0200, 7,520 rows"
    assert f"- all rows of 2013-03-09: {judged_line}" in text
    rows = {row[0]: row[1:] for row in Page(render_report([after])).rows if row}
    assert rows["judged on all rows of"] == ["2013-03-09"]
    assert (rows["NE"], rows["NE on that day"]) == ([f"{overall.ne:.4f}"], ["0.9844"])
    assert (rows["rows"], rows["rows of that day"]) == (["2,000"], ["7,520"])
    assert rows["NE of the champion on that day"] == ["0.9911"]
    assert "NE of the champion at the time" not in rows
    both = {row[0]: row[1:] for row in Page(render_report([after, one])).rows if row}
    assert both["NE on that day"] == ["0.9844", "–", ""]


def test_a_report_begins_with_what_simple_models_do(one):
    boosting = {"name": "boosting", "ne": 0.5, "auc": 0.9, "logloss": 0.3, "rows": 9, "seconds": 1.0}
    compared = one.model_copy(update={"result": {**one.result, "baselines": [boosting]}})
    first = f"Worse than gradient boosting: NE {one.report.overall.ne:.4f} against 0.5000"
    page = render_report([compared])
    assert page.index(first) < page.index("It may be chance.")
    assert first in compared.render_markdown("http://x")
    assert "gradient boosting" not in render_report([one])
