"""Findings from made-up curves: with the expected shape, without it, noisy, or with missing points."""

import itertools

import pytest

from pipeline.study.measure.results import PointResult
from pipeline.study.points.points import StudyPoint
from pipeline.study.report.claims import CLAIMS
from pipeline.study.report.findings import evaluate_claims, render_study
from tests.pipeline.study.report.studies import measured, quality_point, study

BATCH, SPARSE, DENSE = "training.batch_rows", "workload.sparse_features", "workload.dense_features"
HASH, LOOKUPS = "workload.hash_size", "workload.lookups"


def verdicts(experiment, results):
    return [one.verdict for one in evaluate_claims(study(experiment, results))]


def along(axis, speeds, noise=0.01, **others):
    return [measured({axis: x} | others, speed, noise) for x, speed in speeds.items()]


def features(dense_power, sparse_power, noise=0.01):
    """Throughput as a product of powers."""
    grid = itertools.product((200, 1_600), (64, 512, 4_096), (4, 32, 128))
    return [
        measured({BATCH: b, DENSE: d, SPARSE: s}, 1e6 * d**dense_power * s**sparse_power, noise) for b, d, s in grid
    ]


def test_fewer_features_are_faster():
    assert verdicts("E1", features(-0.2, -0.8)) == ["agrees", "agrees"]
    assert verdicts("E1", features(0.0, 0.5)) == ["disagrees", "disagrees"]
    assert verdicts("E1", features(-0.01, -0.8, noise=0.2)) == ["agrees", "cannot tell"]


def test_the_figure_is_the_ratio_of_the_ends():
    [sparse, dense] = evaluate_claims(study("E1", features(0.0, -1.0)))
    assert sparse.measured == ("sparse_features 4 to 128: throughput times 0.03 (0.03 to 0.03); 6 of 6 curves agree")
    assert (
        dense.measured
        == "dense_features 64 to 4096: throughput times 1.00 (1.00 to 1.00); 0 of 6 curves agree, 6 disagree"
    )


def test_curves_that_contradict_each_other_cannot_tell():
    results = along(SPARSE, {4: 100.0, 8: 50.0}, **{BATCH: 1}) + along(SPARSE, {4: 100.0, 8: 120.0}, **{BATCH: 2})
    [sparse, _] = evaluate_claims(study("E1", results))
    assert (sparse.verdict, sparse.measured[-31:]) == ("cannot tell", "1 of 2 curves agree, 1 disagree")


def test_batches_saturate_or_do_not():
    rows = (50, 200, 800, 3_200, 12_800)
    saturating = {b: 1e5 * b / (b + 400) for b in rows}
    assert verdicts("E2", along(BATCH, saturating)) == ["agrees", "agrees"]
    assert verdicts("E2", along(BATCH, {b: 10.0 * b for b in rows})) == ["agrees", "disagrees"]
    assert verdicts("E2", along(BATCH, dict.fromkeys(rows, 1e4))) == ["disagrees", "cannot tell"]
    assert verdicts("E2", along(BATCH, dict.fromkeys(rows, 1e4), noise=0.3)) == ["cannot tell", "cannot tell"]
    assert verdicts("E2", along(BATCH, {50: 1.0, 200: 2.0})) == ["agrees", "cannot tell"]


def test_hash_size_matters_or_does_not():
    sizes = (1_000, 100_000, 10_000_000)
    assert verdicts("E3", along(HASH, dict(zip(sizes, (100.0, 105.0, 80.0), strict=True)))) == ["agrees"]
    assert verdicts("E3", along(HASH, dict(zip(sizes, (100.0, 40.0, 100.0), strict=True)))) == ["disagrees"]
    assert verdicts("E3", along(HASH, dict(zip(sizes, (100.0, 80.0, 100.0), strict=True)), noise=0.2)) == [
        "cannot tell"
    ]


def test_mlps_are_two_axes():
    widths, deeper = (64, 256, 1_024), {2: 1.0, 3: 0.7}
    steep = [measured({"mlp": f"{w}^{n}"}, 1e5 * deeper[n] / (1 + (w / 256) ** 2)) for w in widths for n in deeper]
    assert verdicts("E4", steep) == ["agrees", "agrees", "agrees"]
    even = [measured({"mlp": f"{w}^{n}"}, 1e5 / w) for w in widths for n in deeper]
    assert verdicts("E4", even) == ["agrees", "cannot tell", "disagrees"]


