"""The config of the ingest: light to import, and readable without declared features."""

import subprocess
import sys

import pytest

from pipeline.extraction.config import LabelColumns
from pipeline.extraction.samples import number_columns


@pytest.mark.parametrize("module", ["pipeline.extraction.config", "pipeline.extraction.generator.config"])
def test_importing_a_config_loads_nothing_heavy(module: str) -> None:
    heavy = "duckdb", "pyarrow", "numpy", "torch", "mlflow"
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"


def test_without_features_only_label_and_outcomes_are_numbers() -> None:
    assert number_columns(LabelColumns(), ["age", "label"], ["bought"]) == {"label", "bought"}
