"""Forty days of a log with late, missing, doubled, halved, changed and future files, and kills: the daily loop.

The real ingest reads real files into a real warehouse, and the real daily decisions follow. Only the clock, the
registry's server and the training are simulated: a recorder notes the days that each training and verdict was given.
`Model` says in plain Python what should be in the table, set aside, held back, trained on and judged by.
"""

import datetime
import itertools
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog.sql import SqlCatalog

from pipeline.config import load
from pipeline.data import present
from pipeline.data.day_notes import open_days
from pipeline.errors import DataError
from pipeline.evaluation.gate import Verdict
from pipeline.evaluation.policy import decide
from pipeline.extraction import join
from pipeline.extraction.writing import quarantine_name
from pipeline.jobs.ingest import ingest
from pipeline.jobs.recurring import day as day_job
from pipeline.jobs.recurring import judge, run
from pipeline.jobs.recurring.day import Today, has_champion, make_day_job
from pipeline.jobs.training import job as training_job
from pipeline.jobs.training.job import resolve_dataset
from pipeline.jobs.workspace import Workspace
from pipeline.registration.aliases import CHALLENGER, CHAMPION, find_holder, move_alias
from pipeline.registration.tracking import Tracker
from pipeline.registration.versions import IDENTITY, TRAINED_FROM
from pipeline.transforms.plan.plan import Plan
from tests.simulation.disk import Killed
from tests.simulation.outcome import Outcome, scratch
from tests.simulation.server import Server
from tests.simulation.world import World, require

NAME, DAYS, WINDOW = "ads", 40, datetime.timedelta(hours=2)
FIRST = datetime.date(2025, 3, 1)
BEFORE = 4
"""Days that are there when the loop begins."""
MINIMUM, TRAILING = 3, 7
"""Days that a day is compared with, as the config has them by default."""
KILLED = "the command is killed"
LATE, MISSING, HALF, DOUBLED, AGAIN, FUTURE = (
    "a day comes late", "a day never comes", "half a day comes first", "a file comes twice",
    "some rows come twice", "rows are of the future",
)  # fmt: skip
CHANGED, SHORT, REMOVED, UNLABELLED = (
    "a file gets other rows", "a file loses rows", "a file is removed", "outcomes come late",
)  # fmt: skip
FAULTS = (KILLED, LATE, MISSING, HALF, DOUBLED, AGAIN, FUTURE, CHANGED, SHORT, REMOVED, UNLABELLED)
Day = datetime.date
Moment = datetime.datetime


class Shown(NamedTuple):
    """A row of the feature log."""

    key: int
    at: Moment
    user: int


class Written(NamedTuple):
    """A day as it was last written, or held back."""

    rows: frozenset[tuple[int, int, int]] = frozenset()
    """(key, user, label)."""
    aside: int = 0
    files: int = 0
    outcome_files: int = 0
    is_open: bool = False
    input: Any = None


