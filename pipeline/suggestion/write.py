"""Renders a suggestion as a config file, with the reason of each choice as a comment."""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from pipeline.suggestion.choose import HISTORY_DELAY_SECONDS, HISTORY_LAST, Choice, Feature, Group, Suggestion

HEAD = """# {name}: suggested by `python -m flows.suggest` from {rows:,} rows of {days}{source}.
# Every choice has its reason next to it. Change what you know better.
"""
FIRST = ("name", "home", "seed", "source", "ingest", "warehouse")
"""Sections before those that depend on the data. All others follow them."""
EVENTS = "_events"
"""Ending of the table with the log of a suggested history."""


def render_config(
    suggestion: Suggestion,
    kept: Mapping[str, Any],
    rows: int,
    days: int,
    source: str,
    weight: str | None = None,
    notes: Sequence[str] = (),
    path: str | None = None,
) -> str:
    """Renders the whole file.

    Args:
        kept: Sections to take over from the config. Those that are suggested win, apart from keys of `evaluation`. With
            that of `history_log`, the history is written, too.
        source: Description of what was measured.
        weight: Column of the rows' weights.
        notes: What else was found, for the head of the file.
        path: The file. None: the one below the config's home.
    """
    shape, split = suggestion.shape, suggestion.split
    log = {table: events for table, events in kept.get("events", {}).items() if table == f"{kept['name']}{EVENTS}"}
    made = ("features", "split", "model", "training", "evaluation")
    others = {key: value for key, value in kept.items() if key not in made}
    path = path or f"{kept.get('home', '.dlrm')}/suggested/{kept['name']}.yaml"
    last = {key: value for key, value in others.items() if key not in FIRST}
    evaluation = {"baselines": ["rate", "logistic", "boosting"], **kept.get("evaluation", {})}
    span = "1 day" if days == 1 else f"{days:,} days"
    parts = [
        HEAD.format(name=kept["name"], rows=rows, days=span, source=f", {source}") + "".join(map(_note, notes)),
        _dump({key: others[key] for key in FIRST if key in others}),
        _features(suggestion, weight, log),
        f"split: # {split.why}\n{_inner(split.config)}",
        f"model: # {shape.model_why}\n{_inner(shape.model)}",
        f"training: # {shape.training_why}\n{_inner(shape.training)}",
        f"evaluation: # every model is compared with these on the same rows\n{_inner(evaluation)}",
        *([_dump(last)] if last else []),
        "# What to try next:\n" + "".join(_note(text) for text in _next_steps(suggestion, path, kept, log)),
    ]
    return "\n".join(parts)


def _next_steps(suggestion: Suggestion, path: str, kept: Mapping[str, Any], log: Mapping[str, Any] | None) -> list[str]:
    """Returns what may make the model better, the most promising first."""
    steps, history = [], suggestion.history
    if not log and history is not None:
        lists = f"the last {history.item.column} of each {history.user}"
        if history_log(suggestion, kept) is not None:
            other = history_path(path)
            command = f"python -m flows.end_to_end {shlex.quote(other)}"
            steps.append(f"{lists} as a feature: {command}; the gate compares it with this one")
        elif not history.timed:
            steps.append(f"{lists} as a feature (features.histories): write '{history.time}' as a timestamp")
    if not log:
        steps.append(
            f"search these values on the validation rows: python -m flows.suggest {shlex.quote(path)} trials=12"
        )
    if suggestion.split.by_time:
        steps.append("new days come: flows.recurring trains on each, flows.backtest shows what that would have brought")
    ids = [choice.fact.name for choice in suggestion.of("sparse") if choice.fact.kind not in ("ids", "time")]
    if len(ids) >= 2:
        steps.append(
            f"cross two columns under features.derived: {{kind: cartesian, inputs: [{ids[0]}, {ids[1]}], ...}}"
        )
    steps.append(
        "a larger training.table_weight_decay if the validation NE rises early, a smaller one if it never does"
    )
    return steps


