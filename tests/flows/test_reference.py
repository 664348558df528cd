"""The config reference is made from the classes and is up to date."""

from pathlib import Path

from flows.reference import reference
from pipeline.config import RunConfig
from pipeline.transforms.ops import known_kinds

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_current():
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == reference(), (
        "run: python -m flows.reference > docs/config.md"
    )


def test_every_section_and_op_is_there():
    page = reference()
    assert all(f"| `{key}` |" in page for key in RunConfig.model_fields)
    assert all(f"### `{kind}`" in page for kind in known_kinds())
