"""Input of a rank. The launcher makes it, so this module imports nothing heavy."""

from pydantic import BaseModel, Field

from models.config import DLRMConfig
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.transport.addresses import ServiceAddress
from pipeline.processes.build import Build
from pipeline.training.config import TrainConfig
from pipeline.training.tables.plan import ShardingPlan
from pipeline.transforms.plan.carry_over import Start
from pipeline.transforms.plan.plan import Plan

WEIGHTS, PROBE = "weights.safetensors", "probe.json"
"""Files in a run's folder: the weights, and the probabilities of the first evaluation rows."""
SERVICE_FOLDER = "preprocessing"
"""Folder in a run's folder for the logs of the preprocessing and its list of quarantined rows."""


class RankSpec(BaseModel, frozen=True):
    """All that a rank needs to know."""

    train: DataSpec
    valid: DataSpec | None
    probe: DataSpec
    """The evaluation rows. The first ones are the probe."""
    model: DLRMConfig
    training: TrainConfig
    preprocessing: PreprocessingConfig
    service: str | ServiceAddress | None = Field(default=None, repr=False)
    """Address of the preprocessing service for `train` and `valid`. None: each rank reads for itself."""
    valid_rows: int = 0
    """Rows of `valid`."""
    placement: ShardingPlan | None = None
    """The sharding plan. None: the planner makes it without statistics of the tables' use."""
    seed: int
    folder: str
    """Folder for checkpoints and the exported model."""
    store: str | None = None
    """Address of the same below `storage.path`, for checkpoints and weights. Access to it is as to the warehouse's."""
    claim: str | None = None
    """Token with which the training has claimed its checkpoints in `store`; see `CheckpointIndex`."""
    start: Start | None = None
    """The training that this one continues. None: it starts from initial weights."""

    build: Build | None = None
    """What the training that made this computes with; ranks must agree. None: they are of its own server."""

    @property
    def plan(self) -> Plan:
        """The preprocessing plan of the model."""
        return self.train.plan


def checkpoint_identity(model: DLRMConfig, training: TrainConfig, plan: Plan) -> dict[str, str]:
    """Returns what a checkpoint must match: transforms, model and optimizers."""
    settings = {f"model.{key}": value for key, value in model.model_dump(mode="json").items()}
    optimizers = training.model_dump(mode="json", include={"dense_optimizer", "table_optimizer", "table_precision"})
    settings |= {f"training.{key}": value for key, value in optimizers.items()}
    return {key: str(value) for key, value in settings.items()} | {"preprocessing plan": plan.hash}
