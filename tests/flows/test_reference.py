"""The reference pages are generated from the code and are up to date."""

from flows.reference import FOLDER, commands, pages
from pipeline.config import RunConfig
from pipeline.transforms.ops import known_kinds

PAGES = pages()


def test_the_pages_are_current() -> None:
    for name, text in PAGES.items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, "run: python -m flows.reference"
    assert {f"config/{path.name}" for path in (FOLDER / "config").iterdir()} == {
        name for name in PAGES if name.startswith("config/")
    }


def test_every_key_op_and_command_is_there() -> None:
    index, ops, made = PAGES["config/index.md"], PAGES["config/transforms.md"], PAGES["commands.md"]
    assert all(f"`{key}`" in index for key in RunConfig.model_fields)
    assert all(f"## `{kind}`\n" in ops for kind in known_kinds())
    assert all(f"\n## {name}\n" in made for name in commands())


def test_sections_within_a_section_have_their_keys() -> None:
    source = PAGES["config/source.md"]
    assert "## `source.outcomes.labels`" in source
    assert "**`window_seconds`** (default `3600`)" in source
    assert "## `features.sparse`" in PAGES["config/features.md"]


def test_parameters_of_a_command_have_default_choices_and_meaning() -> None:
    page = PAGES["commands.md"].split("\n## checkpoint\n")[1].split("\n## ")[0]
    assert "one of `list`, `verify`, `export`; default `list`" in page
    assert "overrides" not in page
    assert "weights of one as safetensors" in page
