"""Logs of events that an ingest keeps as tables, and what a change of them means for trainings that read them."""

import datetime
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from pipeline.config import load
from pipeline.data.joined.reader import open_reader
from pipeline.errors import ConfigError, DataError
from pipeline.extraction.generator.watched import watched_batches, watched_days
from pipeline.jobs.ingest.ingest import enrich_days, ingest_days
from pipeline.jobs.training.job import resolve_job
from pipeline.jobs.upkeep.clean import remove_snapshots
from pipeline.jobs.workspace import Workspace
from tests.homes import draw_events

Open = Callable[..., Workspace]


@pytest.fixture
def open_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Three days of samples and of a log. Keyword arguments are keys of the event table."""
    monkeypatch.setenv("DLRM_HOME", str(tmp_path / "home"))
    for folder in ("rows", "log"):
        (tmp_path / folder).mkdir()
    for day in (1, 2, 3):
        draw_events(day, 40, day).to_parquet(tmp_path / f"log/{day}.parquet")
        label = np.arange(60) % 2
        draw_events(day, 60, 10 + day, label=label, num=0.5).to_parquet(tmp_path / f"rows/{day}.parquet")

    def make(stored: bool = False, prefix: str = "", **keys: Any) -> Workspace:
        watched = {"path": f"{tmp_path}/log/*", "key": "user", "time": "at"} | keys
        seen = {"table": "watched", "as_of": "at", "last": 5, "prefix": f"{prefix}seen_", "stored": stored}
        count = {"table": "watched", "as_of": "at", "seconds": [7_200], "prefix": f"{prefix}num_", "stored": stored}
        ids = {"columns": [f"{prefix}seen_item"], "transforms": [{"kind": "sigrid_hash", "size": 100}]}
        values = {
            "name": "ads", "events": {"watched": watched},
            "source": {"path": f"{tmp_path}/rows/*.parquet", "day_column": "at"},
            "features": {
                "dense": [{"columns": ["num*"]}], "sparse": [ids], "histories": [seen], "windows": [count],
            },
            "split": {"days": {"train": ["2024-01-01", "2024-01-02"], "test": ["2024-01-03"]}},
        }  # fmt: skip
        return Workspace(load(values))

    return make


def add(workspace: Workspace, events: pd.DataFrame, name: str) -> dict[str, Any]:
    """Adds a file to the log and ingests again. Returns what was done with the log."""
    path = workspace.config.events["watched"].path
    assert isinstance(path, str)
    events.to_parquet(Path(path[:-1]) / name)
    done: dict[str, Any] = ingest_days(workspace, None, force=False)["events"]["watched"]
    return done


def stored(workspace: Workspace, table: str = "watched") -> pd.DataFrame:
    snapshot = workspace.warehouse.current(table)
    reader = workspace.warehouse.reader(snapshot, workspace.warehouse.schema(snapshot).names)
    return pd.concat([reader.read(fragment).to_pandas() for fragment in reader.fragments()], ignore_index=True)


def pin(workspace: Workspace) -> str:
    return resolve_job(workspace, None, force=False).identity


def test_days_and_trainings_are_the_same_wherever_the_project_lies(
    open_: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of a project with its data, run from another folder, finds its days and its training done."""
    values = open_().config.model_dump(mode="json", exclude_unset=True)
    values["source"]["path"], values["events"]["watched"]["path"] = "../rows/*.parquet", "../log/*"
    values["features"]["joined"] = [{"path": ["../side.parquet"], "on": "user"}]
    pd.DataFrame({"user": [1, 2], "num_side": [0.5, 1.5]}).to_parquet(tmp_path / "side.parquet")
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/ads.yaml").write_text(yaml.safe_dump(values))
    for name in ("conf", "rows", "log", "side.parquet"):
        (shutil.copytree if (tmp_path / name).is_dir() else shutil.copy2)(tmp_path / name, tmp_path / "copy" / name)

    def run(folder: Path) -> tuple[str, str]:
        workspace = Workspace(load(folder / "conf/ads.yaml", {"ingest.other_sources": True}))
        return ingest_days(workspace, None, force=False)["status"], pin(workspace)

    status, identity = run(tmp_path)
    monkeypatch.chdir(tmp_path / "copy")
    assert (status, *run(Path())) == ("ok", "skipped", identity)
    pd.DataFrame({"user": [1, 2], "num_side": [0.5, 2.5]}).to_parquet("side.parquet")
    assert run(Path()) != ("skipped", identity)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("form", ["seconds", "milliseconds", "microseconds", "fractional seconds", "text"])
