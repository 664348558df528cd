"""The record of a finished run. It renders as markdown here, and as HTML in `html.py`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from pipeline.evaluation.baselines import Baseline, describe_comparison
from pipeline.evaluation.evaluate import EvalReport, Slice
from pipeline.evaluation.metrics import format_interval, format_metric

METRICS = {
    "ne": "NE",
    "ne_recalibrated": "NE, recalibrated",
    "logloss": "log loss",
    "auc": "AUC",
    "pr_auc": "PR-AUC",
    "calibration": "calibration",
    "ece": "ECE",
    "label_rate": "label rate",
}
IN_MARKDOWN = ("ne", "logloss", "auc", "calibration", "ece")
"""Metrics of the markdown page."""

PLOTS = {
    "learning_curve": "Learning curve: NE falls while the model learns",
    "stall_timeline": "Waiting for batches: red is time without training",
    "calibration": "Calibration: on the dotted line, predictions are right",
    "roc": "ROC: the nearer to the upper left, the better",
    "precision_recall": "Precision and recall: the nearer to the upper right, the better",
    "slices": "NE by slice: right of the red line, it is worse than on all rows",
    "importance": "Feature importance: NE lost without the feature",
    "placement": "Tables by rank: columns of one height share the work well",
}
"""Name of a run's plot -> title, which says what to see. A plot without anything to show is missing."""
FLOOR = "NE floor"
"""What pages call the NE of the true probabilities."""
LONGEST_NUMBER = 8
"""Digits of a slice value that are shown in full. Longer ones are ids, which nobody reads."""
Curve = Sequence[tuple[int, float]]


class FeatureImportance(BaseModel, frozen=True):
    """One feature on a sample of the evaluation rows."""

    name: str
    kind: str
    """dense or sparse."""
    ne_loss: float | None
    """Rise of NE when the feature's values are permuted among the rows of a batch."""
    low: float | None
    high: float | None
    coverage: float
    """Share of rows that have a value."""
    mean_length: float | None
    """Ids per row, including rows without any. None: a dense feature."""
    truncated: float | None
    """Share of ids that the transforms drop."""
    collisions: float | None
    """1 - used rows of the table / distinct ids, in the sample. None: not hashed."""
    droppable: bool
    """Whether even the upper bound of its NE loss is too small to matter."""


class RunRecord(BaseModel, frozen=True):
    """The facts of a finished run that its pages show."""

    title: str
    result: Mapping[str, Any]
    """The run's result line."""
    report: EvalReport
    features: tuple[FeatureImportance, ...]
    plots: Mapping[str, str]
    """Name of a plot -> SVG."""
    parameters: Mapping[str, str]
    data: Mapping[str, str]
    """Description of the training data."""
    curves: Mapping[str, Curve] = {}
    """Name of a metric -> its points. Empty: not loaded."""
    columns: Mapping[str, str] = {}
    """Feature -> how it is made of the table's columns. Empty: unknown."""
    chosen: tuple[str, ...] | None = None
    """Parameters that differ from their defaults. None: unknown."""
    about: Mapping[str, str] = {}
    """What else a reader asks first, such as the date."""
    address: str = ""
    """Where a browser finds the MLflow run."""

    @property
    def comparison(self) -> str | None:
        """One sentence on whether the model beats the baselines. None: there are none."""
        baselines = [Baseline.model_validate(one) for one in self.result.get("baselines", [])]
        return describe_comparison(self.report.overall, baselines)

    @property
    def effort(self) -> str:
        """One sentence on what the training took."""
        train = self.result["train"]
        return (
            f"Trained on {train['rows']:,} rows in {train['steps']:,} steps on {train['world_size']} ranks, "
            f"{train['rows_per_second']:,.0f} rows/s, {train['stall_fraction']:.1%} of the time waiting for data."
        )

    def render_markdown(self, address: str) -> str:
        """Renders quality, decision, speed and slices. As lists: MLflow's pages show tables without any space.

        Args:
            address: Where a browser finds the MLflow run.
        """
        overall, gate, floor = self.report.overall, self.result["gate"], self.report.ne_floor
        first = [self.comparison] if self.comparison else []
        rows = [_list_metrics(self._name_rows(), overall.model_dump())]
        rows += [] if floor is None else [f"- {FLOOR}: {format_metric(floor)}"]
        if (judged := self.result.get("judged_eval")) is not None:
            rows.insert(0, _list_metrics(f"all rows of {self.result['judged_on']}", judged))
            scored = f"{gate['decision'].capitalize()}, NE {format_metric(judged['ne'])} on {judged['rows']:,} rows"
            scored += f" of {self.result['judged_on']}"
        else:
            word = "To be judged" if gate.get("pending") else gate["decision"].capitalize()
            scored = f"{word}, NE {format_metric(overall.ne)} on {overall.rows:,} rows"
        blocks = [
            *first,
            f"{scored}: {gate['reason']}",
            "\n".join(rows),
            self.effort,
            f"Snapshot `{self.result['snapshot_id']}` of table `{self.data['table']}`; "
            f"[MLflow run {self.result['mlflow_run_id'][:8]}]({address}).",
        ]
        if day := self._render_day():
            blocks.append(day)
        if self.report.slices:
            blocks.append("\n".join(map(_list_slice, self.report.slices)))
        return "\n\n".join(blocks)

    def _name_rows(self) -> str:
        """Names the rows of the report."""
        day = self.result.get("day")
        return "evaluation" if day is None else f"test rows of {day}"

    def _render_day(self) -> str | None:
        """Renders the quality of the versions that scored the whole day. None: the run is not of a day."""
        if (day := self.result.get("day")) is None:
            return None
        judged, reference = self.result.get("judged") or {}, self.result.get("reference") or {}
        scored = {
            f"champion, version {self.result['champion']}": self.result.get("champion_eval"),
            f"challenger, version {judged.get('version')}": judged.get("eval"),
            f"reference, version {reference.get('version')}": reference.get("eval"),
        }
        rows = [_list_metrics(name, values) for name, values in scored.items() if values is not None]
        return "\n".join([f"On all rows of {day}:", "", *rows])


