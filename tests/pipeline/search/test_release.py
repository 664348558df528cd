"""Releases: names of candidates, their ranking, and the trials of a stage."""

import pytest

from pipeline.errors import ConfigError
from pipeline.search.config import PruneConfig, ReleaseConfig
from pipeline.search.release import CandidateStanding, make_stage, make_standing, rank_candidates, select_best
from pipeline.search.study import SearchStudy

STANDINGS = [
    CandidateStanding(name="lost", failed="no rows"),
    CandidateStanding(name="given-up", stopped=True),
    CandidateStanding(name="second", valid_ne=0.9),
    CandidateStanding(name="best", valid_ne=0.8),
    CandidateStanding(name="equal", valid_ne=0.9),
]


def test_the_config_itself_comes_first():
    assert list(ReleaseConfig(candidates={"wide": {"seed": 2}, "a": {}}).overrides) == ["base", "wide", "a"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("base", "expected a name other than `base`, which is the config itself, got 'base'. Rename it."),
        ("a b", "expected at most 64 letters, digits, _, . and -, got 'a b'. Rename it."),
    ],
)
def test_an_invalid_name_is_refused(name, said):
    with pytest.raises(ConfigError) as error:
        ReleaseConfig(candidates={name: {}})
    assert str(error.value) == f"release.candidates '{name}': {said}"


def test_parallel_is_not_part_of_the_identity():
    assert ReleaseConfig(parallel=4).identity() == ReleaseConfig().identity()
    assert ReleaseConfig(keep=4).identity() != ReleaseConfig().identity()


def test_the_leader_stops_candidates_by_default():
    assert ReleaseConfig(prune={"warmup_rows": 9}).prune.method == "leader"
    assert ReleaseConfig(prune=None).prune is None


def test_the_best_are_selected():
    assert [one.name for one in rank_candidates(STANDINGS)] == ["best", "second", "equal", "given-up", "lost"]
    assert select_best(STANDINGS, 2) == ("best", "second")
    assert select_best(STANDINGS, 9) == ("best", "second", "equal")
    assert select_best(STANDINGS[:2], 2) == ()


def test_a_stage_has_each_candidate_once_in_its_order(tmp_path):
    config, points = make_stage(("c", "a", "b"), PruneConfig(method="leader"))
    study = SearchStudy(tmp_path / "study.db", config, {}, points)
    draws = [study.next() for _ in range(4)]
    assert [draw and draw.params["candidate"] for draw in draws] == ["c", "a", "b", None]
    study.finish(0, 0.7)
    study.prune(1)
    study.fail(2, "no rows")
    assert [make_standing(record) for record in study.records()] == [
        CandidateStanding(name="c", valid_ne=0.7),
        CandidateStanding(name="a", stopped=True),
        CandidateStanding(name="b", failed="no rows"),
    ]
