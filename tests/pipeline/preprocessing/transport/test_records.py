"""Arrays survive their way as records, and a rank's share is the part of the group that is its own."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.preprocessing.epoch.batches import cut_share, join_share
from pipeline.preprocessing.transport.records import chunk_records, from_record, join_chunks, to_record

SIZES = st.integers(0, 40)


def equal(a: Any, b: Any) -> bool:
    return bool(a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b))


@given(rows=SIZES, width=st.integers(0, 5), ids=SIZES, wide=st.booleans())
def test_chunks_come_back_equal_aligned_and_writable(rows: int, width: int, ids: int, wide: bool) -> None:
    draw = np.random.default_rng(rows + 100 * ids)
    split: dict[str, np.ndarray] = {}
    for chunk in range(3):
        split |= {
            f"{chunk}.dense": draw.random((rows, width), np.float32),
            f"{chunk}.labels": draw.random(rows, np.float32),
            f"{chunk}.starts": np.arange(rows + 1),
            f"{chunk}.ids": draw.integers(0, 100, ids).astype(np.int64 if wide else np.int32),
        }
    sent = [pa.ipc.read_record_batch(record.serialize(), record.schema) for record in chunk_records(split)]
    found = join_chunks(sent)
    assert found.keys() == split.keys()
    for name, array in split.items():
        assert equal(found[name], array), name
        assert found[name].flags.aligned
        assert found[name].flags.writeable


@pytest.mark.parametrize(
    "column",
    [pa.array([1]), pa.array([["x"]], pa.large_list(pa.string())), pa.array([[1], [2]], pa.large_list(pa.int64()))],
)
def test_records_of_others_are_refused(column: pa.Array) -> None:
    with pytest.raises(ValueError):
        from_record(pa.RecordBatch.from_arrays([column], ["labels"]))


def test_a_share_is_cut_as_a_rank_cuts_it() -> None:
    """Two batches of three and two rows for two ranks, with two features."""
    shares = np.array([[[0, 2, 0, 3], [2, 1, 3, 2]], [[3, 1, 5, 0], [4, 1, 5, 4]]])
    group = {
        "shares": shares, "dense": np.arange(10, dtype=np.float32).reshape(5, 2),
        "labels": np.arange(5, dtype=np.float32), "weights": np.ones(5, np.float32),
        "lengths": np.arange(10, dtype=np.int32), "values": np.arange(9), "totals": np.array([3.0, 2.0]),
    }  # fmt: skip
    share = cut_share(group, 1, 1)
    assert share["dense"].tolist() == [[8.0, 9.0]]
    assert (share["lengths"].tolist(), share["values"].tolist()) == ([8, 9], [5, 6, 7, 8])
    assert share["totals"].tolist() == [2.0]
    alone = join_share(from_record(to_record(share)), 1, 2)
    again = cut_share(alone, 0, 1)
    assert all(equal(again[name], share[name]) for name in share)
