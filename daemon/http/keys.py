"""Bearer keys: callers show one of those in a file."""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rowlock.daemon.http.problems import HttpError

KEY_CHARACTERS_MIN: Final = 16
PROTECTED: Final = ("/v1/", "/metrics")
"""Paths that ask for a key; probes do without."""


class KeyFileError(OSError):
    """A file of keys that cannot be used: file, line and what would do."""


def read_keys(path: Path) -> tuple[bytes, ...]:
    """The keys of a file, one a line; empty lines and those that begin with # are left out.

    Raises:
        KeyFileError: it cannot be read, has no key, or one that is too short to be one.

    """
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileError(f"http.api_keys: {path}: {error}") from error
    keys = []
    for number, line in enumerate(lines, start=1):
        key = line.strip()
        if key and not key.startswith("#"):
            if len(key) < KEY_CHARACTERS_MIN:
                raise KeyFileError(
                    f"http.api_keys: {path}:{number}: a key has at least {KEY_CHARACTERS_MIN} characters"
                )
            keys.append(key.encode())
    if not keys:
        raise KeyFileError(f"http.api_keys: {path}: holds no key")
    return tuple(keys)


class KeyCheck:
    """Lets only those through to the protected paths who show a key."""

    def __init__(self, app: ASGIApp, keys: tuple[bytes, ...]) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith(PROTECTED) and not self._known(Headers(scope=scope)):
            problem = HttpError(
                401, "a key is needed: send it as 'Authorization: Bearer KEY'", code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )  # fmt: skip
            await problem.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _known(self, headers: Headers) -> bool:
        scheme, _, shown = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        # every key is compared, and each in constant time
        return sum(hmac.compare_digest(shown.strip().encode("latin-1"), key) for key in self._keys) > 0
