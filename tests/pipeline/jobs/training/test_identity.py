"""A training is named by what it learns from, and an interrupted one is found again by that name."""

import datetime
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline.data.day_notes import INGEST, DayNote, InputFiles
from pipeline.errors import ConfigError
from pipeline.jobs.ingest.ingest import ingest
from pipeline.jobs.recurring.day import identity_of_day
from pipeline.jobs.training.identity import name_test_rows
from pipeline.jobs.training.job import PLAN, PLANS, TrainingJob, begin, prepare_rows, resolve_dataset, resolve_job
from pipeline.jobs.workspace import Workspace
from pipeline.preprocessing.dataset import DataSpec, fit_plan
from pipeline.transforms.plan.plan import Plan
from storage.errors import StorageError
from storage.layout.rewrite import rewrite_days
from storage.warehouse import Warehouse
from tests.homes import open_smoke, rows_of, write_days

SMALL = {"source.generator.rows_per_day": 100, "source.generator.days": 5}
FIRST = tuple(datetime.date(2025, 1, day) for day in (6, 7, 8, 9))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    ingest(open_(), FIRST)
    return tmp_path


def open_(**keys: Any) -> Workspace:
    return open_smoke(SMALL, **keys)


def pin(**keys: Any) -> TrainingJob:
    return resolve_job(open_(**keys), None, force=False)


def test_rows_that_are_not_learned_from_do_not_change_the_name(home: Path) -> None:
    """Another day, the same rows in other files, other evaluation days and settings."""
    before = pin()
    ingest(open_(), (datetime.date(2025, 1, 10),))
    warehouse = open_().warehouse
    rewrite_days(warehouse, "smoke", [FIRST[0]], home)
    assert warehouse.current("smoke") != before.snapshot
    after = pin()
    assert (after.identity, after.snapshot) == (before.identity, warehouse.current("smoke"))
    assert pin(split__days__test=["2025-01-10"], evaluation__slices=["cat_device"]).identity == before.identity


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "keys",
    [
        {"split__days__train": ["2025-01-06"]},
        {"split__days__valid": ["2025-01-09"], "split__days__test": ["2025-01-08"]},
        {"filter": "num_price > 1"},
        {"sampling": {"inputs": ["cat_user"], "rate": 0.5}},
        {"registration__model_name": "other"},
    ],
)
def test_other_rows_or_another_model_are_another_training(home: Path, keys: dict[str, Any]) -> None:
    assert pin(**keys).identity != pin().identity


def test_a_day_that_was_written_again_with_other_rows_is_another_training(home: Path) -> None:
    before = pin()
    ingest(open_(source__generator__rows_per_day=101), FIRST[:1], force=True)
    assert pin().identity != before.identity


def test_a_killed_training_resumes_on_its_own_snapshot_after_a_compaction(home: Path) -> None:
    """A checkpoint holds a position in the files of that snapshot."""
    killed = pin()
    begin(open_(), killed)
    rewrite_days(open_().warehouse, "smoke", [FIRST[0]], home)
    ingest(open_(), (datetime.date(2025, 1, 10),))
    resumed = pin()
    assert (resumed.folder, resumed.snapshot) == (killed.folder, killed.snapshot)
    assert {spec.snapshot for spec in resumed.data.values()} == {killed.snapshot}


def test_checkpoints_of_an_expired_snapshot_are_dropped(home: Path) -> None:
    job = pin()
    begin(open_(), job)
    checkpoints = Path(job.folder) / "checkpoints" / "step-0000000005"
    checkpoints.mkdir(parents=True)
    begin(open_(), job)
    assert checkpoints.exists()
    begin(open_(), job.model_copy(update={"snapshot": job.snapshot.model_copy(update={"snapshot_id": 7})}))
    assert not checkpoints.exists()


def count_fits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that gets an entry for each plan that is fitted."""
    fits: list[str] = []

    def fit(spec: DataSpec, warehouse: Warehouse) -> Plan:
        fits.append(spec.snapshot.table)
        return fit_plan(spec, warehouse)

    monkeypatch.setattr("pipeline.jobs.training.job.fit_plan", fit)
    return fits


def test_trainings_of_the_same_rows_share_a_fitted_plan(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = prepare_rows(open_(), None)[1].plan
    fits = count_fits(monkeypatch)
    jobs = [pin(), pin(seed=7), pin(training__epochs=3, registration__model_name="other")]
    assert len(fits) == 1
    assert len({job.identity for job in jobs}) == 3
    assert [job.plan for job in jobs] == [fresh] * 3
    assert {(Path(job.folder) / PLAN).read_bytes() for job in jobs} == {fresh.model_dump_json(indent=2).encode()}
    assert resolve_job(open_(seed=8), None, force=True).plan == fresh
    assert len(fits) == 2


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "keys",
    [
        {"split__days__train": ["2025-01-06"]},
        {"filter": "num_price > 1"},
        {"sampling": {"inputs": ["cat_user"], "rate": 0.5}},
        {"features__dense": [{"columns": "num_price", "transforms": [{"kind": "standardise"}]}]},
    ],
)
def test_a_plan_is_fitted_to_its_own_rows(home: Path, keys: dict[str, Any]) -> None:
    before = pin().plan
    plan = pin(**keys).plan
    assert plan != before
    assert plan == prepare_rows(open_(**keys), None)[1].plan


def test_the_rows_of_another_snapshot_are_fitted_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their order may be another one, and their mean rounded in another way."""
    fits = count_fits(monkeypatch)
    pin()
    rewrite_days(open_().warehouse, "smoke", [FIRST[0]], home)
    pin(seed=7)
    assert len(fits) == 2


