"""Looks at a table or a source and writes a complete config for it."""

import datetime
import itertools
import json
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import duckdb

from pipeline.config import load
from pipeline.config.draft import Draft, load_draft
from pipeline.config.files import ROOT
from pipeline.config.run import check_name
from pipeline.data.formats.sample import DECODED, FEWEST_ROWS
from pipeline.data.formats.types import FILE, ROW
from pipeline.data.profile import Rows, stored_rows, types_of
from pipeline.errors import ConfigError, DataError
from pipeline.extraction.opening import SourceContext, SourceReader, duckdb_limits
from pipeline.extraction.own_source import find_strangers, patterns_of, remembered
from pipeline.extraction.samples import guess_unit, plain_name, unlabelled
from pipeline.extraction.sources import key_family
from pipeline.jobs.console import Console, step
from pipeline.marks import keys_apart
from pipeline.suggestion.choose import Suggestion, suggest
from pipeline.suggestion.facts import TableFacts, find_row_key, observe
from pipeline.suggestion.shape import Shape
from pipeline.suggestion.splits import ChosenSplit, choose_split
from pipeline.suggestion.write import describe_ignored, history_log, history_path, render_config
from pipeline.training.config import SPANS, TrainConfig
from pipeline.transforms.schema import unknown_column
from storage.artifacts import write_text
from storage.layout.columns import spread
from storage.names import NAME
from storage.query import column_types, connect, quote
from storage.reader import DAY, Fragment, SnapshotReader
from storage.scratch import ScratchFolder
from storage.warehouse import Warehouse

VALUES = 40_000_000
"""Values that are looked at, about: rows times columns."""
FEWEST_DAYS = 32
"""Days of a table that are looked at, however large they are."""
ONE_DAY = "2000-01-01"
"""Day of all rows of `path` if no column gives one."""
FEW_BAD = 0.01
"""Share of labels other than 0 and 1 that is left to the quarantine."""
MACHINE_KEYS = keys_apart(TrainConfig) | {
    "world_size",
    "hosts",
    "network_bytes_per_second",
    "sharding",
    "partitioner",
    "table_memory",
    "memory_per_rank_bytes",
}
"""Keys of `training` that fit a machine rather than the rows."""
SETTINGS = ("model", "training")
"""Sections whose values are suggested."""
KEPT = ("format", "date_format", "rename", "positive", "unlabelled")
"""Keys of a config's source that stay where the command names other files."""
POSITIVE = ("1", "1.0", "true", "t", "yes", "y", "positive", "pos", "click", "clicked")
"""Values of a label that count as 1 if the other value is not one of them."""


@dataclass(frozen=True)
class DraftJob:
    """What a suggestion starts from."""

    draft: Draft
    console: Console
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys that the command names. The draft has their values."""

    @cached_property
    def warehouse(self) -> Warehouse:
        """The warehouse of the draft."""
        return Warehouse(self.draft.tables, self.draft.home_path / "warehouse")


def given_source(
    draft: Draft, path: str | None, label: str | None, day_column: str | None, words: Collection[str] = ()
) -> Draft:
    """Puts a source and a label that the command names over those of the draft, and names it after its files.

    Args:
        words: Dotted keys that the command names, too.
    Raises:
        ConfigError: If neither the draft nor the parameters name a source.
    """
    changes: dict[str, Any] = {"source_keys": {}}
    named = {key.split(".")[1] for key in words if key.startswith("source.")}
    source = {} if draft.source is None else draft.source.model_dump(mode="json", exclude_unset=True)
    if path is not None:
        kept = {key: value for key, value in source.items() if key in KEPT or key in named}
        source = {**kept, **draft.source_keys, "path": path}
        changes["split"] = None
    elif draft.source is None:
        raise ConfigError("suggest", "a config with a source, or path=FILES", "neither", "Name one of them.")
    if day_column is not None:
        source |= {"day": None, "day_column": day_column}
    elif path is not None and not (source.get("day") or source.get("day_column")):
        source["day"] = ONE_DAY
    if label is not None:
        changes["features"] = draft.features.model_dump() | {"label": label}
    values = draft.model_dump(mode="json", exclude_unset=True) | changes | {"source": source}
    return _named(load_draft(values))


def _named(draft: Draft) -> Draft:
    """Gives a draft without a name that of its files, and a number if the name is another source's already."""
    paths = draft.source.path if draft.source is not None else None
    if "name" in draft.model_fields_set or paths is None:
        return draft
    name = name_of_files(paths if isinstance(paths, str) else paths[0])
    for number in itertools.count(1):
        numbered = f"{name}_{number}" if number > 1 else name
        found = draft.model_copy(update={"name": check_name(numbered)})
        if not _is_taken(DraftJob(found, Console())):
            return load_draft(draft.model_dump(mode="json", exclude_unset=True) | {"name": numbered})
    raise AssertionError


