"""Renders a suggestion as a config file, with the reason of each choice as a comment."""

import json
from collections.abc import Mapping
from typing import Any

import yaml

from pipeline.suggestion.choose import Choice, Suggestion

HEAD = """# {name}: suggested by `python -m flows.suggest` from {rows:,} rows of {days} days{source}.
# Every choice has its reason next to it. Change what you know better.
"""


def render_config(
    suggestion: Suggestion, kept: Mapping[str, Any], rows: int, days: int, source: str, weight: str | None = None
) -> str:
    """Renders the whole file.

    Args:
        kept: Sections to take over from the config. Its keys of `model` and `training` win over the suggested ones.
        source: Description of what was measured.
        weight: Column of the rows' weights.
    """
    others = {key: value for key, value in kept.items() if key not in ("features", "split", "model", "training")}
    model = {"embedding_width": suggestion.embedding_width, **kept.get("model", {})}
    training = {"batch_rows": suggestion.batch_rows, **kept.get("training", {})}
    parts = [
        HEAD.format(name=kept["name"], rows=rows, days=days, source=f", {source}"),
        yaml.safe_dump(others, sort_keys=False, allow_unicode=True),
        _features(suggestion, weight),
        f"split: # {suggestion.split_why}\n{_inner(suggestion.split)}",
        f"model: # {suggestion.width_why}\n{_inner(model)}",
        f"training:\n{_inner(training)}",
    ]
    return "\n".join(parts)


def _features(suggestion: Suggestion, weight: str | None) -> str:
    lines = ["features:", f"  label: {_text(suggestion.label)}"]
    lines += [f"  weight: {_text(weight)}"] if weight else []
    for use, title in (("dense", "numbers"), ("sparse", "ids, text, or lists of them")):
        groups = [(names, group) for names, group in suggestion.groups if group[0].use == use]
        lines += [f"  {use}: # {title}"] if groups else []
        for names, group in groups:
            lines += _group(names, group)
    ignored = suggestion.of("ignored")
    lines += ["  # Left out:"] if ignored else []
    lines += [f"  #   {_comment(choice)}" for choice in ignored]
    return "\n".join(lines) + "\n"


def _group(names: tuple[str, ...], group: tuple[Choice, ...]) -> list[str]:
    reasons = [f"    # {_comment(choice)}" for choice in group]
    lines = [*reasons, f"    - columns: [{', '.join(map(_text, names))}]"]
    lines += ["      pooling: mean"] if group[0].list_of_ids else []
    ops = [", ".join(f"{key}: {value}" for key, value in op.items()) for op in group[0].transforms]
    return [*lines, f"      transforms: [{', '.join(f'{{{op}}}' for op in ops)}]"]


def _comment(choice: Choice) -> str:
    """Column and reason on one line, even if the name has line breaks."""
    return " ".join(f"{choice.fact.name}: {choice.why}".split())


def _text(name: str) -> str:
    return json.dumps(name)


def _inner(section: Mapping[str, Any]) -> str:
    text: str = yaml.safe_dump(dict(section), sort_keys=False)
    return "".join(f"  {line}\n" for line in text.splitlines())
