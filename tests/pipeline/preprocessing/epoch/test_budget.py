"""The budget counts what is held and what comes, and frees what is dropped."""

from pipeline.preprocessing.epoch.budget import MemoryBudget


def test_bytes_are_counted_from_their_estimate_to_their_end() -> None:
    freed: list[str] = []
    budget = MemoryBudget(100, freed.append)
    budget.learn(30, 10)
    budget.learn(10, 10)  # the largest row counts
    assert (budget.split_bytes(7), budget.batch_bytes(7)) == (21, 42)
    budget.expect(60)
    assert (budget.fits(40), budget.fits(41)) == (True, False)
    budget.expect(-60)
    budget.hold(70)
    budget.offer(20)
    assert (budget.fits_early(5), budget.fits_early(6)) == (True, False)
    budget.offer(-20)
    assert budget.fits_early(6)
    budget.drop("rows", 50)
    budget.drop(None, 50)
    budget.hold(-20)
    assert (budget.used, budget.peak, freed) == (0, 70, ["rows"])
