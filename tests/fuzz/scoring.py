"""Damaged requests to the served model, as MLflow's server hands them on."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import mlflow
import pyarrow as pa
import torch
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.pyfunc.model import _PythonModelPyfuncWrapper
from mlflow.pyfunc.scoring_server import invocations
from safetensors.torch import save_file

from models.config import DLRMConfig
from models.dlrm import DLRM
from pipeline.errors import InputError
from pipeline.inference.mlflow_bodies import signature_of
from pipeline.inference.model import LoadedModel
from pipeline.registration.register import pack
from pipeline.registration.scorer import Scorer
from pipeline.transforms.plan.plan import build_plan
from pipeline.transforms.schema import FeatureSchema
from tests.fuzz.harness import Case, require
from tests.fuzz.mutate import mutate_bytes, mutate_json, mutate_value

HASHED = [{"kind": "sigrid_hash", "size": 50}]
SCHEMA = FeatureSchema.model_validate(
    {
        "dense": [{"columns": ["age"], "transforms": [{"kind": "fill_null"}]}],
        "sparse": [
            {"columns": ["user", "country"], "transforms": HASHED},
            {"columns": ["tags"], "pooling": "mean", "transforms": [{"kind": "first_x", "limit": 2}, *HASHED]},
        ],
    }
)
COLUMNS = pa.schema({"age": pa.float64(), "user": pa.int64(), "country": pa.string(), "tags": pa.list_(pa.int64())})
CONFIG = DLRMConfig(embedding_width=4, bottom_mlp=(4,), top_mlp=(8,))
SENT = {
    "age": [25.0, None, 61.0],
    "user": [[2**62], [-3], None],
    "country": ["DE", None, "Å"],
    "tags": [[1, 2, 3], [], None],
}
ROWS = [dict(zip(SENT, row, strict=True)) for row in zip(*SENT.values(), strict=True)]


def _load(folder: Path) -> LoadedModel:
    torch.manual_seed(5)
    plan = build_plan(SCHEMA, COLUMNS)
    save_file(DLRM(CONFIG, len(plan.dense), plan.sparse).state_dict(), folder / "weights.safetensors")
    return LoadedModel(pack(folder / "model", folder / "weights.safetensors", plan, CONFIG, COLUMNS))


@contextmanager
def rows(folder: Path) -> Iterator[Case]:
    """Rows given to the model itself: dicts of lists and JSON text."""
    loaded = _load(folder)

    def case(random: Random) -> None:
        if random.random() < 0.5:
            loaded.probabilities(mutate_json(random, random.choice([SENT, ROWS])).decode(errors="replace"))
        else:
            loaded.probabilities(mutate_value(random, SENT))

    yield case


@contextmanager
def request(folder: Path) -> Iterator[Case]:
    """Bodies of HTTP requests. Each is answered with 200, or is the caller's fault."""
    python_model = Scorer()
    python_model.loaded = _load(folder)
    meta = Model(signature=ModelSignature.from_dict(signature_of(python_model.loaded.columns).to_dict()))
    model = mlflow.pyfunc.PyFuncModel(meta, _PythonModelPyfuncWrapper(python_model, None, meta.signature))
    logging.getLogger("mlflow").setLevel(logging.CRITICAL)
    split = {"columns": list(SENT), "data": [list(row.values()) for row in ROWS]}
    bodies: list[Any] = [{"dataframe_split": split}, {"dataframe_records": ROWS}, {"inputs": SENT}, {"instances": ROWS}]
    text = b"age,user,country,tags\n25.0,7,DE,\n,8,,\n"

    def case(random: Random) -> None:
        kind = random.choice(["application/json"] * 4 + ["text/csv", "application/json; charset=x", "text/plain"])
        body = mutate_bytes(random, text) if kind == "text/csv" else mutate_json(random, random.choice(bodies))
        try:
            answer = invocations(body, kind, model, meta.get_input_schema())
        except MlflowException as error:
            require(
                400 <= error.get_http_status_code() < 500, f"status {error.get_http_status_code()}: {error.message}"
            )
            unexpected = "unexpected error while evaluating" in error.message
            require(not unexpected, f"a bare exception: {getattr(error, 'stack_trace', '')[-400:]}")
            raise InputError("request", "rows", "others", "Correct it.") from None
        except Exception:  # of MLflow's own parser, before our model has the rows; its server answers 500
            raise InputError("request", "rows", "what MLflow cannot parse", "Correct it.") from None
        require(answer.status in (200, 415), f"status {answer.status}")
        if answer.status == 200:
            found = json.loads(answer.response)["predictions"]
            require(all(0.0 <= row["probability"] <= 1.0 for row in found), "a probability")

    yield case
