"""Releases: names of candidates, their ranking, and the trials of a stage."""

import pytest

from pipeline.errors import ConfigError
from pipeline.jobs.search.release import CandidateStanding, open_stage, rank_candidates
from pipeline.search.config import PruneConfig, ReleaseConfig


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


def test_a_stage_has_each_candidate_once_in_its_order_and_ranks_them(tmp_path):
    names = ("failed", "stopped", "second", "best", "equal")
    study = open_stage(tmp_path, names, PruneConfig(method="leader"))
    draws = [study.next() for _ in range(6)]
    assert [draw and draw.params["candidate"] for draw in draws] == [*names, None]
    study.fail(0, "no rows")
    study.prune(1)
    for number, ne in enumerate((0.9, 0.8, 0.9), 2):
        study.finish(number, ne)
    assert rank_candidates(study.records()) == [
        CandidateStanding(name="best", valid_ne=0.8),
        CandidateStanding(name="second", valid_ne=0.9),
        CandidateStanding(name="equal", valid_ne=0.9),
        CandidateStanding(name="stopped", stopped=True),
        CandidateStanding(name="failed", failed="no rows"),
    ]
