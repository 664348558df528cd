"""Secrets for a process of another machine, readable by that process alone whoever sees them on their way."""

import json
from typing import Any

from cryptography.fernet import Fernet
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

KEY_BITS = 3072
_PADDING = padding.OAEP(mgf=padding.MGF1(hashes.SHA256()), algorithm=hashes.SHA256(), label=None)


class Letterbox:
    """The receiver's key. Its private part never leaves the process.

    Example:
        >>> box = Letterbox()
        >>> box.open(seal({"password": "x"}, box.public))
        {'password': 'x'}
    """

    def __init__(self) -> None:
        self.key = rsa.generate_private_key(public_exponent=65537, key_size=KEY_BITS)

    @property
    def public(self) -> bytes:
        """The key to seal with, in PEM."""
        return self.key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    def open(self, sealed: tuple[bytes, bytes]) -> Any:
        """Returns the content.

        Raises:
            ValueError: If it was sealed for another receiver.
            cryptography.fernet.InvalidToken: If it was changed on its way.
        """
        key, content = sealed
        return json.loads(Fernet(self.key.decrypt(key, _PADDING)).decrypt(content))


def seal(content: Any, public: bytes) -> tuple[bytes, bytes]:
    """Returns JSON content that only the holder of the key can read: the encrypted key of the content, and that."""
    receiver = serialization.load_pem_public_key(public)
    assert isinstance(receiver, rsa.RSAPublicKey)
    key = Fernet.generate_key()
    return receiver.encrypt(key, _PADDING), Fernet(key).encrypt(json.dumps(content).encode())