class Model:
    """What the ingest should do, from the text of the docs. Files are named lists of rows with a version each."""

    def __init__(self, allowed: float, rows: str, future: str) -> None:
        self.allowed, self.rules = allowed, {"rows": rows, "future": future}
        self.shown: dict[str, tuple[int, list[Shown]]] = {}
        self.outcomes: dict[str, tuple[int, list[tuple[int, Moment]]]] = {}
        self.table: dict[Day, Written] = {}
        self.held: dict[Day, Any] = {}

    def read(self, now: Moment) -> dict[Day, Written] | None:
        """Returns the days of the source. None: too many rows of a day are repeated, so that the ingest is refused."""
        rows = sorted(
            (row.at, name, place, row) for name, (_, of) in self.shown.items() for place, row in enumerate(of)
        )
        seen: set[int] = set()
        good: dict[Day, list[Shown]] = {}
        aside: dict[Day, list[tuple[str, int]]] = {}
        files: dict[Day, set[str]] = {}
        for at, name, place, row in rows:
            files.setdefault(at.date(), set()).add(name)
            if row.key in seen:
                aside.setdefault(at.date(), []).append((name, place))
            else:
                good.setdefault(at.date(), []).append(row)
            seen.add(row.key)
        times = [at for _, of in self.outcomes.values() for _, at in of if at <= now]
        happened: dict[int, list[Moment]] = {}
        for key, at in ((key, at) for _, of in self.outcomes.values() for key, at in of):
            happened.setdefault(key, []).append(at)
        found = {}
        for day in sorted(files):
            kept, bad = good.get(day, []), aside.get(day, [])
            if len(bad) > self.allowed * (len(kept) + len(bad)) or not kept:
                return None
            end = max(row.at for row in kept) + WINDOW
            near = {
                name for name, (_, of) in self.outcomes.items()
                if of and max(at for _, at in of) >= kept[0].at and min(at for _, at in of) < end
            }  # fmt: skip
            is_open = not times or end > max(times)
            labels = {
                row.key: int(any(row.at <= at < row.at + WINDOW for at in happened.get(row.key, ()))) for row in kept
            }
            of = [(name, self.shown[name][0]) for name in sorted(files[day])]
            of += [(name, self.outcomes[name][0]) for name in sorted(near)]
            content = frozenset((row.key, row.user, labels[row.key]) for row in kept)
            found[day] = Written(content, len(bad), len(files[day]), len(near), is_open, (of, sorted(bad), is_open))
        return found

    def ingest(self, now: Moment) -> bool:
        """Ingests. Returns whether it is refused."""
        found = self.read(now)
        if found is None:
            return False
        due = {
            day: one for day, one in found.items()
            if one.input not in (self.held.get(day), self.table.get(day, Written()).input)
        }  # fmt: skip
        sizes = {day: len(one.rows) for day, one in self.table.items() if day not in due}
        before = dict(self.table)
        for day, one in due.items():
            past = [sizes[other] for other in sorted(sizes) if other < day][-TRAILING:]
            if self.is_broken(day, one, before.get(day), past, now):
                self.held[day] = one.input
                if day in before:
                    sizes[day] = len(before[day].rows)
            else:
                self.table[day] = one
                sizes[day] = len(one.rows)
        self.held = {day: of for day, of in self.held.items() if day in found and of == found[day].input}
        return True

    def is_broken(self, day: Day, one: Written, before: Written | None, past: list[int], now: Moment) -> bool:
        """Whether a day is to be held back."""
        labels = sum(label for *_, label in one.rows)
        if self.rules["future"] == "quarantine" and day > now.date() + datetime.timedelta(days=1):
            return True
        if self.rules["rows"] == "quarantine" and len(past) >= MINIMUM:
            middle = statistics.median(past)
            scatter = 1.4826 * statistics.median(abs(size - middle) for size in past)
            if abs(len(one.rows) - middle) > max(0.5 * middle, 4.0 * scatter, 4.0 * middle**0.5):
                return True
        mixed = before is not None and 0 < sum(label for *_, label in before.rows) < len(before.rows)
        if not mixed and labels in (0, len(one.rows)) and not one.is_open and len(one.rows) >= 20:
            return True
        return before is not None and (
            one.files < before.files
            or one.outcome_files < before.outcome_files
            or len(one.rows) + one.aside < len(before.rows)
            or labels + one.aside < sum(label for *_, label in before.rows)
        )


