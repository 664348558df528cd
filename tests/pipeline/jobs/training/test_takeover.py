"""A machine that stands still until another one has its training does no harm when it goes on."""

import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pipeline.errors import TrainingError
from pipeline.jobs.training.rank.spec import RankSpec
from pipeline.training.launch.processes import Event
from pipeline.training.state import checkpoint
from pipeline.training.state.checkpoint import BEST
from pipeline.training.state.checkpoint_index import CheckpointIndex
from pipeline.training.state.checkpoints import StoredCheckpoints
from storage.objects import ObjectFolder
from tests.objects import serving_objects
from tests.pipeline.conftest import SETTINGS, Run, completed, start


@pytest.mark.nightly
def test_ranks_that_stood_still_are_refused_and_the_training_that_took_over_ends_undisturbed(
    rank_spec: Callable[..., RankSpec], undisturbed: Run, tmp_path: Path
) -> None:
    """Launcher and ranks stop at step 6. Another machine trains to the end. Then they go on, to their next save."""
    with serving_objects(tmp_path) as store:
        folder = ObjectFolder(f"s3://{store.bucket}/run/checkpoints", store.properties)

        def claimed(name: str) -> RankSpec:
            CheckpointIndex(folder, name).claim()
            spec = rank_spec(tmp_path / name, **SETTINGS)
            warehouse = spec.train.warehouse.model_copy(update={"catalog": store.properties})
            train = spec.train.model_copy(update={"warehouse": warehouse})
            return spec.model_copy(update={"train": train, "store": f"s3://{store.bucket}/run", "claim": name})

        runs: list[Run] = []

        def stand_still(event: Event) -> None:
            if event["event"] == "metrics" and event["step"] == 6:
                below = psutil.Process().children(recursive=True)
                ranks = [process for process in below if process.name().startswith("dlrm rank ")]
                assert len(ranks) == 2
                for rank in ranks:
                    rank.send_signal(signal.SIGSTOP)
                try:
                    runs.append(completed(claimed("two")))
                finally:
                    for rank in ranks:
                        rank.send_signal(signal.SIGCONT)

        with pytest.raises(TrainingError, match="got another training or attempt, which has taken them over since"):
            start(claimed("one"), stand_still, restart_limit=3)
        assert runs[0].result["weights_sha256"] == undisturbed.result["weights_sha256"]
        assert not (tmp_path / "one" / "weights.safetensors").exists()
        kept = StoredCheckpoints(tmp_path / "copy", folder)
        assert kept.names() == ["step-0000000012", "step-0000000014", BEST]
        for name in kept.names():
            found = checkpoint.export(kept.fetch(name))
            expected = checkpoint.export(undisturbed.folder / "checkpoints" / name)
            assert found.keys() == expected.keys()
            assert all(value.equal(expected[one]) for one, value in found.items())
