"""The owner's Ed25519 key: made at the first start, kept in the state directory, read by nobody else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from rowlock.journal.files import Files

FILE_NAME: Final = "owner.key"
PUBLIC_PREFIX: Final = "ed25519:"


class KeyFileError(Exception):
    """The owner's key cannot be used: which file, why, and what to do."""


@dataclass(frozen=True)
class OwnerKey:
    """Signs for one owner."""

    private: Ed25519PrivateKey

    @classmethod
    def in_directory(cls, directory: Path, files: Files) -> Self:
        """Read the key of a state directory; where there is none, make it, durably.

        Raises:
            KeyFileError: it is damaged, or readable by others.
            OSError: it cannot be read or written.

        """
        path = directory / FILE_NAME
        if files.exists(path):
            return cls(_read(path, files))
        private = Ed25519PrivateKey.generate()
        files.write(path, [private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())], private=True)
        return cls(private)

    @property
    def public(self) -> str:
        """``ed25519:`` and the public key in hex."""
        return PUBLIC_PREFIX + self.private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex()

    def sign(self, data: bytes) -> bytes:
        return self.private.sign(data)


def is_signed(public: str, signature: bytes, data: bytes) -> bool:
    """Whether a signature is that key's over these bytes."""
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public.removeprefix(PUBLIC_PREFIX)))
        key.verify(signature, data)
    except (ValueError, InvalidSignature):
        return False
    return True


def _read(path: Path, files: Files) -> Ed25519PrivateKey:
    if not files.is_private(path):
        raise KeyFileError(f"{path}: others may use it, so its signatures prove nothing; give it the mode 0600")
    try:
        key = load_pem_private_key(files.read(path), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise KeyFileError(f"{path}: {error}; restore it from a backup, or move it away to begin a new key") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyFileError(f"{path}: is not an Ed25519 key")
    return key
