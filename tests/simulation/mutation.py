"""Puts bugs into the real code, for tests of the simulation itself."""

import inspect
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

Mutation = tuple[Any, str, str, str]
"""Class or module, name of its function, a text in that function, and the text that makes it wrong."""


@contextmanager
def rebuilt(mutations: Iterable[Mutation], broken: bool) -> Iterator[None]:
    """Compiles functions again, in the namespace of their module.

    Args:
        broken: Makes them wrong. If not, they are what they were, compiled in the same way.
    """
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, right, wrong in mutations:
            function = getattr(owner, name)
            source = textwrap.dedent(inspect.getsource(function))
            assert source.count(right) == 1
            made: dict[str, Any] = {}
            exec(source.replace(right, wrong) if broken else source, vars(sys.modules[function.__module__]), made)
            patch.setattr(owner, name, made[name])
        yield
