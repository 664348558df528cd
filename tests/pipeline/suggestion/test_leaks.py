"""A look at what columns tell of the label takes as many rows as it says, whatever columns the rows have."""

import duckdb
import numpy as np
import pytest

from pipeline.suggestion import leaks


@pytest.mark.parametrize("numbers", ["0", "i", "i // 7"])
def test_every_nth_row_is_read_though_a_source_has_numbers_of_its_own(
    monkeypatch: pytest.MonkeyPatch, numbers: str
) -> None:
    """Views of sources have a column `__row`, which once stood in for the number that a row got here."""
    monkeypatch.setattr(leaks, "MOST_ROWS", 100)
    seen, plain = list[int](), leaks.look_at_numbers
    monkeypatch.setattr(
        leaks, "look_at_numbers", lambda values, labels: seen.append(len(values)) or plain(values, labels)
    )
    with duckdb.connect() as connection:
        connection.sql(f"SELECT i, i % 3 = 0 AS label, {numbers} AS __row FROM range(1000) t(i)").create("rows")
        found = leaks.look_at_columns(connection, lambda names: "rows", {"i": "number"}, "label", 1_000)
    assert seen == [100]
    assert found["i"].auc == pytest.approx(0.5, abs=0.2)
    assert not np.isnan(found["i"].purity)