def test_a_damaged_plan_is_named(home: Path) -> None:
    pin()
    (path,) = (home / PLANS / "smoke").iterdir()
    path.write_text("{")
    with pytest.raises(StorageError, match=f"{path.name}.*Remove it"):
        pin(seed=7)


def test_a_plan_with_another_digit_is_named(home: Path) -> None:
    pin()
    (path,) = (home / PLANS / "smoke").iterdir()
    digit = re.search(r"\d\.\d\d(\d)", text := path.read_text())
    assert digit is not None
    at = digit.start(1)
    path.write_text(f"{text[:at]}{(int(text[at]) + 1) % 10}{text[at + 1 :]}")
    with pytest.raises(StorageError, match=f"{path.name}.*expected what an earlier command wrote.*Remove it"):
        pin(seed=7)


def write_side(day: datetime.date, value: float) -> None:
    write_days(open_().warehouse, rows_of(day, cat_user=[1], score=[value]), name="side", identity=f"{value}")


def describe_joined_training() -> list[str]:
    """Returns the names of the training, its evaluation rows and a day's work."""
    workspace = open_(features__joined=[{"table": "side", "on": "cat_user", "day_column": "day"}])
    job = resolve_job(workspace, None, force=False)
    return [job.identity, name_test_rows(workspace.warehouse, job.data), identity_of_day(workspace, FIRST[1])]


def test_days_of_a_feature_source_that_are_not_read_change_no_name(home: Path) -> None:
    """The source gets a day each day. Finished work must not be done again."""
    for day in FIRST:
        write_side(day, 0.5)
    before = describe_joined_training()
    write_side(datetime.date(2025, 1, 10), 0.5)
    assert describe_joined_training() == before
    write_side(FIRST[3], 0.7)
    evaluated = describe_joined_training()
    assert [one == other for one, other in zip(evaluated, before, strict=True)] == [True, False, True]
    write_side(FIRST[1], 0.7)
    learned = describe_joined_training()
    assert [one == other for one, other in zip(learned, evaluated, strict=True)] == [False, True, False]


def test_the_work_of_a_day_is_the_same_when_a_source_without_days_changes(home: Path) -> None:
    """Any row may read any of its rows, so it would be done again every night."""
    write_side(FIRST[0], 0.5)
    workspace = open_(features__joined=[{"table": "side", "on": "cat_user"}])
    before = [identity_of_day(workspace, FIRST[1]), resolve_job(workspace, None, force=False).identity]
    write_side(FIRST[0], 0.7)
    assert identity_of_day(workspace, FIRST[1]) == before[0]
    assert resolve_job(workspace, None, force=False).identity != before[1]


def test_chosen_rows_are_not_chosen_again(home: Path) -> None:
    """A resumed or replayed training reads its rows, whatever is noted of their days now."""
    workspace = open_()
    chosen = {part: spec.selection for part, spec in pin().data.items()}
    rows = InputFiles(count=0, bytes=0, stamps=())
    note = {INGEST: DayNote(open=True, rows=rows, outcomes=rows, definition="").model_dump(mode="json")}
    warehouse = workspace.warehouse
    reader = warehouse.reader(snapshot := warehouse.current("smoke"), warehouse.schema(snapshot).names)
    table = pa.concat_tables([reader.read(fragment) for fragment in reader.fragments([FIRST[0]])])
    write_days(warehouse, table, name="smoke", notes={FIRST[0]: note})
    with pytest.raises(ConfigError, match="open"):
        resolve_dataset(workspace, None)
    chosen["train"] = chosen["train"].model_copy(update={"days": FIRST[:1]})
    _, data = resolve_dataset(workspace, None, {"valid": None, **{part: chosen[part] for part in ("train", "test")}})
    assert {part: spec.selection for part, spec in data.items()} == {part: chosen[part] for part in ("train", "test")}


def test_evaluation_rows_have_a_name_of_their_own(home: Path) -> None:
    def name(**keys: Any) -> str:
        workspace = open_(**keys)
        return name_test_rows(workspace.warehouse, pin(**keys).data)

    before = name()
    rewrite_days(open_().warehouse, "smoke", [FIRST[3]], home)
    assert name() == before
    ingest(open_(source__generator__rows_per_day=101), FIRST[3:], force=True)
    assert name() != before
