"""What the serving benchmark takes from LoadGen."""

import pytest

from benchmarks.serving import read_loadgen

SUMMARY = """
Scenario : Server
Mode     : PerformanceOnly
Completed samples per second    : 65.51
Result is : {verdict}
  Performance constraints satisfied : Yes
  Min duration satisfied : Yes
  Min queries satisfied : Yes
  Early stopping satisfied: {early}

99.00 percentile latency (ns)   : 54700000
"""


@pytest.mark.parametrize(("verdict", "early", "not_met"), [("VALID", "Yes", []), ("INVALID", "NO", ["Early stopping"])])
def test_the_verdict_is_that_of_loadgen(verdict, early, not_met):
    """A percentile within the limit is not enough: a run may be too short to be certain of it."""
    assert read_loadgen(SUMMARY.format(verdict=verdict, early=early)) == {
        "verdict": verdict,
        "not_met": not_met,
        "p99_ms": 54.7,
        "completed_per_second": 65.51,
    }


def test_a_run_without_a_summary_is_not_valid():
    assert read_loadgen("")["verdict"] == "none"