def _is_taken(job: DraftJob) -> bool:
    """Whether the name is that of another source's table or suggested config."""
    context = make_context(job)
    path = suggested_path(job.draft)
    if job.warehouse.has_table(job.draft.name):
        return bool(find_strangers(context)) or not remembered(context)
    other = load_draft(path).source if path.exists() else None
    return other is not None and patterns_of(replace(context, source=other)) != patterns_of(context)


def name_of_files(pattern: str) -> str:
    """Returns a name for the rows of files: that of the file, or of the folder of many.

    Example:
        >>> [name_of_files(one) for one in ("/data/Clicks-2.csv.gz", "s3://logs/ads/day=*/*.parquet", "/d/adult/*.csv")]
        ['clicks_2', 'ads', 'adult']
        >>> name_of_files("/data/shop/part-00000.parquet"), name_of_files("2013_features.csv")
        ('shop', 'mine_2013_rows')
    """
    parts = [part for part in pattern.split("://")[-1].split("/") if part and not re.search(r"[*?\[=]", part)]
    parts = [re.split(r"\.(?=\w+$|\w+\.\w+$)", part)[0] for part in parts]
    part = next((part for part in reversed(parts) if not re.fullmatch(r"part[-_].*|[\d_.-]*|~", part)), "mine")
    name = re.sub(r"[^a-z0-9]+", "_", part.lower()).strip("_") or "mine"
    name = name if name[0].isalpha() else f"mine_{name}"
    return re.sub(r"(_(features|held|profile|quarantine|scores))$", "_rows", name)


def suggested_path(draft: Draft) -> Path:
    """Returns the file of a suggestion."""
    return draft.home_path / "suggested" / f"{draft.name}.yaml"


@dataclass(frozen=True)
class Look:
    """What was seen, and the split that fits it."""

    observed: TableFacts
    split: ChosenSplit
    source: str
    """What was looked at, in words."""
    notes: tuple[str, ...] = ()
    """What a person should know about the rows."""

    def with_note(self, note: str) -> "Look":
        """Returns the same with another note."""
        return replace(self, notes=(*self.notes, note))