def test_times_of_rows_and_events_may_be_numbers(open_: Open, tmp_path: Path, form: str) -> None:
    """The same days, rows and lists as of timestamps; a number that is no time ends the ingest."""
    expected = [
        stored(one, table) for one in [open_()] if ingest_days(one, None, False) for table in ("ads", "watched")
    ]
    unit = form.rpartition(" ")[2] if form != "text" else "milliseconds"
    per = {"seconds": 1e6, "milliseconds": 1e3, "microseconds": 1}[unit]
    for path in sorted(tmp_path.glob("[rl]o*/*.parquet")):
        frame = pd.read_parquet(path)
        moments = frame["at"].astype("datetime64[us]").astype("int64") / per
        if form == "text":
            frame.assign(at=moments.astype("int64")).to_csv(path.with_suffix(".csv"), index=False)
            path.unlink()
        else:
            frame.assign(at=moments if form.startswith("frac") else moments.astype("int64")).to_parquet(path)
    values = open_(day_unit=unit).config.model_dump(mode="json", exclude_unset=True)
    values["source"] |= {"day_unit": unit, "path": f"{tmp_path}/rows/*"}
    workspace = Workspace(load(values | {"home": f"{tmp_path}/other"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("DLRM_HOME")
        ingest_days(workspace, None, force=False)
        for table, frame in zip(("ads", "watched"), expected, strict=True):
            times = (
                frame["at"]
                if form.startswith("frac") or unit == "microseconds"
                else frame["at"].dt.floor({"seconds": "s", "milliseconds": "ms"}[unit])
            )
            found = stored(workspace, table)
            assert found["at"].dt.tz_localize(None).tolist() == times.tolist()
            assert found.drop(columns="at").astype(str).equals(frame[found.drop(columns="at").columns].astype(str))


def test_a_number_that_is_no_time_of_the_unit_is_named(open_: Open, tmp_path: Path) -> None:
    for path in (tmp_path / "log").glob("*"):
        frame = pd.read_parquet(path)
        frame.assign(at=frame["at"].astype("datetime64[us]").astype("int64")).to_parquet(path)
    with pytest.raises(DataError) as error:
        ingest_days(open_(day_unit="seconds"), None, force=False)
    assert str(error.value).startswith("column 'at' of '1.parquet': expected seconds since 1970, as ")
    assert "as events.watched.day_unit says" in str(error.value)


def test_a_log_becomes_days_sorted_by_key_and_time(
    open_: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    workspace = open_(columns=["item"], rename={"item": "id"})
    lost = draw_events(2, 3, 7, junk="x").assign(user=pd.array([None, 4, 5], dtype="Int64"))
    lost.to_parquet(tmp_path / "log/2b.parquet")
    with pytest.raises(ConfigError, match=r"events\.watched\.columns.*'item'"):
        ingest_days(workspace, None, force=False)
    workspace = open_(columns=["item"])
    done = ingest_days(workspace, None, force=False)["events"]["watched"]
    assert (done["rows"], done["days_written"], done["quarantined"], done["left_out_rows"]) == (122, 3, {}, 1)
    assert done["files"]["incomplete"][f"{tmp_path}/log/2b.parquet"]["left_out"] == 1
    assert "1 of 123 events of the days to write have no user and are left out" in caplog.text
    parts = [pd.read_parquet(path) for path in sorted((tmp_path / "log").iterdir())]
    expected = pd.concat(parts).dropna(subset="user").assign(day=lambda rows: rows["at"].dt.date)
    expected = expected.sort_values(["day", "user", "at"], kind="stable")[["user", "at", "item", "day"]]
    found = stored(workspace)
    assert found.astype(str).values.tolist() == expected.astype(str).values.tolist()
    again = ingest_days(workspace, None, force=False)
    assert (again["status"], again["events"]["watched"]["status"]) == ("skipped", "skipped")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("unique", ["event", "*", ["user", "at"]])
def test_events_that_are_delivered_twice_count_once(
    open_: Open, tmp_path: Path, unique: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """In one file, in another one, and on the other side of midnight."""
    for day in (1, 2, 3):
        path = tmp_path / f"log/{day}.parquet"
        pd.read_parquet(path).assign(event=[f"{day}-{number}" for number in range(40)]).to_parquet(path)
    first = pd.read_parquet(tmp_path / "log/1.parquet")
    pd.concat([first[:7], first[:3], pd.read_parquet(tmp_path / "log/2.parquet")[:5]]).to_parquet(
        tmp_path / "log/4.parquet"
    )
    workspace = open_()
    ingest_days(workspace, None, force=False)
    assert "15 of 135 events repeat another one in all columns" in caplog.text
    assert "set events.watched.unique" in caplog.text
    assert len(stored(workspace)) == 135
    caplog.clear()
    done = ingest_days(open_(unique=unique), None, force=True)["events"]["watched"]
    assert done["left_out_rows"] == 15
    assert "repeat" not in caplog.text
    frame = stored(open_(unique=unique))
    assert sorted(frame["event"]) == sorted(f"{day}-{number}" for day in (1, 2, 3) for number in range(40))


def test_events_without_an_id_are_not_repeats(open_: Open, tmp_path: Path) -> None:
    ids: list[Any] = [None if number % 2 else f"{number}" for number in range(40)]
    for day in (1, 2, 3):
        path = tmp_path / f"log/{day}.parquet"
        pd.read_parquet(path).assign(event=ids).to_parquet(path)
    ingest_days(open_(unique="event"), None, force=False)
    frame = stored(open_(unique="event"))
    assert (frame["event"].isna().sum(), frame["event"].notna().sum()) == (60, 20)


def test_events_of_wrong_clocks_push_no_days_out(open_: Open, tmp_path: Path) -> None:
    """Of three days two are kept. Events of the future are held back; were they newest, they would be the only ones."""
    workspace = open_(keep_days=2)
    soon = datetime.datetime.now(datetime.UTC).replace(tzinfo=None) + datetime.timedelta(days=5)
    wrong = draw_events(3, 3, 9).assign(at=[pd.Timestamp(2031, 1, 1), pd.Timestamp(2038, 1, 19), pd.Timestamp(soon)])
    wrong.assign(at=wrong["at"].astype("datetime64[us]")).to_parquet(tmp_path / "log/wrong.parquet")
    done = ingest_days(workspace, None, force=False)["events"]["watched"]
    assert (done["rows"], done["days_held"]) == (80, 3)
    kept = {pd.Timestamp(2024, 1, day).date() for day in (2, 3)}
    assert set(stored(workspace)["day"]) == kept
    again = add(workspace, draw_events(4, 5, 11), "4.parquet")
    assert (again["days_expired"], set(stored(workspace)["day"])) == (
        1,
        {pd.Timestamp(2024, 1, day).date() for day in (3, 4)},
    )


def test_stored_days_of_the_future_push_no_days_out(open_: Open, tmp_path: Path) -> None:
    config = open_(keep_days=2).config
    checks = config.ingest.checks.model_copy(update={"future": "off"})
    workspace = Workspace(config.model_copy(update={"ingest": config.ingest.model_copy(update={"checks": checks})}))
    draw_events(3, 1, 9).assign(at=pd.Timestamp(2031, 1, 1)).to_parquet(tmp_path / "log/wrong.parquet")
    ingest_days(workspace, None, force=False)
    days = [datetime.date(2024, 1, 2), datetime.date(2024, 1, 3), datetime.date(2031, 1, 1)]
    assert sorted(set(stored(workspace)["day"])) == days


def write_keys_of_others(folder: Path) -> None:
    for day in (1, 2, 3):
        events = draw_events(day, 40, day)
        events.assign(user=events["user"] + 100).to_parquet(folder / f"log/{day}.parquet")


def test_a_log_without_a_key_of_the_rows_is_refused(open_: Open, tmp_path: Path) -> None:
    write_keys_of_others(tmp_path)
    workspace = open_()
    with pytest.raises(DataError) as error:
        ingest_days(workspace, None, force=False)
    assert str(error.value) == (
        "day 2024-01-01, rule unmatched: expected at least 1.0% of the rows with a match in features.histories "
        "'watched', got 0 of 180 (5 more). Correct the source, or set ingest.checks.unmatched to quarantine, warn or off."
    )
    assert not workspace.warehouse.has_table("ads")


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("histories", {"table": "watched", "as_of": "at", "where": "item > 99", "prefix": "no_"}),
        ("joined", {"path": "users.parquet", "on": "user"}),
    ],
)
def test_a_source_of_features_that_matches_no_row_is_refused(
    open_: Open, tmp_path: Path, kind: str, keys: dict[str, Any]
) -> None:
    pd.DataFrame({"user": [55], "age": [1]}).to_parquet(tmp_path / "users.parquet")
    values = open_().config.model_dump(mode="json")
    given = {key: f"{tmp_path}/{value}" if key == "path" else value for key, value in keys.items()}
    values["features"][kind] = [*values["features"][kind], given]
    with pytest.raises(DataError, match=rf"1.0% of the rows with a match in features\.{kind} '.*', got 0 of 180"):
        ingest_days(Workspace(load(values)), None, force=False)
    values["ingest"]["checks"]["unmatched"] = "warn"
    assert ingest_days(Workspace(load(values)), None, force=False)["days_written"] == 3


@pytest.mark.nightly
def test_the_generator_writes_a_log_of_events(open_: Open) -> None:
    """Without `path`. The log has more days than the impressions, and its lists are those that it was drawn with."""
    generator = {"days": 2, "rows_per_day": 300, "users": 40, "watched_per_day": 5}
    source = {"generator": generator, "outcomes": {}, "day_column": "event_time"}
    history = {"table": "watched", "as_of": "event_time", "delay_seconds": 60, "last": 10, "prefix": "seen_"}
    ids = [{"columns": ["seen_watched_category"], "transforms": [{"kind": "sigrid_hash", "size": 100}]}]
    values = {
        "name": "made", "source": source, "events": {"watched": {"key": "cat_user", "time": "watched_at"}},
        "features": {"dense": [{"columns": ["num_price"]}], "sparse": ids, "histories": [history]},
        "split": {"days": {"train": ["2024-01-01"], "test": ["2024-01-02"]}},
    }  # fmt: skip
    workspace = Workspace(load(values))
    done = ingest_days(workspace, None, force=False)
    config = workspace.config.source.generator
    assert config is not None
    logged = sum(len(part) for day in watched_days(config) for part in watched_batches(config, day))
    assert (done["rows"], done["events"]["watched"]["rows"]) == (600, logged)
    assert ingest_days(workspace, None, force=False)["status"] == "skipped"
    joined = workspace.feature_joins()
    reader = open_reader(
        workspace.warehouse, workspace.warehouse.current("made"), ["cat_user", "event_time", "seen_watched_category"],
        None, joined,
    )  # fmt: skip
    for fragment in reader.fragments():
        assert set(map(len, reader.read(fragment)["seen_watched_category"].to_pylist())) == {10}
    with pytest.raises(ConfigError, match=r"events\.watched: expected `path` of the log, got none, and no generator"):
        load(values, {"source.generator.watched_per_day": 0})


@pytest.mark.slow
def test_only_what_a_row_can_see_makes_another_training(open_: Open) -> None:
    workspace = open_()
    assert ingest_days(workspace, None, force=False)["status"] == "ok"
    before = pin(workspace)
    later = add(workspace, draw_events(4, 30, 5), "4.parquet")
    assert (later["days_written"], later["first_day"], later["last_day"]) == (1, "2024-01-01", "2024-01-04")
    assert add(workspace, draw_events(3, 5, 6), "3b.parquet")["days_written"] == 1  # 3 January is judged, not learned
    assert pin(workspace) == before
    assert add(workspace, draw_events(1, 5, 7), "1b.parquet")["days_written"] == 1
    assert pin(workspace) != before


@pytest.mark.nightly
def test_a_day_that_would_lose_a_file_is_held_back(open_: Open, tmp_path: Path) -> None:
    workspace = open_()
    add(workspace, draw_events(1, 5, 7), "1b.parquet")
    (tmp_path / "log/1b.parquet").unlink()
    done = ingest_days(workspace, None, force=False)["events"]["watched"]
    assert (done["days_held"], len(stored(workspace))) == (1, 125)


@pytest.mark.nightly
def test_old_days_leave_the_table_and_do_not_come_back(open_: Open) -> None:
    workspace = open_(keep_days=2)
    ingest_days(workspace, None, force=False)
    assert sorted(stored(workspace)["day"].astype(str).unique()) == ["2024-01-02", "2024-01-03"]
    done = add(workspace, draw_events(4, 30, 5), "4.parquet")
    assert (done["days_written"], done["days_expired"]) == (1, 1)
    ahead = draw_events(4, 2, 8).assign(at=pd.Timestamp("2190-01-01"))  # a wrong clock takes no day away
    done = add(workspace, ahead.astype({"at": "datetime64[us]"}), "ahead.parquet")
    assert (done["days_written"], done["days_held"], done["days_expired"]) == (0, 1, 0)
    assert sorted(stored(workspace)["day"].astype(str).unique()) == ["2024-01-03", "2024-01-04"]


@pytest.mark.nightly
def test_snapshots_of_a_log_go_with_those_of_the_samples(open_: Open) -> None:
    workspace = open_()
    for number in range(3):
        add(workspace, draw_events(4 + number, 5, number), f"more-{number}.parquet")
    retention = workspace.config.retention.model_copy(update={"snapshots_days": 1e-9, "leftovers_days": 1e-9})
    left = Workspace(workspace.config.model_copy(update={"retention": retention}))
    remove_snapshots(left, [], False)
    assert len(left.warehouse.table("watched").snapshots()) == 1
    assert len(stored(left)) == 135


@pytest.mark.parametrize(
    ("keys", "error", "where"),
    [
        ({"time": "item"}, ConfigError, r"events\.watched\.time 'item': expected timestamps or dates, got BIGINT"),
        ({"time": "when"}, ConfigError, r"events\.watched\.time"),
        ({"key": "usr"}, ConfigError, r"events\.watched\.key"),
        ({"path": "nowhere/*.parquet"}, ConfigError, r"events\.watched\.path"),
    ],
)
def test_a_wrong_declaration_is_named(open_: Open, keys: dict[str, Any], error: type[Exception], where: str) -> None:
    with pytest.raises(error, match=where):
        ingest_days(open_(**keys), None, force=False)


def test_the_log_of_the_labels_needs_a_delay_under_any_name(open_: Open) -> None:
    values = open_().config.model_dump(mode="json", exclude={"source": {"day"}})
    values["source"]["outcomes"] = {"path": values["events"]["watched"]["path"], "labels": {}}
    with pytest.raises(ConfigError, match=r"delay_seconds of features\.histories 'watched': expected 1 or more"):
        load(values)
    for logs in ("histories", "windows"):
        values["features"][logs][0]["delay_seconds"] = 60
    assert load(values).features.histories[0].delay_seconds == 60


def test_other_engines_skip_files_by_the_times_in_them(open_: Open) -> None:
    workspace = open_()
    ingest_days(workspace, None, force=False)
    scan = workspace.warehouse.table("watched").scan(row_filter="at >= '2024-01-02T00:00:00' and user > 2")
    assert len(list(scan.plan_files())) == 2


def computed(workspace: Workspace, prefix: str = "") -> str:
    """The columns that the config reads, computed while it reads or from the table."""
    names = ["day", "user", "at", "label", f"{prefix}seen_item", f"{prefix}num_count_7200"]
    snapshot = workspace.warehouse.current("ads")
    reader = open_reader(workspace.warehouse, snapshot, names, None, workspace.feature_joins())
    return str([row for part in reader.fragments() for column in reader.read(part) for row in column.to_pylist()])


@pytest.mark.nightly
def test_a_materialization_writes_what_is_computed_while_rows_are_read(open_: Open, tmp_path: Path) -> None:
    """Also into days that come later, and into days that see a late event. No other day is written again."""
    ingest_days(open_(), None, force=False)
    expected, workspace = computed(open_()), open_(stored=True)
    done = enrich_days(workspace, None, None, force=False)
    assert (done["days_written"], done["columns"]) == (3, ["seen_item", "num_count_7200"])
    assert computed(workspace) == expected
    assert workspace.feature_joins() == ()
    draw_events(4, 60, 14, label=np.arange(60) % 2, num=0.5).to_parquet(tmp_path / "rows/4.parquet")
    draw_events(2, 20, 9).to_parquet(tmp_path / "log/2b.parquet")
    assert ingest_days(workspace, None, force=False)["days_materialized"] == 1
    done = enrich_days(workspace, None, None, force=False)
    assert (done["days_written"], done["days_skipped"]) == (2, 2)
    assert computed(workspace) == computed(open_(prefix="new_"), "new_") != expected


@pytest.mark.nightly
def test_days_without_a_materialization_are_not_read_as_days_without_events(open_: Open) -> None:
    ingest_days(open_(), None, force=False)
    enrich_days(open_(stored=True), datetime.date(2024, 1, 2), None, force=False)
    with pytest.raises(
        ConfigError, match=r"features\.histories 'watched' \(stored\): .* no materialization of 2024-01-01"
    ):
        pin(open_(stored=True))


@pytest.mark.nightly
def test_a_table_of_another_declaration_is_not_written(open_: Open) -> None:
    ingest_days(open_(), None, force=False)
    with pytest.raises(ConfigError, match=r"events\.watched: expected the key, time and columns that its table was"):
        ingest_days(open_(columns=["item"]), None, force=False)
    assert ingest_days(open_(columns=["item"]), None, force=True)["events"]["watched"]["days_written"] == 3
    samples = open_().config.model_dump(mode="json", exclude={"source": {"day"}}) | {"name": "other"}
    samples["events"] = {"ads": samples["events"]["watched"] | {"keep_days": 1}}
    samples["ingest"]["other_sources"] = True  # the files are others, too
    for logs in ("histories", "windows"):
        samples["features"][logs][0]["table"] = "ads"
    with pytest.raises(ConfigError, match=r"events\.ads: expected .* or a table of samples"):
        ingest_days(Workspace(load(samples)), None, force=False)


@pytest.mark.nightly
def test_a_new_declaration_of_a_log_that_has_lost_old_files_stands(open_: Open, tmp_path: Path) -> None:
    ingest_days(open_(), None, force=False)
    (tmp_path / "log/1.parquet").unlink()
    assert ingest_days(open_(columns=["item"]), None, force=True)["events"]["watched"]["days_written"] == 2
    again = ingest_days(open_(columns=["item"]), None, force=False)["events"]["watched"]
    assert (again["status"], len(stored(open_()))) == ("skipped", 120)


def test_one_forced_day_of_samples_forces_no_events(open_: Open) -> None:
    ingest_days(open_(), None, force=False)
    done = ingest_days(open_(), datetime.date(2024, 1, 2), force=True)
    assert (done["days_written"], done["events"]["watched"]["status"]) == (1, "skipped")


@pytest.mark.parametrize(
    ("events", "stored", "log", "where"),
    [
        ({}, False, {"time": "item"}, r"on and time of features\.histories 'watched': expected user and at"),
        ({"keep_days": 9}, True, {}, r"stored of features\.histories 'watched': .*keep_days=9"),
        ({}, True, {"table": "ads", "on": "user", "time": "at"}, r"stored of features\.histories 'ads'"),
    ],
)
def test_logs_that_do_not_fit_their_table_are_refused(
    open_: Open, events: dict[str, Any], stored: bool, log: dict[str, Any], where: str
) -> None:
    values = open_().config.model_dump(mode="json", exclude={"source": {"day"}})
    values["events"]["watched"] |= events
    values["features"]["histories"][0] |= {"stored": stored} | log
    with pytest.raises(ConfigError, match=where):
        load(values)


def test_columns_that_a_pattern_takes_and_no_table_can_have_are_named(
    open_: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    workspace = open_(columns=["*"])
    for path in (tmp_path / "log").iterdir():
        events = pd.read_parquet(path)
        places: list[Any] = [{"x": 1.0}] * len(events)
        events.assign(place=places).to_parquet(path)
    ingest_days(workspace, None, force=False)
    assert "which the warehouse has no type for and no feature reads: place (STRUCT(x DOUBLE))" in caplog.text
    assert {"item", "user", "at"} <= {*stored(workspace).columns}
    assert "place" not in stored(workspace).columns
