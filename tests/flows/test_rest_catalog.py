"""A REST catalog does for the daily work what the embedded one does."""

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from flows.clean import clean
from flows.end_to_end import end_to_end
from flows.ingest import ingest
from flows.layout import layout
from flows.score import score
from flows.train import train
from pipeline.errors import ContractError
from storage.errors import ConflictError
from storage.snapshot.writing import replace_days
from tests.homes import CONFIG, open_smoke
from tests.ports import free_port
from tests.rest import serving_catalog


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with serving_catalog(tmp_path_factory.mktemp("rest")) as properties:
        yield properties


@pytest.fixture
def keys(catalog: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    return {"warehouse.catalog": catalog, "warehouse.namespace": tmp_path.name.replace("-", "_")[:40]}


@pytest.mark.nightly
def test_the_smoke_run_and_its_upkeep(keys: dict[str, Any], smoke: Any, plain: Any) -> None:
    done = end_to_end(CONFIG, keys)
    assert done["status"] == "ok"
    assert done["train"]["weights_sha256"] == smoke["train"]["weights_sha256"]
    assert ingest(CONFIG, keys)["status"] == "skipped"
    assert train(CONFIG, keys)["status"] == "skipped"
    assert score(CONFIG, keys)["status"] == "ok"
    assert ingest(CONFIG, keys, force=True)["status"] == "ok"  # a snapshot that no training has
    assert layout(CONFIG, keys | {"warehouse.row_group_rows": 2_048}, action="apply")["status"] == "ok"
    old = keys | {"retention.runs_days": 1, "retention.snapshots_days": 1e-9, "retention.leftovers_days": 1e-9}
    removed = clean(CONFIG, old, dry_run=False)["removed"]
    assert removed["snapshots"]["count"] > 0
    assert train(CONFIG, keys, force=True)["train"]["weights_sha256"] == done["train"]["weights_sha256"]


@pytest.mark.slow
def test_two_writers_of_one_day_do_not_double_it(keys: dict[str, Any]) -> None:
    workspaces = [open_smoke(keys) for _ in range(2)]
    day = datetime.date(2025, 1, 6)
    rows = pa.table({"day": pa.array([day] * 3, pa.date32()), "user": [1, 2, 3]})
    first, second = (one.warehouse for one in workspaces)
    replace_days(first, "smoke", {day: "a"}, rows.schema, rows.to_batches(), 3)

    def meanwhile() -> Iterator[pa.RecordBatch]:
        replace_days(first, "smoke", {day: "c"}, rows.schema, rows.slice(0, 1).to_batches(), 1)
        yield from rows.to_batches()

    with pytest.raises(ConflictError):
        replace_days(second, "smoke", {day: "b"}, rows.schema, meanwhile(), 3)
    assert second.day_rows(second.current("smoke")) == {day: 1}


@pytest.mark.nightly
def test_a_wrong_token_is_one_sentence(keys: dict[str, Any], plain: Any) -> None:
    wrong = keys | {"warehouse.catalog": keys["warehouse.catalog"] | {"token": "wrong"}}
    with pytest.raises(ContractError) as caught:
        ingest(CONFIG, wrong)
    assert str(caught.value) == (
        f"cannot open the catalog at {wrong['warehouse.catalog']['uri']}: "
        "NotAuthorizedException: Not authorized. "
        "Check `warehouse.catalog`, its token or credential, and that the server runs."
    )
    wrong["warehouse.catalog"]["uri"] = f"http://user:secret@127.0.0.1:{free_port()}"
    with pytest.raises(
        ContractError,
        match=r"cannot open the catalog at http://127\.0\.0\.1:\d+: Connection refused",
    ):
        open_smoke(wrong).warehouse.catalog  # noqa: B018
