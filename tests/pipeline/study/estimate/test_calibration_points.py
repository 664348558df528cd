"""Calibration points cover the space of models, and no single point dominates the time."""

from pipeline.study.estimate.calibration_points import MOST_HELD, MOST_LOOKED_UP, SPANS, draw_points


def test_a_longer_draw_extends_a_shorter_one():
    points = draw_points(48, [1, 2])
    assert points[:10] == draw_points(10, [1, 2])
    assert len({point.key for point in points}) == 48


def test_values_lie_in_their_spans_and_span_them():
    points = [{key.rsplit(".", 1)[1]: value for key, value in p.settings.items()} for p in draw_points(48, [1, 2])]
    for name in ("dense_features", "sparse_features", "lookups", "batch_rows", "embedding_width"):
        low, high = SPANS[name]
        values = [point[name] for point in points]
        assert low <= min(values) <= 1.5 * low
        assert max(values) >= high / 2, name
        assert max(values) <= high
    assert {point["interaction"] for point in points} == {"dot", "cat", "dcn"}
    assert {len(point["top_mlp"]) for point in points} == {1, 2, 3}
    assert {point["world_size"] for point in points} == {1, 2}


def test_no_point_is_too_large():
    for point in draw_points(64, [1]):
        one = {key.rsplit(".", 1)[1]: value for key, value in point.settings.items()}
        width = one["sparse_features"] * one["embedding_width"]
        assert width * one["hash_size"] <= 1.01 * MOST_HELD
        assert width * one["lookups"] * one["batch_rows"] <= max(1.01 * MOST_LOOKED_UP, 128 * 100 * 32 * 128)
