"""Only the receiver reads what is sealed, and notices if it was changed."""

import pytest
from cryptography.fernet import InvalidToken

from pipeline.sealed import Letterbox, seal


def test_nobody_else_reads_it() -> None:
    mine, other = Letterbox(), Letterbox()
    key, content = seal({"password": "hunter2"}, mine.public)
    assert b"hunter2" not in key + content
    assert mine.open((key, content)) == {"password": "hunter2"}
    with pytest.raises(ValueError):
        other.open((key, content))
    with pytest.raises(InvalidToken):
        mine.open((key, content[:-4] + b"AAA="))
