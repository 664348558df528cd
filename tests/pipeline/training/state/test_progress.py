"""Loss sums against scikit-learn."""

import numpy as np
import pytest
from sklearn.metrics import log_loss

from pipeline.training.state.progress import LossSums


def test_ne_is_log_loss_over_entropy() -> None:
    random = np.random.default_rng(0)
    labels, predictions = (random.random(500) < 0.2).astype(float), random.uniform(0.01, 0.9, 500)
    entropy = log_loss(labels, np.full(500, labels.mean()))
    parts = [
        LossSums(
            rows=len(y), labels=float(y.sum()), predictions=float(p.sum()),
            loss=float(log_loss(y, p, labels=[0, 1], normalize=False)),
        )
        for y, p in ((labels[:100], predictions[:100]), (labels[100:], predictions[100:]))
    ]  # fmt: skip
    assert parts[0].plus(parts[1]).ne == pytest.approx(log_loss(labels, predictions) / entropy, rel=1e-12)
    assert LossSums().plus(parts[0]) == parts[0]


@pytest.mark.parametrize("labels", [0.0, 5.0])
def test_ne_of_one_class_is_undefined(labels: float) -> None:
    assert LossSums(rows=5.0, loss=1.0, labels=labels).ne is None