def history_log(suggestion: Suggestion, kept: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the section `events` for the suggested history: the samples' own files. None: there is none."""
    history, source = suggestion.history, kept.get("source", {})
    known = history is not None and history.timed and source.get("path") and "events" not in kept
    if history is None or not known or source.keys() & {"outcomes", "lookups"}:
        return None
    same = {key: source[key] for key in ("path", "format", "date_format", "rename") if key in source}
    liked = [] if source.get("positive") is not None else [suggestion.label]
    columns = [history.item.column, *liked]
    return {f"{kept['name']}{EVENTS}": {**same, "key": history.user, "time": history.time, "columns": columns}}


def _history(suggestion: Suggestion, log: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Returns the lines that declare the history, and those of its feature."""
    history = suggestion.history
    assert history is not None
    ((table, events),) = log.items()
    liked = suggestion.label in events["columns"]
    keys: dict[str, Any] = {
        "table": table,
        "as_of": history.time,
        "delay_seconds": HISTORY_DELAY_SECONDS,
        "last": HISTORY_LAST,
        "columns": [history.item.column],
        "prefix": "liked_" if liked else "seen_",
    } | ({"where": f'"{suggestion.label} = 1"'} if liked else {})
    declared = [
        f"  histories: # the last {HISTORY_LAST} of each {_one_line(history.user)} before the row's time; set",
        "    # delay_seconds to the time after which an event, and its label, is known where rows are served",
        f"    - {{{_pairs(keys)}}}",
    ]
    steps = ({"kind": "first_x", "limit": HISTORY_LAST}, history.item.transforms[-1])
    feature = Feature("sparse", f"{keys['prefix']}{history.item.column}", steps, list_of_ids=True)
    return declared, _group(Group((feature.column,), feature, ()))


def history_path(path: str) -> str:
    """Returns the file of the same suggestion with its history.

    Example:
        >>> history_path(".dlrm/suggested/clicks.yaml")
        '.dlrm/suggested/clicks_history.yaml'
    """
    return f"{path.removesuffix('.yaml')}_history.yaml"


def _features(suggestion: Suggestion, weight: str | None, log: Mapping[str, Any]) -> str:
    lines = ["features:", f"  label: {_text(suggestion.label)}"]
    lines += [f"  weight: {_text(weight)}"] if weight else []
    lines += ["  derived:"] if suggestion.derived else []
    lines += [f"    - {{{_pairs(op)}}}" for op in suggestion.derived]
    declared, listed = _history(suggestion, log) if log else ([], [])
    lines += declared
    for use, title in (("dense", "numbers"), ("sparse", "ids, text, or lists of them")):
        groups = [group for group in suggestion.groups if group.feature.use == use]
        lines += [f"  {use}: # {title}"] if groups else []
        for group in groups:
            lines += _group(group)
    lines += listed
    ignored = suggestion.of("ignored")
    lines += ["  # Left out:"] if ignored else []
    lines += [f"  #   {_one_line(line)}" for line in describe_ignored(ignored)]
    return "\n".join(lines) + "\n"


def describe_ignored(ignored: Sequence[Choice]) -> list[str]:
    """Returns a line for each reason why columns are left out, with all of its columns."""
    by_reason: dict[str, list[str]] = {}
    for choice in ignored:
        by_reason.setdefault(choice.why, []).append(choice.fact.name)
    return [f"{', '.join(names)}: {why}" for why, names in by_reason.items()]


def _group(group: Group) -> list[str]:
    feature = group.feature
    if feature.name and feature.use == "sparse":  # a second form of numbers, whose reasons are given with the first
        lines = ["    # the same numbers as intervals of about equally many rows, each with a vector of its own"]
    else:
        lines = list(dict.fromkeys(f"    # {_comment(choice)}" for choice in group.choices))
    lines += [f"    - columns: [{', '.join(map(_text, group.names))}]"]
    lines += [f"      name: {_text(feature.name)}"] if feature.name else []
    lines += ["      pooling: mean"] if feature.list_of_ids else []
    steps = ", ".join(f"{{{_pairs(op)}}}" for op in feature.transforms)
    return [*lines, *([f"      transforms: [{steps}]"] if steps else [])]


def _pairs(op: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {_value(value)}" for key, value in op.items())


def _value(value: Any) -> str:
    return json.dumps(value) if isinstance(value, list) else str(value)


def _comment(choice: Choice) -> str:
    return _one_line(f"{choice.fact.name}: {choice.why}")


def _note(text: str) -> str:
    return f"# - {_one_line(text)}\n"


def _one_line(text: str) -> str:
    """Text on one line, even if a name has line breaks."""
    return " ".join(text.split())


def _text(name: str) -> str:
    return json.dumps(name)


def _dump(sections: Mapping[str, Any]) -> str:
    text: str = yaml.dump(dict(sections), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    return text


class _Dumper(yaml.SafeDumper):
    """Writes lists of plain values on one line."""

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        plain = not any(isinstance(value, list | dict) for value in sequence)
        return super().represent_sequence(tag, sequence, flow_style=plain)


def _inner(section: Mapping[str, Any]) -> str:
    return "".join(f"  {line}\n" for line in _dump(section).splitlines())
