"""Flow: a table, or files -> a complete config with a reason for every choice."""

import sys
from collections.abc import Mapping
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE

from pipeline.config import RunConfig
from pipeline.jobs.tables import suggest as suggesting
from pipeline.jobs.training.summary import flow_run_name


@flow(name="suggest", flow_run_name=flow_run_name)
def suggest(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    path: str | None = None,
    label: str | None = None,
    day_column: str | None = None,
) -> dict[str, Any]:
    """A table, or the files of a source, in; the path of a config that trains on it out.

    Looks at the table of the config's name; at the source if there is none, or `path` is given.

    Args:
        config: A config, which may lack everything but its source; its features and split are not read.
        overrides: Dotted key -> value, put over the config.
        path: Files to look at instead, such as data/*.parquet.
        label: Column of 0 and 1; None takes `features.label`.
        day_column: Column that gives the day; without one, all rows of `path` are of one day.
    """
    settings = suggesting.given_source(suggesting.draft(config, overrides), path, label, day_column)
    return suggested(settings, path is not None)


@task(cache_policy=NO_CACHE, task_run_name="suggest")
def suggested(config: RunConfig, files: bool) -> dict[str, Any]:
    """Rows -> a config. Safe to repeat: it replaces its file."""
    observed, source = suggesting.look(config, files)
    path, suggestion = suggesting.write(config, observed, source)
    logger = get_run_logger()
    counts = {use: len(suggestion.of(use)) for use in ("dense", "sparse", "ignored")}
    for choice in suggestion.of("ignored"):
        logger.info("left out: %s: %s", choice.fact.name, choice.why)
    logger.info("%s dense, %s sparse, %s left out: %s", *counts.values(), path)
    return {
        "status": "ok",
        "config_path": str(path),
        "looked_at": source,
        "rows": observed.rows,
        "days": len(observed.days),
        **counts,
        "embedding_width": suggestion.embedding_width,
        "columns": [
            {
                "column": choice.fact.name,
                "use": choice.use,
                "why": choice.why,
                "transforms": list(choice.transforms),
                "distinct": choice.fact.distinct,
                "coverage": round(choice.fact.coverage, 4),
            }
            for choice in suggestion.choices
        ],
    }


if __name__ == "__main__":
    from flows.runtime import cli

    words = sys.argv[1:]
    without_config = bool(words) and "=" in words[0]
    cli.main(suggest, ["", *words] if without_config else words, suggesting.draft)
