"""Points: every combination once, reduced by the scale, each with its own key."""

import pytest

from pipeline.errors import ConfigError
from pipeline.study.points.config import CharacterizeConfig
from pipeline.study.points.points import StudyPoint, list_points, thin_values

ROWS, SIZE = "training.batch_rows", "workload.hash_size"


def made(**settings) -> list[StudyPoint]:
    return list_points(CharacterizeConfig.model_validate(settings))


def test_points_are_the_combinations_and_the_last_axis_changes_fastest():
    found = made(axes={ROWS: [200, 1_600], "mlp": {"64^2": {"model.bottom_mlp": [64, 64]}, "own": {}}})
    assert [point.name for point in found] == [
        "batch_rows 200, mlp 64^2", "batch_rows 200, mlp own", "batch_rows 1600, mlp 64^2", "batch_rows 1600, mlp own",
    ]  # fmt: skip
    assert found[0].settings == {ROWS: 200, "model.bottom_mlp": [64, 64]}
    assert found[3].settings == {ROWS: 1_600}
    assert len({point.key for point in found}) == 4


def test_without_axes_there_is_one_point():
    assert made() == [StudyPoint(values={}, settings={})]


def test_a_key_depends_only_on_the_settings():
    one = StudyPoint(values={ROWS: 200}, settings={ROWS: 200, "seed": 1})
    assert one.key == StudyPoint(values={"rows": "few"}, settings={"seed": 1, ROWS: 200}).key
    assert one.key != StudyPoint(values={ROWS: 200}, settings={ROWS: 201, "seed": 1}).key


def test_a_scale_thins_axes_of_numbers_and_shrinks_hash_sizes():
    found = made(axes={ROWS: [128, 256, 512, 1_024, 2_048]}, workload={"hash_size": 100_000}, scale=0.3)
    assert [point.settings for point in found] == [
        {ROWS: rows, "characterize.workload.hash_size": 30_000} for rows in (128, 2_048)
    ]
    along = made(axes={SIZE: [1_000, 10_000, 100_000]}, workload={}, scale=0.5)
    assert [point.settings["characterize.workload.hash_size"] for point in along] == [500, 50_000]
    assert [point.values[SIZE] for point in along] == [500, 50_000]  # as measured
    named = made(axes={"M": {"M1": {SIZE: 10}, "M2": {}}}, workload={"hash_size": 3_000}, scale=0.01)
    assert [point.settings["characterize.workload.hash_size"] for point in named] == [1, 30]


@pytest.mark.parametrize("scale", [0.01, 0.2, 0.5, 0.77, 1.0])
@pytest.mark.parametrize("count", [1, 2, 3, 6, 17])
def test_thinning_keeps_both_ends_and_no_value_twice(count, scale):
    values = list(range(count))
    kept = thin_values(values, scale)
    assert (kept[0], kept[-1]) == (0, count - 1)
    assert sorted(set(kept)) == kept
    assert len(kept) >= min(count, 2)


def test_a_hash_size_that_is_no_number_is_left_to_the_config():
    assert made(axes={SIZE: ["1e5"]}, workload={}, scale=0.5)[0].settings == {"characterize.workload.hash_size": "1e5"}


@pytest.mark.parametrize(
    ("settings", "twice"),
    [
        ({"axes": {ROWS: [200, 200]}}, "batch_rows 200; batch_rows 200"),
        ({"axes": {"mlp": {"a": {"seed": 2}, "b": {"seed": 2}}}}, "mlp a; mlp b"),
        ({"axes": {SIZE: [1, 2]}, "workload": {}, "scale": 0.1}, "hash_size 1; hash_size 1"),
    ],
)
def test_the_same_point_twice_is_refused(settings, twice):
    with pytest.raises(ConfigError) as error:
        made(**settings)
    assert str(error.value) == (
        f"characterize.axes: expected points that differ, got two equal ones: {twice}. Remove one, or raise "
        "characterize.scale."
    )
