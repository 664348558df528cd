"""The catalog of the smoke run's table: readers, declarations, and their effect on a training."""

import datetime
import shutil

import pyarrow as pa
import pytest

from flows.features import features
from flows.ingest import ingest
from flows.preprocess import preprocess
from flows.train import train
from pipeline.config import load
from pipeline.errors import ConfigError
from pipeline.inference.model import LoadedModel
from pipeline.inference.request import columns_of
from pipeline.jobs.training.job import resolve_dataset, resolve_job
from pipeline.jobs.workspace import Workspace
from pipeline.preprocessing.worker import Worker
from pipeline.registration.versions import download_packed
from tests.homes import CONFIG, open_smoke, rows_of, write_days


@pytest.fixture
def small(smoke, home, tmp_path, monkeypatch):
    """A home with only the smoke run's table."""
    shutil.copytree(home / "warehouse", tmp_path / "warehouse")
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    return tmp_path


def columns_of_plan(home, smoke) -> set[str]:
    folder = home / "runs" / f"smoke-{smoke['identity'][:12]}-0" / "model"
    return set(LoadedModel(folder).columns)


def test_list_shows_the_readers_of_each_feature(command, copied, home, smoke):
    code, result, log = command(features, CONFIG, home=copied)
    assert code == 0, log
    assert (result["status"], result["action"], result["snapshot_id"]) == ("ok", "list", smoke["snapshot_id"])
    found = {one["name"]: one for one in result["features"]}
    schema = open_smoke().warehouse.schema(open_smoke().warehouse.current("smoke"))
    assert set(found) == set(schema.names) - {"day", "label"}
    read = columns_of_plan(home, smoke)
    assert {name for name, one in found.items() if one["models"] == ["smoke version 1 (champion)"]} == read
    assert {name for name, one in found.items() if one["runs"]} == read
    assert {one["state"] for one in found.values()} == {"active"}
    assert {one["since"] for one in found.values()} == {"2025-01-06"}
    today = datetime.datetime.now(datetime.UTC).date()
    ages = [today - datetime.date.fromisoformat(found[name]["last_read"][:10]) for name in read]
    assert max(ages) <= datetime.timedelta(days=1)
    assert all(found[name]["importance"] is not None for name in read)
    assert result["bytes"] == sum(one["bytes"] for one in found.values())
    assert all(one["bytes"] > 0 for one in found.values())


def test_show_and_propose(command, copied, home, smoke):
    code, result, log = command(features, CONFIG, "action=show", "name=cat_user", home=copied)
    assert code == 0, log
    assert (result["feature"]["name"], result["feature"]["kind"]) == ("cat_user", "id")
    code, result, log = command(features, CONFIG, "action=propose", home=copied)
    assert code == 0, log
    unread = {one["name"] for one in result["candidates"] if any("never read" in why for why in one["reasons"])}
    table = open_smoke().warehouse
    others = set(table.schema(table.current("smoke")).names) - columns_of_plan(home, smoke)
    assert unread == others - {"day", "label", "true_probability", "event_time", "impression_id"} != set()
    assert result["bytes"] == sum(one["bytes"] for one in result["candidates"])
    code, result, _ = command(features, CONFIG, "action=show", "name=cat_usr", home=copied)
    assert (code, result["error"]) == (
        1, "feature 'cat_usr': expected a feature of the table, got none of that name. "
        "Closest: cat_user, cat_country, cat_hour_slot. Correct the name.",
    )  # fmt: skip


def test_a_deprecated_feature_is_refused_and_the_champion_is_named(command, copied):
    identity = load(CONFIG).semantics()
    words = ["action=deprecate", "name=cat_user", "instead=cat_item", "reason=too many users"]
    code, result, _ = command(features, CONFIG, *words, "only_unused=true", home=copied)
    assert (code, result["error"]) == (
        1, "feature 'cat_user': expected one that no serving version reads, got smoke version 1 (champion). "
        "Train a model without it first, or leave out only_unused=true.",
    )  # fmt: skip
    code, result, log = command(features, CONFIG, *words, "by=ann", home=copied)
    warning = "feature 'cat_user' is read by smoke version 1 (champion): new trainings on it are refused from now on"
    assert (code, result["status"], result["warning"], result["event"]["by"]) == (0, "ok", warning, "ann")
    assert warning in log
    code, result, _ = command(features, CONFIG, *words, home=copied)
    assert (code, result["status"]) == (0, "skipped")

    snapshot = open_smoke().warehouse.current("smoke").snapshot_id
    today = datetime.datetime.now(datetime.UTC).date()
    sentence = (
        f"features at snapshot {snapshot} of table 'smoke': expected none that is deprecated, got 'cat_user', deprecated since "
        f"{today}, too many users; instead: 'cat_item'. "
        "Read the alternatives, or set features.allow_deprecated=true."
    )
    for flow in (train, preprocess):
        code, result, _ = command(flow, CONFIG, home=copied)
        assert (code, result["error"]) == (1, sentence)
    assert not (copied / "preprocessing").exists()
    assert not (copied / "runs").exists()
    allowed = load(CONFIG, {"features.allow_deprecated": True})
    assert allowed.semantics() == identity
    assert resolve_job(Workspace(allowed), snapshot, False).done is not None  # the existing model

    code, result, log = command(features, CONFIG, "action=set", "name=cat_user", "state=beta", home=copied)
    assert (code, result["error"]) == (
        1, "feature 'cat_user', which is deprecated: expected active as the next state, got beta. Name one of them.",
    )  # fmt: skip
    code, result, log = command(
        features, CONFIG, "action=set", "name=cat_user", "state=active", "owner=ann", home=copied
    )
    assert code == 0, log
    resolve_dataset(open_smoke(), None)
    code, result, log = command(features, CONFIG, "action=history", "name=cat_user", home=copied)
    assert [(one["state"], one["alternatives"], one["owner"]) for one in result["events"]] == [
        ("deprecated", ["cat_item"], None),
        ("active", [], "ann"),
    ]


