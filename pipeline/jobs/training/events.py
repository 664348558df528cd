"""Events that ranks report while they train: a record for each kind, and where each one is reported."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PositiveInt, TypeAdapter

from pipeline.data.position import LostRows
from pipeline.jobs.code_version import CodeVersion
from pipeline.jobs.console import Logger, Progress
from pipeline.registration.journal import Journal
from pipeline.training.launch.processes import Event
from pipeline.training.tables.plan import PlanRows
from storage.artifacts import holding

WORSE_VALIDATIONS, WORSE_SHARE = 5, 0.01
"""After so many validations without a better one, an NE that is worse by this share is a warning."""
SHOWN_METRICS = {"train_ne_window": "NE", "valid_ne": "valid NE"}


Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class Summary(BaseModel, frozen=True):
    """What later stages read of a training's result. It has more fields."""

    rows: Count
    steps: Count
    world_size: PositiveInt
    valid_ne: float | None
    best_step: int | None
    device: str
    weights_sha256: str


SummaryValues = Annotated[Mapping[str, Any], holding(Summary)]
"""The result of a training, with at least the fields of `Summary`."""


class Finished(Summary, frozen=True):
    """The ranks have trained to the end."""

    event: Literal["result"]
    lost: tuple[LostRows, ...]


class Started(BaseModel, frozen=True):
    """The ranks have made their tables."""

    event: Literal["start"]
    plan: PlanRows
    device: str
    code: CodeVersion
    """The code that the ranks run. Their server may have imported it before the files on the disk changed."""


class Resumed(BaseModel, frozen=True):
    """The ranks resume from a checkpoint."""

    event: Literal["resumed"]
    step: int
    rows: int
    lost: int
    """Rows that were quarantined up to this step."""


class Grown(BaseModel, frozen=True):
    """The model has more or larger tables than the one it starts from."""

    event: Literal["grown"]
    new: tuple[str, ...]
    larger: tuple[str, ...]


class Damaged(BaseModel, frozen=True):
    """A checkpoint is damaged, and an earlier one is used."""

    event: Literal["damaged"]
    error: str


class Warned(BaseModel, frozen=True):
    """A rank has quarantined rows or lost a worker, or its settings are slow on its processor."""

    event: Literal["warning"]
    text: str


class Restarted(BaseModel, frozen=True):
    """The ranks start again from a checkpoint."""

    event: Literal["restart"]
    reason: str
    step: int | None
    number: int
    limit: int


class ThreadsChosen(BaseModel, frozen=True):
    """From a step on, a rank uses another number of threads, because steps are faster with it."""

    event: Literal["threads"]
    step: Count
    threads: PositiveInt
    milliseconds_before: float
    milliseconds: float


class Awaited(BaseModel, frozen=True):
    """Ranks that someone else has to start."""

    event: Literal["awaited"]
    command: str


class Measured(BaseModel, frozen=True):
    """Metrics of a step."""

    event: Literal["metrics"]
    step: Count
    rows: Count
    metrics: Mapping[str, float | None]


RankEvent = Annotated[
    Started | Resumed | Grown | Damaged | Warned | Restarted | ThreadsChosen | Awaited | Measured | Finished,
    Field(discriminator="event"),
]
READ: TypeAdapter[RankEvent] = TypeAdapter(RankEvent)
KINDS = {"start", "resumed", "grown", "damaged", "warning", "restart", "threads", "awaited", "metrics", "result"}
"""Events reported here. Ranks also emit events for other readers."""


class EventReport:
    """Reports events of the ranks to the log, the journal of metrics and the progress bar.

    Args:
        total: Rows that the training will read.
    """

    def __init__(self, journal: Journal, progress: Progress, total: int, log: Logger) -> None:
        self.journal, self.progress, self.total, self.log = journal, progress, total, log
        self.plan: tuple[Mapping[str, Any], ...] = ()
        self.notes: dict[str, str] = {}
        self.best: tuple[float, int] | None = None
        """Best NE of the validation rows, and its step."""
        self.worse = 0
        """Validations since then."""

    def __call__(self, event: Event) -> None:
        """Reports one event.

        Raises:
            ValidationError: If the event lacks something.
        """
        if event["event"] not in KINDS:
            return
        match READ.validate_python(event):
            case Started(plan=plan, device=device):
                self.plan = plan
                kinds = sorted({row["sharding"] for row in plan})
                self.log.info("%s tables, sharding %s, on %s", len(plan), ", ".join(kinds), device)
            case Resumed(step=step, rows=rows, lost=lost):
                self.log.info("resumed at step %s, %s rows", step, f"{rows:,}")
                if lost:
                    self.log.warning("%s rows were quarantined before this step", f"{lost:,}")
            case Grown(new=new, larger=larger):
                added, grown = ", ".join(new) or "none", ", ".join(larger) or "none"
                self.log.info("the model has new features: new tables %s; tables with more rows %s", added, grown)
            case Damaged(error=error):
                self.log.warning("skipped a damaged checkpoint: %s", error)
            case Warned(text=text):
                self.log.warning("%s", text)
            case Restarted(reason=reason, step=step, number=number, limit=limit):
                self.log.warning("%s; ranks restart from step %s, restart %s of %s", reason, step, number, limit)
            case ThreadsChosen(step=step, threads=threads, milliseconds_before=before, milliseconds=now):
                self.log.info(
                    "from step %s on, a step uses %s thread%s: %.1f ms instead of %.1f ms",
                    step, threads, "s" * (threads > 1), now, before,
                )  # fmt: skip
            case Awaited(command=command):
                self.log.info("waiting for the ranks. Start them on their hosts, for example: %s", command)
            case Measured(step=step, rows=rows, metrics=metrics):
                self.journal.log(step, metrics)
                if (ne := metrics.get("valid_ne")) is not None:
                    self._warn_of_rise(step, ne)
                self._show(rows, metrics)

    def _warn_of_rise(self, step: int, ne: float) -> None:
        """Warns once if the NE of the validation rows keeps being worse than its best."""
        if self.best is None or ne < self.best[0]:
            self.best, self.worse = (ne, step), 0
            return
        self.worse += 1
        if self.worse == WORSE_VALIDATIONS and ne > (1.0 + WORSE_SHARE) * self.best[0]:
            self.log.warning(
                "valid NE is %.4f after %s validations without a better one; the best was %.4f at step %s, and that "
                "model is kept. training.patience ends a training that gets worse", ne, self.worse, *self.best,
            )  # fmt: skip

    def _show(self, rows: int, metrics: Mapping[str, Any]) -> None:
        for key, label in SHOWN_METRICS.items():
            if metrics.get(key) is not None:
                self.notes[label] = f"{metrics[key]:.4f}"
        self.progress("train", rows, self.total, ", ".join(f"{label} {value}" for label, value in self.notes.items()))
