"""Small pages are enough for the tests."""

from collections.abc import Iterator
from unittest.mock import patch

import pytest


@pytest.fixture(autouse=True, scope="module")
def small_pages_are_decoded() -> Iterator[None]:
    with patch("storage.pages.lists.LEAST", 0):
        yield
