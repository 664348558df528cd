"""Registrations under faults: a training is registered once, and an alias names a whole version.

The real code opens runs, registers, publishes, promotes, rolls back and removes old versions. Its folders are on the
simulated disk, and its registry is behind a simulated network. Training and evaluation are left out.
"""

import datetime
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import mlflow
import numpy as np
import pyarrow as pa
from mlflow.exceptions import MlflowException

from pipeline.config.retention import RetentionConfig
from pipeline.errors import ContractError, RegistryError, TrackingError
from pipeline.evaluation.evaluate import EvalReport
from pipeline.evaluation.gate import Verdict
from pipeline.evaluation.metrics import Quality
from pipeline.inference.files import PACKED
from pipeline.jobs.console import Console
from pipeline.jobs.training import finish, job
from pipeline.jobs.training.evaluate import EvaluationResult
from pipeline.jobs.training.job import REGISTERED, TrainingJob
from pipeline.jobs.training.train import TrainingResult
from pipeline.jobs.upkeep import clean
from pipeline.jobs.workspace import Workspace
from pipeline.registration import aliases, register, retention, tracking
from pipeline.registration.aliases import CHAMPION, ROLLBACKS, find_holder, move_alias, rollback
from pipeline.registration.tracking import Tracker, is_unreachable
from pipeline.registration.versions import IDENTITY, find_versions, is_intact
from storage.artifacts import atomic_file, write_text
from tests.simulation import disk, server
from tests.simulation.disk import Disk
from tests.simulation.outcome import Outcome, scratch
from tests.simulation.server import Server, Store
from tests.simulation.tables import Clock
from tests.simulation.world import World, require

JUMP, OTHER = "the clock jumps", "somebody else promotes"
FAULTS = (*disk.FAULTS, *server.FAULTS, JUMP, OTHER)
MODEL = "ads"
KEPT = 2
"""Newest versions that retention keeps."""
BLANK = Quality(**dict.fromkeys(Quality.model_fields) | {"rows": 1, "undefined": {}})


