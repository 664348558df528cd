"""The folder of a packed model, in either form."""

import json

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from models.config import DLRMConfig
from models.tables import TABLES
from pipeline.errors import RegistryError
from pipeline.inference.model import LoadedModel
from pipeline.registration.register import TOLERANCE, check_probabilities, pack
from pipeline.transforms.schema import FeatureSchema

ROWS = 20_000
SCHEMA = FeatureSchema.model_validate(
    {
        "dense": [{"columns": ["age"], "transforms": [{"kind": "fill_null"}]}],
        "sparse": [
            {"columns": ["user"], "transforms": [{"kind": "sigrid_hash", "size": ROWS}]},
            {
                "columns": ["tags"],
                "table": "tag",
                "pooling": "mean",
                "transforms": [{"kind": "sigrid_hash", "size": 500}],
            },
            {
                "columns": ["liked"],
                "table": "tag",
                "pooling": "mean",
                "transforms": [{"kind": "sigrid_hash", "size": 500}],
            },
        ],
    }
)
RAW = pa.table(
    {
        "age": [0.5, None, -1.0, 2.0],
        "user": pa.array([2**62 + 1, -3, None, 7], pa.int64()),
        "tags": pa.array([[1, 2, 3], [], None, [5, 5]], pa.list_(pa.int64())),
        "liked": pa.array([[9], [1, 2], [], None], pa.list_(pa.int64())),
    }
)


@pytest.fixture
def folders(tmp_path, exported):
    """The same weights in both forms."""
    config = DLRMConfig(embedding_width=64, bottom_mlp=(4,), top_mlp=(8,))
    weights, plan = exported(SCHEMA, RAW.schema, config, spread=0.3)
    return {form: pack(tmp_path / form, weights, plan, config, RAW.schema, form) for form in ("fp32", "int8")}


def test_a_packed_model_has_no_files_of_a_killed_attempt(tmp_path, exported):
    """All files of the folder are registered."""
    config = DLRMConfig(embedding_width=64, bottom_mlp=(4,), top_mlp=(8,))
    weights, plan = exported(SCHEMA, RAW.schema, config)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / ".weights.safetensors.0a1b.tmp").write_bytes(b"half")
    folder = pack(tmp_path / "model", weights, plan, config, RAW.schema)
    assert sorted(path.name for path in folder.iterdir()) == ["model.json", "plan.json", "weights.safetensors"]


def test_int8_tables_score_like_the_rounded_weights(folders):
    """The reference holds the rounded numbers as float32 in the model that trains."""
    int8, reference = LoadedModel(folders["int8"]), LoadedModel(folders["fp32"])
    rounded = {}
    for name, value in load_file(folders["fp32"] / "weights.safetensors").items():
        if name.startswith(TABLES):
            low = value.min(1, keepdim=True).values
            step = (value.max(1, keepdim=True).values - low) / 255
            value = low + torch.round((value - low) / step) * step
        rounded[name] = value
    before = reference.score(RAW)
    reference.model.load_state_dict(rounded)
    assert np.abs(int8.score(RAW) - reference.score(RAW)).max() < 1e-5
    assert 0 < np.abs(int8.score(RAW) - before).max() < 0.02


def test_the_file_has_a_quarter_of_the_size_and_tables_stay_int8_in_memory(folders):
    sizes = {form: (folder / "weights.safetensors").stat().st_size for form, folder in folders.items()}
    assert sizes["int8"] / sizes["fp32"] == pytest.approx((64 + 8) / (64 * 4), abs=0.01)
    loaded = LoadedModel(folders["int8"])
    held = sum(tensor.nbytes for tensor in loaded.model.state_dict().values())
    assert held < 0.3 * sizes["fp32"]
    with safe_open(folders["int8"] / "weights.safetensors", "pt") as file:
        kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert {kind for name, kind in kinds.items() if name.startswith(TABLES)} == {"U8"}
    assert {kind for name, kind in kinds.items() if not name.startswith(TABLES)} == {"F32"}


def test_the_record_names_the_form(folders):
    assert {
        form: json.loads((folder / "model.json").read_text())["weights"] for form, folder in folders.items()
    } == {"fp32": "fp32", "int8": "int8"}  # fmt: skip


def rounded(terms: int, size: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities of the same float32 sums in two orders. The terms of a sum are far larger than it."""
    random = np.random.default_rng(seed)
    parts = (random.normal(size=(512, terms)) * size / np.sqrt(terms)).astype(np.float32)
    orders = [parts, parts[:, random.permutation(terms)]]
    first, second = (1 / (1 + np.exp(-np.add.accumulate(one, axis=1)[:, -1].astype(np.float64))) for one in orders)
    return first, second


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("terms", [16, 1_000])
@pytest.mark.parametrize("size", [0.01, 1.0, 6.0, 40.0])
def test_sums_in_another_order_are_the_same_model(terms, size, seed):
    """A fixed distance of probabilities would refuse some of them."""
    actual, expected = rounded(terms, size, seed)
    assert (actual != expected).any()
    check_probabilities("r", actual, expected.tolist(), TOLERANCE)


def test_log_odds_of_certain_rows_may_be_endless():
    check_probabilities("r", np.array([1.0, 0.0, 1 - 1e-12]), [1 - 1e-9, 1e-12, 1.0], TOLERANCE)


@pytest.mark.parametrize("odds", [-9.0, -3.0, 0.0, 2.0, 9.0])
def test_another_model_differs_by_more_than_rounding(odds):
    one, two = (1 / (1 + np.exp(-value)) for value in (odds, odds * 1.001 + 0.001))
    with pytest.raises(RegistryError, match="row 1 of its probe"):
        check_probabilities("r", np.array([0.5, two]), [0.5, one], TOLERANCE)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_probability_is_refused(bad):
    with pytest.raises(RegistryError, match="row 1 of its probe"):
        check_probabilities("r", np.array([0.5, bad]), [0.5, 0.5], TOLERANCE)


def test_another_number_of_probabilities_or_another_value_is_refused():
    with pytest.raises(RegistryError, match="expected 2 probabilities, got 1"):
        check_probabilities("r", np.array([0.5]), [0.5, 0.5], TOLERANCE)
    with pytest.raises(RegistryError) as caught:
        check_probabilities("r", np.array([0.25, 0.5]), [0.25, 0.75], TOLERANCE)
    assert str(caught.value) == (
        "model of run r, row 1 of its probe: expected 0.75 within 2.4e-05, the rounding of float32 sums, got 0.5, "
        "which is 0.25 apart. It is not registered; compare its plan and weights with the checkpoint's."
    )
