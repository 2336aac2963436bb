"""API keys: held as hashes, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from semgrad_guard.errors import InputError

_SHORTEST = 16


class Keys:
    """The keys that open a server; without any, it is open.

    Args:
        keys: our own.
        of_host: those of the server in which our routes are; their length is that server's choice.

    Raises:
        InputError: a key of our own is shorter than 16 characters.
    """

    def __init__(self, keys: Iterable[str] = (), *, of_host: Iterable[str] = ()) -> None:
        given = [key.strip() for key in keys if key.strip()]
        if any(len(key) < _SHORTEST for key in given):
            raise InputError(f"an API key has at least {_SHORTEST} characters; make one with: openssl rand -hex 32")
        self._hashes = tuple(_hash(key) for key in (*given, *(key.strip() for key in of_host if key.strip())))

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def open_to(self, authorization: str | None) -> bool:
        """Whether a request with this Authorization header may come in."""
        if not self._hashes:
            return True
        scheme, _, key = (authorization or "").partition(" ")
        found = _hash(key.strip())
        matches = [hmac.compare_digest(found, each) for each in self._hashes]  # all of them: no early end
        return scheme.lower() == "bearer" and any(matches)

    @classmethod
    def from_file(cls, path: Path) -> list[str]:
        """The keys in a file, one a line; lines that begin with "#" are comments.

        Raises:
            InputError: the file cannot be read, or holds none.
        """
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeError) as error:
            raise InputError(f"the API keys in {path} cannot be read: {error}") from error
        found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not found:
            raise InputError(f"{path} holds no API key; write one a line")
        return found


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
