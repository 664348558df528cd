"""Flow: suggests a config for a table or files, with a reason for every choice."""

if __name__ == "__main__":  # before the imports: the command starts servers that load at the same time
    from flows.runtime.front import command
    from pipeline.config.draft import load_draft

    command("suggest", load_draft, without_config={})

from collections.abc import Mapping
from typing import Any

from flows.runtime.flow import flow, open_console
from pipeline.config import RunConfig
from pipeline.config.draft import Draft, load_draft
from pipeline.jobs.features.suggest import DraftJob, given_source, write_suggestion


@flow("suggest")
def suggest(
    config: RunConfig | Draft | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    path: str | None = None,
    label: str | None = None,
    day_column: str | None = None,
    trials: int | None = None,
    minutes: float | None = None,
) -> dict[str, Any]:
    """Inspects a table or files and writes a config that trains on them, with a reason for every choice.

    Inspects the table of the config's name. Inspects the source if there is no such table, or if `path` is given.
    With `trials` or `minutes` it then ingests the rows, trains on them with other values, and writes the best.

    Args:
        config: A config; only its source is required. Its features, model and training are ignored,
            apart from how ranks run. Its split stays if every part has rows and both labels.
        overrides: Dotted key -> value; overrides the config and what is suggested.
        path: Files to inspect instead, such as data/*.parquet.
        label: Label column; None takes `features.label`.
        day_column: Column that gives the day; without one, all rows of `path` belong to one day.
        trials: Trainings with other values of `model` and `training`, judged on the validation rows.
        minutes: Time for such trainings.
    """
    draft = given_source(load_draft(config, overrides), path, label, day_column, overrides or {})
    written = write_suggestion(DraftJob(draft, open_console(draft), overrides or {}), path is not None)
    if trials is None and minutes is None:
        return written.describe()
    from pipeline.jobs.search.tune import tune  # loads what searches and trains, which a plain look does without

    return tune(written, trials, minutes)