def look(job: DraftJob, files: bool) -> Look:
    """Looks at the table, or at the source where there is no such table.

    Args:
        files: Looks at the source even if there is a table.
    """
    draft, warehouse, label = job.draft, job.warehouse, job.draft.features.label
    with ExitStack() as stack:
        if not files and has_own_table(job):
            snapshot = warehouse.current(draft.name)
            spill = stack.enter_context(ScratchFolder("suggest-", warehouse.home / "tmp"))
            connection = stack.enter_context(connect([], Path(spill), **duckdb_limits(None)))
            reader = warehouse.reader(snapshot, warehouse.schema(snapshot).names)
            types = types_of(connection, reader.empty())
            days = warehouse.day_rows(snapshot)
            fragments, every = _some_fragments(reader, days, max(FEWEST_ROWS, VALUES // len(types)))
            rows = stored_rows(connection, reader, fragments, every)
            ((seen,),) = connection.sql(f"SELECT count(*) FROM {rows([])}").fetchall()
            scale = max(1.0, sum(days.values()) / max(1, seen))
            return _look(draft, connection, rows, types, seen, scale, f"table {draft.name}")
        progress = stack.enter_context(job.console.progress())
        source = stack.enter_context(SourceReader(make_context(job), progress, look_at=VALUES))
        opened = stack.enter_context(source.open(source.files))
        if opened.join is not None:
            opened.join.attribute(opened.view, f"{DAY} IS NOT NULL")
        connection, good = opened.connection, opened.create_good_view("true")
        counted = f"SELECT __reason, count(*) FROM {opened.view} WHERE __reason IS NOT NULL GROUP BY 1 ORDER BY 2 DESC"
        refused = connection.sql(counted).fetchall()
        ((count,),) = connection.sql(f"SELECT count(*) FROM {good}").fetchall()
        if not count:
            got = ", ".join(f"{reason} in {count:,} rows" for reason, count in refused) or "no rows"
            raise DataError(f"label '{label}'", "rows with 0 or 1", got, "Correct the files, or set source.positive.")
        notes = tuple(f"{round(rows * source.scale):,} rows are left out: {reason}" for reason, rows in refused)
        types = column_types(connection, good)
        scale = source.scale
        return _look(draft, connection, lambda names: quote(good), types, count, scale, "files of the source", notes)


def _look(
    draft: Draft,
    connection: duckdb.DuckDBPyConnection,
    rows: Rows,
    types: Mapping[str, str],
    seen: int,
    scale: float,
    source: str,
    notes: tuple[str, ...] = (),
) -> Look:
    label = draft.features.label
    if label not in types:
        raise unknown_column("features.label", label, list(types))
    observed = observe(connection, rows, types, seen, label, scale)
    if not 0 < observed.positives < observed.rows:
        raise ConfigError(
            f"label '{label}'", "rows with 0 and rows with 1", "a constant", "Name another: label=COLUMN."
        )
    apart = [label, *([draft.features.weight] if draft.features.weight else [])]
    split = choose_split(observed, draft.split, lambda: find_row_key(connection, rows, observed, apart))
    if scale > 1.0:
        notes = (f"looked at {seen:,} rows, spread over about {observed.rows:,}: counts are estimates", *notes)
    return Look(observed, split, source, notes)


def _some_fragments(
    reader: SnapshotReader, days: Mapping[datetime.date, int], wanted: int
) -> tuple[Sequence[Fragment], int]:
    """Returns row groups of a table, and each which of their rows to look at, for about so many rows."""
    total, most = sum(days.values()), DECODED * wanted
    if total <= 1.5 * wanted:
        return reader.fragments(days), 1
    chosen = spread([*days], max(FEWEST_DAYS, round(2 * most * len(days) / total)))
    every = reader.fragments(chosen)
    found = spread(every, math.ceil(len(every) * most / max(most, sum(one.rows for one in every))))
    return found, max(1, sum(one.rows for one in found) // wanted)


def has_own_table(job: DraftJob) -> bool:
    """Whether there is a table of the draft's name, and of its source."""
    return job.warehouse.has_table(job.draft.name) and not find_strangers(make_context(job))


def make_context(job: DraftJob) -> SourceContext:
    """Returns the draft's source with all that reading it needs."""
    assert job.draft.source is not None  # given_source refuses a draft without one
    logs = job.draft.home_path / "logs"
    return SourceContext(job.draft.source, job.draft.features, job.warehouse, job.draft.name, ROOT, logs)


def adapt_source(job: DraftJob) -> tuple[DraftJob, list[str]]:
    """Adds what the files need to be read: plain names of columns, the label's positive value, the unit of the day.

    Returns:
        The draft with these keys, and a sentence for each.
    Raises:
        ConfigError: If the label has two values and none is known to mean yes.
    """
    draft, source, label = job.draft, job.draft.source, job.draft.features.label
    assert source is not None
    keys: dict[str, Any] = {}
    notes: list[str] = []
    with (
        job.console.progress() as progress,
        SourceReader(make_context(job), progress, look_at=VALUES) as reader,
        reader.open_raw(reader.files) as raw,
    ):
        types = column_types(raw.connection, raw.view)
        names = [name for name in types if name not in (FILE, ROW) and not name.startswith("__")]
        if empty := [name for name in names if types[name] == '"NULL"']:
            notes.append(f"no values in any row, so left out: {', '.join(empty)}")
        odd = {name: plain_name(name) for name in names if not NAME.fullmatch(name)}
        odd = {name: new for name, new in odd.items() if new not in names}
        if odd:
            keys["rename"] = {**source.rename, **odd}
            listed = ", ".join(f"'{name}' to {new}" for name, new in odd.items())
            notes.append(f"source.rename gives columns names that a table takes: {listed}")
        day = source.day_column
        if day in types and source.day_unit is None and key_family(types[day]) == "integers":
            query = f"SELECT max(abs({quote(day)})) FROM {quote(raw.view)}"
            keys["day_unit"] = guess_unit(float(raw.connection.sql(query).fetchall()[0][0] or 0))
            notes.append(f"source.day_unit: '{day}' holds {keys['day_unit']} since 1970")
        if source.outcomes is None and source.positive is None and label in types:
            column = quote(label)
            values = f"SELECT CAST({column} AS VARCHAR), count(*) FROM {quote(raw.view)} WHERE {column} IS NOT NULL"
            found = dict(raw.connection.sql(f"{values} GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT 20").fetchall())
            other = sum(rows for value, rows in found.items() if _number(value) not in (0.0, 1.0))
            if not {0.0, 1.0} <= {_number(value) for value in found} or other > FEW_BAD * sum(found.values()):
                keys["positive"] = _find_positive(label, found)
                notes.append(
                    f"source.positive: '{keys['positive']}' counts as 1, "
                    + " and ".join(f"'{value}'" for value in found if value != keys["positive"]) + " as 0"
                )  # fmt: skip
        if source.outcomes is None and label in types and source.unlabelled == "quarantine":
            query = f"SELECT count(*) FROM {quote(raw.view)} WHERE {unlabelled(label)}"
            if count := raw.connection.sql(query).fetchall()[0][0]:
                keys["unlabelled"] = "skip"
                notes.append(
                    f"{round(count * reader.scale):,} rows are left out: label is null (source.unlabelled: skip)"
                )
    if not keys:
        return job, notes
    label = keys.get("rename", {}).get(label, label)
    if day in keys.get("rename", {}):
        keys["day_column"] = keys["rename"][day]
    changed = draft.model_dump(mode="json") | {"source": source.model_dump(mode="json") | keys}
    changed["features"] = {**changed["features"], "label": label}
    return replace(job, draft=load_draft(changed)), notes


def _find_positive(label: str, counts: Mapping[str, int]) -> str:
    """Returns the one of a label's two values that means yes."""
    known = [value for value in counts if value.strip().casefold() in POSITIVE]
    if len(counts) == 2 and len(known) == 1:
        return known[0]
    listed = ", ".join(f"'{value}' in {rows:,} rows" for value, rows in list(counts.items())[:5])
    more = " and others" if len(counts) > 5 else ""
    rare = min(counts, key=lambda value: counts[value])
    raise ConfigError(
        f"label '{label}'", "0 and 1", f"{listed}{more}",
        f"Name the value that counts as 1: source.positive={json.dumps(rare)}; all others count as 0.",
    )  # fmt: skip


def _number(text: str) -> float | None:
    try:
        return float({"true": "1", "false": "0"}.get(text, text))
    except ValueError:
        return None


@dataclass(frozen=True)
class Written:
    """A suggested config in its file."""

    job: DraftJob
    """With what the files need to be read."""
    seen: Look
    suggestion: Suggestion
    path: Path
    history: Path | None = None
    """The file with a history, if one is proposed."""

    def describe(self) -> dict[str, Any]:
        """Returns the result of the command."""
        return {
            "status": "ok",
            "config_path": str(self.path),
            "history_path": None if self.history is None else str(self.history),
            "looked_at": self.seen.source,
            "rows": self.seen.observed.rows,
            "days": len(self.seen.observed.days),
            **{use: len(self.suggestion.of(use)) for use in ("dense", "sparse", "ignored")},
            "split": self.suggestion.split.config,
            "notes": list(self.seen.notes),
            "columns": [
                {
                    "column": choice.fact.name,
                    "use": choice.use,
                    "why": choice.why,
                    "transforms": list(choice.transforms),
                    "distinct": choice.fact.distinct,
                    "coverage": round(choice.fact.coverage, 4),
                }
                for choice in self.suggestion.choices
            ],
        }


@step("suggest")
def write_suggestion(job: DraftJob, files: bool) -> Written:
    """Rows -> a config. Safe to repeat: it replaces its file.

    Args:
        files: Looks at the source even if there is a table.
    """
    notes: list[str] = []
    if files or not has_own_table(job):
        job, notes = adapt_source(job)
    if job.draft.unread:
        notes.append(f"not taken over from the config, add what you need: {', '.join(job.draft.unread)}")
    seen = look(job, files)
    written = write(job, replace(seen, notes=(*notes, *seen.notes)))
    logger, suggestion = job.console.log, written.suggestion
    for note in written.seen.notes:
        logger.info("%s", note)
    for line in describe_ignored(suggestion.of("ignored")):
        logger.info("left out: %s", line)
    logger.info("split: %s", suggestion.split.why)
    if suggestion.history is not None and written.history is not None:
        logger.info("with a history of each %s: %s", suggestion.history.user, written.history)
    counts = [len(suggestion.of(use)) for use in ("dense", "sparse", "ignored")]
    logger.info("%s dense, %s sparse, %s left out: %s", *counts, written.path)
    return written


def write(job: DraftJob, seen: Look, tuned: Mapping[str, Mapping[str, Any]] = MappingProxyType({})) -> Written:
    """Writes the suggested config as a file below `home` that every flow takes.

    Args:
        tuned: Section -> keys that win over those of the command and the suggested ones.
    """
    draft, label, weight = job.draft, job.draft.features.label, job.draft.features.weight
    apart: dict[str, str] = {}
    if draft.evaluation.true_probability:
        apart[draft.evaluation.true_probability] = "the true probability (evaluation.true_probability)"
    if weight:
        apart[weight] = "the rows' weight"
    source = draft.source
    gives_day = (source.day_column, source.day_unit) if source is not None and source.day_column else None
    suggestion = suggest(seen.observed, label, seen.split, apart, gives_day)
    seen = replace(seen, notes=tuple(dict.fromkeys([*seen.notes, *suggestion.notes])))
    suggestion = replace(suggestion, shape=_choose_settings(job, suggestion.shape, tuned))
    rows, days = seen.observed.rows, len(seen.observed.days)
    path = suggested_path(draft)
    shown = str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)
    kept = draft.sections()
    files = {path: (shown, kept)}
    if (log := history_log(suggestion, kept)) is not None:
        files[Path(history_path(str(path)))] = (history_path(shown), kept | {"events": log})
    for file, (name, sections) in files.items():
        text = render_config(suggestion, sections, rows, days, seen.source, weight, seen.notes, name)
        write_text(file, text, 0o600)  # the catalog's properties may hold a password
        load(file)
    return Written(job, seen, suggestion, path, next((file for file in files if file != path), None))


def _choose_settings(job: DraftJob, shape: Shape, tuned: Mapping[str, Mapping[str, Any]]) -> Shape:
    """Puts over the suggested settings how ranks run, what the command names, and what was tuned.

    Others of the config were chosen for other features, so they give way.
    """
    every = job.draft.model_dump(mode="json")
    model, training = ({key: every[of][key] for key in every[of] if f"{of}.{key}" in named(job)} for of in SETTINGS)
    chosen = job.draft.sections().get("training", {})
    fits = {key: value for key, value in chosen.items() if key in MACHINE_KEYS}
    busy = not fits and free_processors() < TrainConfig().world_size
    why = f"{shape.training_why}; one rank, as other work keeps the processors busy" if busy else shape.training_why
    training = ({"world_size": 1} if busy else fits) | training
    suggested = {key: value for key, value in shape.training.items() if SPANS.get(key) not in training}
    return replace(
        shape,
        model={**shape.model, **model, **tuned.get("model", {})},
        training_why=why,
        training={**suggested, **training, **tuned.get("training", {})},
    )


def free_processors() -> float:
    """Returns about how many of this machine's processors other work leaves free: its load of the last minute."""
    return len(os.sched_getaffinity(0)) - os.getloadavg()[0]


def named(job: DraftJob) -> set[str]:
    """Returns section.key of all that the command names."""
    return {".".join(key.split(".")[:2]) for key in job.overrides}
