"""An S3 server for the checkpoints of a module."""

from collections.abc import Iterator

import pytest

from tests.objects import Store, serving_objects


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with serving_objects(tmp_path_factory.mktemp("store")) as one:
        yield one
