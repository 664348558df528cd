"""What Optuna gives under private names only."""

from collections.abc import Mapping
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial

from storage.errors import require_private

require_private("optuna", "5.", {FrozenTrial: ["_trial_id"], Trial: ["_suggest"]})


def continue_trial(
    study: Study, stored: FrozenTrial, distributions: Mapping[str, BaseDistribution]
) -> tuple[Trial, dict[str, Any]]:
    """Returns a trial whose process has ended, with its values. A new trial would get another number."""
    trial = Trial(study, stored._trial_id)
    return trial, {key: trial._suggest(key, kind) for key, kind in distributions.items()}