class Run:
    """Trainings of one model, and what people do with its versions."""

    def __init__(self, seed: int, root: Path) -> None:
        draw = self.draw = random.Random(seed)
        faults = {kind: (draw.choice([0, 1, 2]), draw.choice([0.003, 0.01, 0.05])) for kind in disk.FAULTS}
        faults |= {kind: (draw.choice([0, 1, 3]), draw.choice([0.01, 0.05])) for kind in server.FAULTS}
        faults |= {JUMP: (draw.choice([0, 2, 4]), 0.4), OTHER: (draw.choice([0, 1, 2]), 0.1)}
        self.world = World(draw.randrange(2**60), faults)
        self.clock, self.disk = Clock(self.world), Disk(self.world, root / "disk")
        self.server = Server(self.world, self.disk, lambda: self.clock.now().timestamp(), self.note_move)
        self.champions: list[int] = []
        """The champion and those before it that no rollback has taken back, by the moves that took effect."""
        self.rolling = False
        self.commands = 0
        self.trainings: list[str] = []
        self.states: set[Any] = set()

    def note_move(self, alias: str, version: int) -> None:
        """Notes the moves of the champion's alias."""
        self.world.note(f"{alias} is version {version}{' by a rollback' if self.rolling else ''}")
        if alias == CHAMPION and self.rolling:
            self.champions.pop()
            require(self.champions[-1:] == [version], f"the champions were {self.champions}, and {version} is it again")
        elif alias == CHAMPION:
            self.champions.append(version)

    # -- commands -----------------------------------------------------------------------------------------------------

    def tracker(self) -> Tracker:
        """Returns a new process's tracker."""
        found = object.__new__(Tracker)
        found.client, found.uri = self.server, "http://sim"  # type: ignore[assignment]
        found.experiment, found.experiment_id = MODEL, "1"
        return found

    def workspace(self) -> Any:
        """Returns a new process's workspace."""
        keep = RetentionConfig(versions_days=5.0, versions_kept=KEPT)
        console = Console()
        space = SimpleNamespace(home=self.disk.root, console=console, tracking=self.tracker(), warehouse=None)
        space.config = SimpleNamespace(
            model_name=MODEL, name=MODEL, retention=keep, seed=1, evaluation=SimpleNamespace(),
            registration=SimpleNamespace(weights="fp32"), training=SimpleNamespace(vector_communication="fp32"),
        )  # fmt: skip
        space.best_effort = lambda what: Workspace.best_effort(space, what)
        space.stored = lambda folder: None
        space.fetch_note = lambda path: Workspace.fetch_note(space, path)
        space.share_note = lambda path: Workspace.share_note(space, path)
        return space

    def train(self, identity: str) -> None:
        """`train_version` without training: looks for the version, else opens the run and finishes it."""
        space = self.workspace()
        found = find_versions(space.tracking, MODEL, identity)
        if any(is_intact(space.tracking, MODEL, *one) for one in found):
            return
        folder = Workspace.unfinished_folder(space, "runs", f"{MODEL}-{identity}", REGISTERED)
        data: Any = {"test": None}
        work = TrainingJob.model_construct(  # type: ignore[call-arg]
            identity=identity, folder=str(folder), snapshot=SimpleNamespace(snapshot_id=1), data=data,
            tags={}, notes={}, done=None, start=None, earlier=(),
        )  # fmt: skip
        with job.open_run(folder, space, identity, {}, {IDENTITY: identity}, "Again.") as (run_id, _):
            trained = TrainingResult(
                weights="", probe=(0.5,), summary=SUMMARY | {"weights_sha256": identity}, placement=()
            )
            finish.finish(space, work, trained, run_id)

    def evaluate(self, space: Any, work: TrainingJob, trained: TrainingResult) -> EvaluationResult:
        """Asks a gate that knows the champion and decides by chance."""
        champion = find_holder(space.tracking, MODEL)
        decision = self.draw.choice(["promote", "promote", "hold", "reject"])
        verdict = Verdict(decision=decision, reason="by chance", champion=champion)
        report = EvalReport(
            overall=BLANK, slices=(), calibration=(), roc=(), precision_recall=(), ne_floor=None, ne_exact=None,
            grouped=None,
        )  # fmt: skip
        return EvaluationResult(report=report, gate=verdict, weights_sha256=trained.summary["weights_sha256"])

    def pack(self, space: Any, work: TrainingJob, *_: Any) -> tuple[Path, list[float], float]:
        """Writes the files of a packed model."""
        weights = Path(work.folder) / "weights.safetensors"
        write_text(weights, f"weights of {work.identity}")
        plan: Any = SimpleNamespace(model_dump_json=lambda indent: "{}", columns=("x",), raw={"x": ("dense",)})
        model: Any = SimpleNamespace(model_dump=lambda mode: {})
        schema = pa.schema([("x", pa.float64())])
        folder = register.pack(Path(work.folder) / "model", weights, plan, model, schema)
        return folder, [0.5], 1e-6

    def save(self, files: Path, folder: Path, *_: Any) -> Any:
        """Writes the files that are sent to the store."""
        (files / PACKED).mkdir(parents=True)
        for path in folder.iterdir():
            shutil.copyfile(path, files / PACKED / path.name)
        return SimpleNamespace(save=lambda path: None)

    def new_training(self) -> None:
        """A scheduled training, repeated until it is done."""
        identity = f"{len(self.trainings):012x}"
        self.trainings.append(identity)
        self.repeat(f"train {identity}", lambda: self.train(identity))
        with self.disk.calm():
            found = find_versions(self.tracker(), MODEL, identity)
            require(len(found) == 1, f"training {identity} has the versions {found}")
            require(is_intact(self.tracker(), MODEL, *found[0]), f"version {found[0]} is not whole")

    def old_training(self) -> None:
        """The command of a done training, again."""
        if self.trainings:
            identity = self.draw.choice(self.trainings)
            with self.disk.calm():
                known = find_versions(self.tracker(), MODEL, identity)
            before = len(self.server.versions)
            self.repeat(f"train {identity} again", lambda: self.train(identity))
            require(not known or len(self.server.versions) == before, f"{identity} was registered again")

    def promote(self) -> None:
        """A person promotes a version."""
        if self.server.versions:
            number = int(self.draw.choice(sorted(one for _, one in self.server.versions)))
            work = lambda: move_alias(self.tracker(), MODEL, CHAMPION, number, "person", "by chance")  # noqa: E731
            self.repeat(f"promote {number}", work)
            require(self.champions[-1] == number, f"version {number} is said to be champion")

    def roll_back(self) -> None:
        """A person takes back the last promotion. After an error, looks first."""
        before = list(self.champions)
        if len(before) < 2 or (MODEL, str(before[-2])) not in self.server.versions:
            return

        def work() -> None:
            if self.champions == before:
                rollback(self.tracker(), MODEL)

        self.rolling = True
        try:
            self.repeat("roll back", work)
        finally:
            self.rolling = False
        require(self.champions == before[:-1], f"the champions were {before}, and are {self.champions}")

    def remove_old(self) -> None:
        """Retention. It spares the champion and those before it."""
        spared = self.champions[-1 - ROLLBACKS :]
        there = {int(number) for _, number in self.server.versions}
        self.repeat("remove old versions", lambda: self._remove_versions(self.workspace()))
        left = {int(number) for _, number in self.server.versions}
        require(not there & set(spared) - left, f"{spared} were the last champions, and {sorted(there - left)} went")

    def _remove_versions(self, workspace: Any) -> None:
        clean.remove_versions(workspace, clean.RetiredVersions(workspace), dry_run=False)

    def repeat(self, what: str, work: Callable[[], Any]) -> None:
        """Runs a command until it succeeds."""
        for _ in range(40):
            self.commands += 1
            self.world.note(what)
            error: BaseException | None = None
            try:
                work()
            except BaseException as found:
                error = found
            if self.disk.dead:
                self.disk.restart()
            elif error is not None:
                away = isinstance(error, MlflowException) and is_unreachable(error)
                if not away and not isinstance(error, OSError | TrackingError):
                    raise error
            self.look()
            if error is None:
                return
            self.world.note(f"{what} ends: {type(error).__name__}")
            self.world.now += self.world.between(0, 3600)
            if what.startswith("train") and self.world.strikes(OTHER) and self.server.versions:
                with self.disk.calm():
                    number = int(self.draw.choice(sorted(one for _, one in self.server.versions)))
                    move_alias(self.tracker(), MODEL, CHAMPION, number, "person", "by chance")
        require(False, f"{what} never comes to its end")

    def play(self) -> None:
        """Trains, promotes, rolls back and cleans."""
        kinds = [self.new_training] * 4 + [
            self.old_training,
            self.promote,
            self.roll_back,
            self.roll_back,
            self.remove_old,
        ]
        for _ in range(self.draw.randint(3, 12)):
            if self.world.strikes(JUMP):
                self.clock.skew += self.world.between(-10, 10) * 86_400
            self.world.now += self.world.between(0.1, 3) * 86_400
            self.draw.choice(kinds)()
        self.tidy()

    # -- what must hold -----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Each alias names a whole version, and no training has two."""
        for model in self.server.models.values():
            for alias, number in model.aliases.items():
                version = self.server.versions.get((MODEL, number))
                require(version is not None, f"{alias} names version {number}, which is gone")
                require(self.server.is_whole(version), f"{alias} names version {number}, which is not whole")
            holder = model.aliases.get(CHAMPION)
            require(not self.champions or holder == str(self.champions[-1]), f"version {holder} is champion")
        named = Counter(one.tags[IDENTITY] for one in self.server.versions.values() if IDENTITY in one.tags)
        require(max(named.values(), default=1) == 1, f"a training has several versions: {named}")
        made = Counter(one.run_id for one in self.server.versions.values())
        require(made.total() - len(made) <= self.server.doubled, f"a run was registered again: {made}")
        running = sum(run.info.status == "RUNNING" for run in self.server.runs.values())
        self.states.add((len(self.server.versions), len(self.champions), running, len(self.server.models)))

    def tidy(self) -> None:
        """No run goes on, and no temporary file is left but what one kill leaves."""
        with self.disk.calm():
            self.disk.life += 1
            self.tracker().reap()
            running = [one.info.run_id for one in self.server.runs.values() if one.info.status == "RUNNING"]
            require(not running, f"{running} run for ever")
            hidden = list(self.disk.root.rglob(".*.tmp"))
            dead = sum(self.world.struck[kind] for kind in (disk.KILLED, disk.POWER))
            require(len(hidden) <= dead, f"{len(hidden)} temporary files are left, and {dead} processes died")