def _list_metrics(name: str, values: Mapping[str, Any]) -> str:
    """Returns metrics by name, and their rows, as an item of a list."""
    metrics = ", ".join(f"{METRICS[key]} {format_metric(values[key])}" for key in IN_MARKDOWN)
    return f"- {name}: {metrics}, {values['rows']:,} rows"


def _list_slice(part: Slice) -> str:
    """Returns a slice as an item of a list."""
    cells = slice_cells(part)
    rows = f"{cells['rows']} rows{' (few)' if part.small else ''}"
    ne = f"NE {cells['NE']} ({cells['interval']})"
    return f"- {cells['slice']}: {ne}, label rate {cells['label rate']}, calibration {cells['calibration']}, {rows}"


def name_slice(part: Slice) -> str:
    """Returns a slice's name. Of long ids it has the last digits alone.

    Example:
        >>> from types import SimpleNamespace
        >>> name_slice(SimpleNamespace(column="device", value="5939125632530599147"))
        'device = id ...599147'
    """
    long = part.value.lstrip("-").isdecimal() and len(part.value) > LONGEST_NUMBER
    return f"{part.column} = {f'id ...{part.value[-6:]}' if long else part.value}"


def slice_cells(part: Slice) -> dict[str, str]:
    """Returns column -> cell of a slice in a table of slices."""
    quality = part.quality
    return {
        "slice": name_slice(part),
        "rows": f"{quality.rows:,}",
        "label rate": format_metric(quality.label_rate),
        "NE": format_metric(quality.ne),
        "interval": format_interval(part.ne_low, part.ne_high),
        "AUC": format_metric(quality.auc),
        "calibration": format_metric(quality.calibration),
    }


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Renders a table in markdown. No cell may hold a `|` that is not escaped.

    Example:
        >>> print(markdown_table(["trial", "NE"], [["1", "0.8765"]]))
        | trial | NE |
        |---|---|
        | 1 | 0.8765 |
    """
    first, *others = (f"| {' | '.join(cells)} |" for cells in (header, *rows))
    return "\n".join([first, "|---" * len(header) + "|", *others])


def describe_numbers(values: Mapping[str, Any]) -> str:
    """Describes metrics by name in one line."""
    line = f"NE {format_metric(values['ne'])}, AUC {format_metric(values['auc'])}"
    return f"{line}, calibration {format_metric(values['calibration'])}, {values['rows']:,} rows"


def describe_quality(report: EvalReport) -> str:
    """Describes the quality in one line, with the floor where it is known."""
    overall = report.overall
    line = describe_numbers(overall.model_dump())
    if report.learned_share is not None:
        line += f"; {FLOOR} {format_metric(report.ne_floor)}, {report.learned_share:.1%} of what can be learned"
    undefined = "; ".join(f"{name} undefined: {reason}" for name, reason in overall.undefined.items())
    return f"{line}; {undefined}" if undefined else line
