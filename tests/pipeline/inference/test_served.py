"""A served version: what it needs before it answers, and what it loads afterwards."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from models.config import DLRMConfig
from pipeline.inference.files import MODEL
from pipeline.registration.register import pack, requirements_of
from pipeline.transforms.schema import FeatureSchema
from tests.bare import run_with

SCHEMA = FeatureSchema.model_validate(
    {
        "dense": [{"columns": ["age"], "transforms": [{"kind": "fill_null"}]}],
        "sparse": [{"columns": ["user", "tags"], "transforms": [{"kind": "sigrid_hash", "size": 50}]}],
    }
)
COLUMNS = pa.schema({"age": pa.int64(), "user": pa.int64(), "tags": pa.list_(pa.int64())})
BODY = b'{"dataframe_split": {"columns": ["age", "user", "tags"], "data": [[1, 2, [3]]]}}'
OF_THE_SERVER = ("orjson",)
"""What `dlrm serve` needs beside the model's requirements. It runs in the environment of the project."""


@pytest.mark.parametrize("form", ["fp32", "int8"])
@pytest.mark.parametrize("interaction", ["dot", "dcn"])
def test_only_cross_layers_need_torchrec_and_only_rare_bodies_mlflow(tmp_path, exported, interaction, form):
    """Both take seconds to import, and so does PyTorch's compiler."""
    config = DLRMConfig(embedding_width=4, bottom_mlp=(4,), top_mlp=(8,), interaction=interaction)
    weights, plan = exported(SCHEMA, COLUMNS, config)
    folder = pack(tmp_path / "model", weights, plan, config, COLUMNS, form)
    Path(folder, "example.json").write_bytes(BODY)
    late = ["mlflow"] if interaction == "dcn" else ["mlflow", "torchrec", "torch._dynamo"]
    code = f"""
import sys
from pathlib import Path
from pipeline.inference.served import open_served
model = open_served(Path("{folder}"))
model.warm(Path("{folder}", "example.json"))
assert len(model.score_rows(model.read_invocation({BODY!r}))) == 1
early = [name for name in {late} if sys.modules.get(name)]
assert not early, early
model.warm_rest()
assert "mlflow" in sys.modules
"""
    run_with([*requirements_of(json.loads((folder / MODEL).read_text())), *OF_THE_SERVER], code)
