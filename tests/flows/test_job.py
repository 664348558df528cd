"""One training of a model at a time."""

import logging
import threading

from flows.config import load
from flows.job import alone


def test_a_second_training_of_a_model_waits_and_another_models_does_not(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    caplog.set_level(logging.INFO)
    logger, order, inside = logging.getLogger("test"), [], threading.Event()

    def second() -> None:
        with alone(load("configs/smoke.yaml", {"seed": 2}), logger):
            order.append("second")

    with alone(load("configs/smoke.yaml"), logger):
        with alone(load("configs/smoke.yaml", {"registration.model_name": "other"}), logger):
            assert caplog.messages == []
        thread = threading.Thread(target=second)
        thread.start()
        while not caplog.messages:
            inside.wait(0.01)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]
    assert caplog.messages == ["waits: another training of model 'smoke' is at work; this one begins when it ends"]
