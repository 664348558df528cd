"""Names of metrics in MLflow. It shows a section of charts for each text before a slash.

Ranks, journals and configs use plain names.
"""

from collections.abc import Mapping

SECTIONS = {
    "eval_": "eval/",
    "gate_": "gate/",
    "judged_": "judged/",
    "train_": "train/",
    "valid_": "valid/",
    "batch_extract_": "input/extract_",
    "batch_transform_": "input/transform_",
    "batch_wait_": "input/wait_",
    "stall_": "input/stall_",
    "champion_": "day/champion_",
    "challenger_": "day/challenger_",
    "reference_": "day/reference_",
}
"""Start of a plain name -> start of the name in MLflow."""
OTHERS = {"rows_trained": "train/rows_trained", "skipped_batches": "train/skipped_batches"}


def in_section(name: str) -> str:
    """Returns the name of a metric in MLflow.

    Example:
        >>> in_section("eval_ne"), in_section("batch_wait_seconds"), in_section("pooled_ne")
        ('eval/ne', 'input/wait_seconds', 'pooled_ne')
    """
    if name in OTHERS:
        return OTHERS[name]
    start = next((start for start in SECTIONS if name.startswith(start)), "")
    return SECTIONS.get(start, "") + name.removeprefix(start)


def find_metric(metrics: Mapping[str, float], name: str) -> float | None:
    """Returns a metric of a run by its plain name."""
    return metrics.get(in_section(name))
