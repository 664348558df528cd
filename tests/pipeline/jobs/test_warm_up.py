"""What a command starts before it knows whether there is something to train."""

import os
import subprocess
import sys

import pytest

from pipeline.config.files import ROOT


@pytest.mark.nightly
@pytest.mark.parametrize(("uri", "loaded"), [(None, True), ("http://127.0.0.1:9", False)])
def test_the_sql_store_of_mlflow_is_loaded_where_a_training_opens_it(uri: str | None, loaded: bool) -> None:
    code = f"""
import sys
from pipeline.jobs.warm_up import load_stores
from pipeline.registration.config import RegistrationConfig
load_stores(RegistrationConfig(tracking_uri={uri!r}))
print("mlflow.store.tracking.sqlalchemy_store" in sys.modules)
"""
    environment = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(loaded)