def test_placements_are_compared_by_name():
    slower = {"one rank": 100.0, "table_wise": 80.0, "row_wise": 60.0, "uvm": 10.0}
    results = along("placement", slower)
    assert verdicts("E5", results) == ["agrees", "agrees"]
    assert evaluate_claims(study("E5", results))[0].measured == "uvm / one rank 0.10"
    assert verdicts("E5", along("placement", {"one rank": 100.0, "table_wise": 130.0})) == ["cannot tell", "disagrees"]
    assert verdicts("E5", along("placement", {"one rank": 100.0, "table_wise": 99.0})) == ["cannot tell", "cannot tell"]


def test_quality_against_the_batch():
    assert verdicts("E6", [quality_point(1_024, 0.75, 0.75), quality_point(16_384, 0.81, 0.765)]) == ["agrees"] * 3
    assert verdicts("E6", [quality_point(1_024, 0.75, 0.75), quality_point(16_384, 0.81, 0.81)]) == [
        "agrees",
        "disagrees",
        "agrees",
    ]
    assert verdicts("E6", [quality_point(1_024, 0.75, 0.75), quality_point(16_384, 0.72, 0.72)]) == ["disagrees", "cannot tell", "disagrees"]  # fmt: skip
    assert (
        verdicts("E6", [quality_point(1_024, 0.75, 0.75), quality_point(16_384, 0.751, 0.751)]) == ["cannot tell"] * 3
    )
    [_, tuned, _] = evaluate_claims(study("E6", [quality_point(16_384, 0.81, 0.765), quality_point(1_024, 0.75, 0.75)]))
    assert tuned.measured == "batch_rows 16384: NE 0.8100, tuned 0.7650: 75% of the loss"


def test_production_models_in_order():
    assert verdicts("E7", along("model", {"M1": 50.0, "M2": 100.0, "M3": 9.0})) == ["agrees"]
    assert verdicts("E7", along("model", {"M1": 50.0, "M2": 40.0, "M3": 9.0})) == ["disagrees"]


def test_lengths_and_hash_size():
    grid = itertools.product((1_000, 1_000_000), (1, 8, 32), ("fixed", "power_law"))
    results = [measured({HASH: h, LOOKUPS: n, "workload.lengths": kind}, 1e5 / n) for h, n, kind in grid]
    assert verdicts("E8", results) == ["agrees", "agrees"]


@pytest.mark.parametrize("experiment", CLAIMS)
def test_without_points_nothing_is_said(experiment):
    gone = PointResult(
        point=StudyPoint(values={"placement": "uvm"}, settings={}), state="failed", reason="no | memory\nleft"
    )
    for results in ([], [gone], [measured({}, 1.0)]):
        found = evaluate_claims(study(experiment, results))
        assert [one.verdict for one in found] == ["cannot tell"] * len(CLAIMS[experiment])
        assert all(one.measured for one in found)


def test_a_study_of_ones_own_has_no_findings():
    assert evaluate_claims(study(None, features(-0.2, -0.8))) == []


def test_the_page_has_text_and_table():
    results = [measured({SPARSE: 4}, 2_000.0), measured({SPARSE: 8}, 1_000.0)]
    gone = PointResult(
        point=StudyPoint(values={SPARSE: 16}, settings={}), state="left out", reason="needs | CUDA\nhere"
    )
    page = render_study(study("E1", [*results, gone]))
    lines = page.splitlines()
    assert lines[:3] == ["### E1", "", "Toy 9000, 2 cores, 24 GiB, torch 2.0, commit c0ffee"]
    assert "Of 2 shapes of the paper this machine shows 1; it disagrees with 0 and cannot tell of 1." in lines
    assert "| figure 10 | throughput falls with the number of sparse features | sparse_features 4 to 8: throughput times 0.50 | **agrees** |" in lines  # fmt: skip
    table = lines[-5:]
    assert {line.count("|") for line in table} == {table[0].count("|")}
    assert table[2].startswith("| sparse_features 4 | 2,000 | 1,980 to 2,020 | 5 |")
    assert table[2].endswith("| 1,234 | 300 | 220 | 10 | 1,000 |")
    assert table[4].startswith("| sparse_features 16 | left out: needs / CUDA here |")


def test_the_machine_of_a_study_is_wrapped():
    versions = {f"library{number}": "1.2.3" for number in range(20)}
    facts = render_study(study("E1", []).model_copy(update={"versions": versions})).split("\n\n")[1]
    assert max(map(len, facts.splitlines())) <= 120
    assert all(f"library{number} 1.2.3," in facts.replace("\n", " ") for number in range(20))


def test_the_table_of_a_study_of_quality():
    lines = render_study(study("E6", [quality_point(1_024, 0.75, 0.7)])).splitlines()
    assert lines[-3:] == ["| point | ne | tuned_ne |", "| --- | --- | --- |", "| batch_rows 1024 | 0.7500 | 0.7000 |"]