def test_a_retyped_feature_is_named_with_its_snapshot(command, small):
    warehouse = open_smoke().warehouse
    with warehouse.table("smoke").update_schema() as update:
        update.delete_column("num_price")
    with warehouse.table("smoke").update_schema() as update:
        update.union_by_name(pa.schema([("num_price", pa.string())]))
    _, result, _ = command(ingest, CONFIG, "source.generator.days=5", home=small)
    assert "columns of table 'smoke'" in result["error"]  # the source's prices are still numbers
    day = datetime.date(2025, 2, 1)
    newer = write_days(warehouse, rows_of(day, num_price=["free"]), name="smoke")
    with pytest.raises(ConfigError) as refused:
        resolve_job(open_smoke(), None, force=False)
    assert str(refused.value) == (
        f"column 'num_price' at snapshot {newer.snapshot_id} of table 'smoke': expected numbers for a dense feature, "
        "got large_string. Move it to features.sparse, or convert the column."
    )
    assert not (small / "runs").exists()


def test_a_feature_dropped_and_added_again_has_no_old_values(small, caplog):
    config = load(CONFIG, {"features.dense.0.columns": ["num_price"], "features.dense.1.columns": ["num_quality"]})
    warehouse = Workspace(config).warehouse
    before = Worker(resolve_dataset(Workspace(config), None)[1]["train"], warehouse)
    old = pa.concat_tables([before.read_selected(fragment) for fragment in before.fragments()])
    assert old["num_price"].null_count < len(old)
    with warehouse.table("smoke").update_schema() as update:
        update.delete_column("num_price")
    day = datetime.date(2025, 2, 1)
    write_days(warehouse, rows_of(day, num_price=[1.5]), name="smoke", anew=["num_price"])

    from pipeline.jobs.training.run import pin_job

    job = pin_job(Workspace(config), None, False)
    assert "coverage 0 on the training days: num_price" in caplog.text
    worker = Worker(job.data["train"], warehouse)
    new = pa.concat_tables([worker.read_selected(fragment) for fragment in worker.fragments()])
    assert new["num_price"].null_count == len(new) == len(old)
    assert new["num_quality"].equals(old["num_quality"])


ABSENT = {
    "features.dense.1.columns": ["num_click_share", "num_new"],
    "features.dense.1.on_missing": "default",
    "features.sparse.1.columns": ["list_*", "list_new"],
    "features.sparse.1.on_missing": "default",
    "training.world_size": 1,
    "training.threads_per_rank": 1,
    "preprocessing.executor": "inline",
}


@pytest.mark.nightly
def test_an_absent_column_is_null_in_training_and_does_not_affect_the_model(command, copied):
    code, result, log = command(
        train, CONFIG, *(f"{key}={str(value).replace(chr(39), '')}" for key, value in ABSENT.items()), home=copied
    )
    assert code == 0, log
    assert "table 'smoke' lacks num_new, list_new: read as null (on_missing: default)" in log
    config = load(CONFIG, ABSENT)
    model = LoadedModel(
        download_packed(Workspace(config).tracking, "smoke", result["model"]["version"], copied / "fetched")
    )
    assert not {"num_new", "list_new"} & set(model.columns)
    assert {feature.name for feature in model.plan.sparse} >= {"list_new"}
    row = {name: [None] for name in model.columns}
    plain = model.probabilities(row)
    assert model.probabilities(row | {"list_new": [[1, 2]], "num_new": [9.0]}) == plain
    schema = Workspace(config).warehouse.schema(Workspace(config).warehouse.current("smoke"))
    assert columns_of(model.plan, schema) == model.columns