SUMMARY = {"steps": 1, "rows": 1, "best_step": None, "valid_ne": None, "world_size": 1, "device": "cpu"}


class Monitor:
    """Takes no measurements."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def start(self) -> None: ...

    def finish(self) -> None: ...

    def aggregate_metrics(self) -> dict[str, float]:
        return {}


@contextmanager
def simulated(run: Run) -> Iterator[None]:
    """The code of registrations meets the run's disk, clock and server in this block."""

    def copy(source: Path, target: Path) -> None:
        """Stands for `link_or_copy` on a filesystem without links, which the disk does not play."""
        with atomic_file(target) as temporary:
            shutil.copyfile(source, temporary)

    def repository(place: str, tracking_uri: str) -> Any:
        return Store(run.server, place)

    def pages(space: Any, version: int, run_id: str) -> str:
        space.tracking.client.update_model_version(MODEL, str(version), description="text")
        return "text"

    def process() -> int:
        return 1000 + run.disk.life

    own = SimpleNamespace(getpid=process, environ=os.environ)
    code = SimpleNamespace(commit="c", lock_hash="l")
    clock = SimpleNamespace(now=lambda zone: run.clock.now(), strptime=datetime.datetime.strptime)
    moment = SimpleNamespace(datetime=clock, UTC=datetime.UTC, timedelta=datetime.timedelta)
    with ExitStack() as stack:
        for owner, name, value in (
            (register, "_save", run.save), (register, "_score", lambda *_: np.array([0.5])), (tracking, "os", own),
            (register, "get_artifact_repository", repository), (register, "link_or_copy", copy),
            (tracking, "_lives", lambda tags: tags["dlrm.pid"] == str(process())),
            (tracking, "SystemMetricsMonitor", Monitor),
            (mlflow.artifacts, "download_artifacts", run.server.download_model),
            (mlflow.artifacts, "list_artifacts", run.server.list_model), (aliases, "datetime", moment),
            (clean, "datetime", moment), (retention, "get_artifact_repository", repository),
            (finish, "evaluate", run.evaluate), (finish, "log_quality", lambda *_: None), (finish, "_choose_form", run.pack),
            (finish, "_read_first_rows", lambda *_: pa.table({"x": [1.0]})), (finish, "Worker", lambda *_: None),
            (finish, "write_pages", pages), (finish, "show_result", lambda *_: None),
            (finish, "name_test_rows", lambda *_: "rows"), (finish, "trained_by", lambda folder: code),
            (TrainingJob, "trained_to", "2025-06-01"), (TrainingJob, "plan", SimpleNamespace(hash="p")),
        ):  # fmt: skip
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(run.disk.mounted())
        yield


def play(seed: int) -> Outcome:
    """Runs the schedule of a seed.

    Raises:
        BrokenPromise: If something happens that must never happen. Its note holds the trace.
    """
    with scratch() as root:
        run = Run(seed, root)
        try:
            with simulated(run):
                run.play()
        except BaseException as error:
            error.add_note("\n".join(["", *run.world.trace]))
            raise
    sums = Counter({"commands": run.commands, "requests": run.server.calls, "disk changes": run.disk.steps})
    return Outcome(run.world.struck, run.states, sums, run.world.trace)


__all__ = ["FAULTS", "ContractError", "RegistryError", "play"]