class Run:
    """A log, its daily command, and the model of what that should do."""

    def __init__(self, seed: int, root: Path) -> None:
        draw = self.draw = random.Random(seed)
        self.world = World(draw.randrange(2**60), {KILLED: (draw.choice([0, 2, 6]), 0.02)})
        self.chances = {kind: draw.choice([0.0, 0.05, 0.15]) for kind in FAULTS if kind != KILLED}
        self.root, self.now = root, Moment.combine(FIRST, datetime.time(6)) + datetime.timedelta(days=BEFORE)
        self.keys, self.versions, self.commands = itertools.count(1), itertools.count(1), 0
        self.later: list[tuple[Moment, Callable[[], None]]] = []
        rules = {"rows": draw.choice(["warn", "quarantine"]), "future": draw.choice(["quarantine", "warn"])}
        self.model = Model(draw.choice([0.1, 0.6]), **rules)
        self.hours = draw.choice([None, 3.0, 30.0])
        self.config = {
            "name": NAME, "home": str(root / "home"), "model": {"interaction": "cat"},
            "source": {
                "path": f"{root}/shown/*.parquet", "day_column": "event_time",
                "outcomes": {"path": f"{root}/outcomes/*.parquet", "window_seconds": int(WINDOW.total_seconds())},
            },
            "features": {"sparse": [{"columns": ["user"], "transforms": [{"kind": "sigrid_hash", "size": 16}]}]},
            "split": {"hash": {"key": "user", "shares": {"train": 0.8, "test": 0.2}}},
            "ingest": {"max_quarantined_share": self.model.allowed, "checks": rules | {"one_label": "quarantine"}},
            "recurring": {"closed_after_hours": self.hours},
        }  # fmt: skip
        quiet = SimpleNamespace(strike=self.strike, after=self.strike, quiet=False, root=root)
        self.server = Server(self.world, quiet, self.now.timestamp, lambda alias, version: None)  # type: ignore[arg-type]
        self.server._create_registered_model(NAME)
        self.learned: dict[int, dict[Day, Any]] = {}
        """Version -> day -> what it was written from when it learned it, by the model. Written again counts as changed."""
        self.contents: dict[int, dict[str, str]] = {}
        """Version -> day -> content that it has learned, as its record has it."""
        self.plan: Plan | None = None
        self.idle: dict[str, str] = {}
        self.worked: Counter[Day] = Counter()
        self.judged: dict[int, Day] = {}
        self.seen: set[Any] = set()
        self.read: dict[str, Counter[tuple[int, ...]]] = {}
        """Name of a day's files -> its rows."""
        self.trained = 0

    # -- the log ------------------------------------------------------------------------------------------------------

    def put(self, name: str, rows: list[Shown]) -> None:
        """Writes a file of the feature log, or replaces it."""
        self.model.shown[name] = (next(self.versions), rows)
        columns = {"impression_id": [row.key for row in rows], "event_time": [row.at for row in rows]}
        table = pa.table(columns | {"user": pa.array([row.user for row in rows], pa.int64())})
        write(table, self.root / "shown" / f"{name}.parquet")

    def put_outcomes(self, name: str, rows: list[tuple[int, Moment]]) -> None:
        """Writes a file of the outcome log."""
        self.model.outcomes[name] = (next(self.versions), rows)
        table = pa.table({"impression_id": [key for key, _ in rows], "outcome_time": [at for _, at in rows]})
        write(table, self.root / "outcomes" / f"{name}.parquet")

    def drop(self, name: str) -> None:
        del self.model.shown[name]
        (self.root / "shown" / f"{name}.parquet").unlink()

    def happens(self, kind: str) -> bool:
        if self.draw.random() >= self.chances[kind]:
            return False
        self.world.struck[kind] += 1
        self.world.note(kind)
        return True

    def deliver(self, day: Day) -> None:
        """A day's files come, in one way or another. Earlier files may change."""
        draw, name = self.draw, f"{day}"
        start = Moment.combine(day, datetime.time())
        rows = [
            Shown(next(self.keys), start + datetime.timedelta(minutes=draw.randrange(20 * 60)), draw.randrange(50))
            for _ in range(draw.randint(70, 90))
        ]
        clicks = [row for row in rows if draw.random() < 0.5]
        outcomes = [(row.key, row.at + datetime.timedelta(minutes=draw.randrange(180))) for row in clicks]
        outcomes.append((rows[0].key, start + datetime.timedelta(hours=23, minutes=30)))  # too late, and closes the day
        ordinary = day < FIRST + datetime.timedelta(days=BEFORE)
        if self.happens(FUTURE):
            ahead = datetime.timedelta(days=draw.choice([3, 400, 2_000]))
            rows += [Shown(next(self.keys), start + ahead, 1) for _ in range(draw.randint(1, 3))]
        if not ordinary and self.happens(AGAIN):
            _, earlier = self.model.shown[draw.choice(sorted(self.model.shown))]
            rows += draw.sample(earlier, min(5, len(earlier)))
        comes = self.now
        if not ordinary and self.happens(MISSING):
            return
        if not ordinary and self.happens(LATE):
            comes += datetime.timedelta(days=draw.randint(1, 4))
        labelled = (
            comes + datetime.timedelta(days=draw.randint(1, 3)) if not ordinary and self.happens(UNLABELLED) else comes
        )
        self.later.append((labelled, lambda: self.put_outcomes(name, outcomes)))
        if not ordinary and self.happens(HALF):
            self.later.append((comes, lambda: self.put(name, rows[: len(rows) // 2])))
            whole = draw.random() < 0.5
            second = (
                (lambda: self.put(name, rows)) if whole else (lambda: self.put(f"{name}-2", rows[len(rows) // 2 :]))
            )
            self.later.append((comes + datetime.timedelta(days=draw.randint(1, 2)), second))
        else:
            self.later.append((comes, lambda: self.put(name, rows)))
        if ordinary:
            return
        known = sorted(self.model.shown)
        other = draw.choice(known)
        version, old = self.model.shown[other]
        if self.happens(DOUBLED):
            self.put(f"{other}-copy{version}", old)
        if self.happens(CHANGED):
            self.put(other, [row._replace(user=draw.randrange(50)) for row in old])
        if self.happens(SHORT):
            self.put(other, old[: 2 * len(old) // 3])
        if self.happens(REMOVED) and len(known) > 3:
            self.drop(draw.choice(known[: len(known) // 2]))

    # -- the daily command --------------------------------------------------------------------------------------------

    def strike(self, *_: Any) -> None:
        """The process may die here."""
        if self.world.strikes(KILLED):
            raise Killed

    def workspace(self) -> Workspace:
        """Returns a new process's workspace."""
        space = Workspace(load(self.config))
        tracker = object.__new__(Tracker)
        tracker.client, tracker.uri = self.server, "http://sim"  # type: ignore[assignment]
        tracker.experiment, tracker.experiment_id = NAME, "1"
        stands: Any = tracker
        stands.find_finished = lambda tags: self.idle.get(tags.get("identity"))
        stands.load_result = lambda run_id: {"day": "", "model": {}, "train": {"steps": 1}}
        stands.log_json = lambda *_: None
        space.tracking = tracker
        return space

    def command(self) -> None:
        """What `flows.recurring` does."""
        space = self.workspace()
        new = not has_champion(space)
        result = ingest.ingest_days(space, None, False)
        if new:
            self.register(space, None, resolve_dataset(space, None)[1]["train"].selection.days)
        self.compare(space, result)
        run.train_new_days(space, False, False)

    def morning(self) -> None:
        """Repeats the command until it succeeds. What the ingest refuses is taken out of the log."""
        for _ in range(60):
            self.commands += 1
            refused = not self.model.ingest(self.now)
            try:
                self.command()
            except Killed:
                continue
            except DataError as error:
                require(refused and "at most" in f"{error}", f"{self.now:%m-%d}: {error}")
                copies = [name for name in self.model.shown if "copy" in name]
                self.drop(copies[-1] if copies else max(self.model.shown, key=lambda name: self.model.shown[name][0]))
                continue
            require(not refused, f"{self.now:%m-%d}: rows that are repeated too often pass")
            return
        require(False, "the command never comes to its end")

    def play(self) -> None:
        """Delivers and works day by day. The last days are quiet, so that all work is done."""
        for number in range(BEFORE):
            self.deliver(FIRST + datetime.timedelta(days=number))
        for number in range(BEFORE, BEFORE + DAYS):
            self.deliver(FIRST + datetime.timedelta(days=number - 1))
            due = [one for one in self.later if one[0] <= self.now]
            self.later = [one for one in self.later if one[0] > self.now]
            for _, put in due:
                put()
            self.morning()
            self.finish_day()
            self.now += datetime.timedelta(days=1)

    # -- what stands for the trainer ----------------------------------------------------------------------------------

    def register(self, space: Workspace, today: Today | None, days: tuple[Day, ...], scratch: bool = True) -> int:
        """Registers a model that has learned days, and notes it."""
        self.trained += 1
        contents = space.warehouse.day_contents(space.warehouse.current(NAME))
        begun = [day for day in days if day <= self.now.date()]
        require(begun == sorted(days), f"{self.now:%m-%d}: days that have not begun are trained on: {days}")
        early = {day for day in days if self.model.table[day].is_open} if today is None else self.open() & set(days)
        require(not early, f"{self.now:%m-%d}: open days are trained on: {sorted(early)}")
        base = None if today is None or scratch else today.champion.version
        tags = {"trained_to": f"{max(days)}", "scratch_day": f"{max(days)}", "run_folder": f"{self.trained}"}
        tags |= {IDENTITY: "first" if today is None else today.identity, TRAINED_FROM: f"{base or 'scratch'}"}
        tags |= {} if today is None else {"day": f"{today.day}"}
        number = 1 + len(self.server.versions)
        self.learned[number] = (dict(self.learned[base]) if base else {}) | {
            day: self.model.table[day].input for day in days
        }
        self.contents[number] = (dict(self.contents[base]) if base else {}) | {f"{day}": contents[day] for day in days}
        run_id = self.server._create_run("1", "run", {}).info.run_id
        self.server._create_model_version(NAME, "", run_id, tags, "m")
        move_alias(space.tracking, NAME, CHAMPION if today is None else CHALLENGER, number, "gate", "made")
        return number

    def prepare(self, space: Workspace, today: Today, verdict: Any, reference: int, scratch: bool, folder: Path) -> Any:
        """Asks the policy, and pins the training that it asks for."""
        decision = decide(space.config.recurring, today.make_standing(0.9, 1.0), today.day)
        self.plan = self.plan or resolve_dataset(space, None)[1]["train"].plan
        return {}, decision, make_day_job(space, today, decision, self.plan, {})

    def finish(self, space: Workspace, today: Today, qualities: Any, training: str, job: Any) -> dict[str, Any]:
        """Compares the days that the training is given with those that it should have, and registers the model."""
        given = job.data["train"].selection.days
        base = self.learned[today.champion.version]
        closed = {day: one.input for day, one in self.model.table.items() if day not in self.open()}
        wanted = [day for day, of in closed.items() if min(base) <= day <= today.day and base.get(day) != of]
        if training == "scratch":
            wanted = [day for day in closed if day <= today.day]
        text = f"{self.now:%m-%d}: the day {today.day} trains on {list(map(str, given))}, and should on {list(map(str, sorted(wanted)))}"
        require(training != "none" and sorted(wanted) == list(given), text)
        self.worked[today.day] += 1
        number = self.register(space, today, given, training == "scratch")
        return {"status": "ok", "day": f"{today.day}", "model": {"version": number}}

    def judge(self, space: Workspace, today: Today, challenger: int, folder: Path) -> judge.DayVerdict:
        """Decides by chance, and checks that nobody has seen the day, and that all of it is there."""
        for version in (challenger, today.champion.version):
            require(
                today.day > max(self.learned[version]), f"version {version} is judged by {today.day}, and has seen it"
            )
        require(today.day not in self.open(), f"{today.day} judges, and is open")
        require(today.rows == len(self.model.table[today.day].rows), f"{today.day} judges with {today.rows} rows")
        self.judged.setdefault(challenger, today.day)
        gate = Verdict(decision=self.draw.choice(["promote", "hold", "reject"]), reason="by chance", champion=None)
        work = judge._name_work(space, today, challenger, today.champion.version)
        champion = today.champion.version
        return judge.DayVerdict(
            day=today.day, challenger=challenger, champion=champion, gate=gate, quality={}, work=work
        )

    # -- what must hold -----------------------------------------------------------------------------------------------

    def open(self) -> set[Day]:
        """Days that may still get rows or labels."""
        begun = max(day for day in self.model.table if day <= self.now.date())
        late = self.now - datetime.timedelta(days=1, hours=self.hours or 0.0)
        return {
            day for day, one in self.model.table.items()
            if one.is_open or (day >= begun if self.hours is None else Moment.combine(day, datetime.time()) > late)
        }  # fmt: skip

    def compare(self, space: Workspace, result: Mapping[str, Any]) -> None:
        """The table, the quarantine, and the held and open days are as the model has them."""
        house, model, when = space.warehouse, self.model, f"{self.now:%m-%d}"
        reader = house.reader(house.current(NAME), ["impression_id", "user", "label"])
        found: dict[Day, Counter[tuple[int, ...]]] = {}
        for day, files in house.day_names(house.current(NAME)).items():
            if files not in self.read:
                parts = [reader.read(one).to_pydict() for one in reader.fragments([day])]
                self.read[files] = Counter(
                    tuple(map(int, row)) for one in parts for row in zip(*one.values(), strict=True)
                )
            found[day] = self.read[files]
        for day in found.keys() | model.table.keys():
            expected = Counter(model.table[day].rows) if day in model.table else Counter()
            got = found.get(day, Counter())
            text = f"{when}: {day} has {got.total()} rows and should have {expected.total()}, {(got - expected).total()} are others"
            require(got == expected, text)
        require(
            set(result["held"]) == {f"{day}" for day in model.held},
            f"{when}: held {result['held']}, not {sorted(model.held)}",
        )
        there = {day for day, one in model.table.items() if one.is_open}
        known = open_days(house, house.current(NAME))
        require(known == there, f"{when}: open {sorted(known)}, not {sorted(there)}")
        aside = {day: one.aside for day, one in model.table.items() if one.aside and day not in model.held}
        name = quarantine_name(NAME)
        rows = house.day_rows(house.current(name)) if house.has_table(name) else {}
        got_aside = {
            day: count for day, count in rows.items() if count and day in model.table and day not in model.held
        }
        require(got_aside == aside, f"{when}: set aside {got_aside}, not {aside}")
        self.seen.add((len(model.held), len(there), sum(aside.values()) > 0))

    def finish_day(self) -> None:
        """Every closed day before the first open one had its work once, but those of too few rows."""
        champion = find_holder(self.workspace_quiet(), NAME)
        assert champion is not None
        to = Moment.fromisoformat(self.server.versions[NAME, str(champion)].tags["trained_to"]).date()
        new = sorted(day for day in self.model.table if day > to)
        closed = list(itertools.takewhile(lambda day: day not in self.open(), new))
        for day in closed:
            few = len(self.model.table[day].rows) < 40  # may have no row to test on
            require(
                self.worked[day] == 1 or (few and not self.worked[day]),
                f"{self.now:%m-%d}: the work of {day} was done {self.worked[day]} times",
            )

    def workspace_quiet(self) -> Any:
        """Returns a tracker on which nothing dies."""
        calls = {
            name: getattr(self.server, f"_{name}") for name in ("get_registered_model", "get_model_version_by_alias")
        }
        return SimpleNamespace(client=SimpleNamespace(**calls))


def write(table: pa.Table, path: Path) -> None:
    """Writes a file as a careful tool does: it appears as a whole."""
    path.parent.mkdir(exist_ok=True)
    pq.write_table(table, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


@contextmanager
def simulated(play: Run) -> Iterator[None]:
    """The daily code meets the run's clock, recorder and kills in this block."""

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> "Clock":
            moment = play.now.replace(tzinfo=datetime.UTC)
            return cls.combine(moment.date(), moment.timetz()) if tz else cls.combine(moment.date(), moment.time())

    clock = SimpleNamespace(**{**vars(datetime), "datetime": Clock})
    commit_table = SqlCatalog.commit_table

    def commit(catalog: SqlCatalog, *args: Any) -> Any:
        play.strike()
        found = commit_table(catalog, *args)
        play.strike()
        return found

    def record(tracker: Any, name: str, version: int) -> Any:
        return SimpleNamespace(days=MappingProxyType(play.contents[version]), trained_on=())

    def load_result(space: Any, today: Today, *_: Any) -> dict[str, Any]:
        return {"status": "skipped", "day": f"{today.day}", "model": {}}

    with ExitStack() as stack:
        for owner, name, own in (
            (SqlCatalog, "commit_table", commit), (present, "datetime", clock), (join, "datetime", clock),
            (day_job, "datetime", clock), (day_job, "find_record", record), (day_job, "find_start", lambda *_: None),
            (run, "prepare_day", play.prepare), (run, "_train_or_keep", play.finish), (run, "load_result", load_result),
            (judge, "_judge", play.judge), (judge, "log_verdict", lambda *_: None), (judge, "write_pages", lambda *_: None),
            (ingest, "show_checks", lambda *_: None), (training_job, "_say_keyless", lambda *_: None),
        ):  # fmt: skip
            stack.enter_context(patch.object(owner, name, own))
        yield


def play(seed: int) -> Outcome:
    """Runs the schedule of a seed.

    Raises:
        BrokenPromise: If something happens that must never happen. Its note holds the trace.
    """
    with scratch() as root:
        found = Run(seed, root)
        try:
            with simulated(found):
                found.play()
        except BaseException as error:
            error.add_note("\n".join(["", *found.world.trace]))
            raise
    sums = Counter({"commands": found.commands, "trainings": found.trained, "verdicts": len(found.judged)})
    return Outcome(found.world.struck, found.seen, sums, found.world.trace)
