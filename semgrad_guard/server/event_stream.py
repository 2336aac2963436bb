"""Server-sent events (the WHATWG's HTML standard, section 9.2), from bytes as they come.

They are UTF-8 whatever a header says, and a line ends with LF, CR LF or CR alone. JSON may hold other ends of lines as
they are (U+2028, U+0085), at which readers of text would break it.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[tuple[bytes, bytes]]:
    """The kind (empty where it has none) and the data of each event that has data."""
    kind, data, first = b"", list[bytes](), True
    async for line in _lines(pieces):
        name, _, value = (line.removeprefix(_BOM) if first else line).partition(b":")
        value, first = value.removeprefix(b" "), False
        if name == b"data":
            data.append(value)
        elif name == b"event":
            kind = value
        elif not line:
            if found := b"\n".join(data).strip():
                yield kind, found
            kind, data = b"", []
    if found := b"\n".join(data).strip():  # not every server ends its last event
        yield kind, found


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Lines without their ends; each byte is looked at once, however long a line is."""
    rest, returned = list[bytes](), False
    async for piece in pieces:
        if not piece:
            continue
        *ended, last = _END.split(piece.removeprefix(b"\n") if returned else piece)
        returned = piece.endswith(b"\r")
        for line in ended:
            yield b"".join((*rest, line))
            rest = []
        rest.append(last)
    yield b"".join(rest)
