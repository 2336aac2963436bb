"""A calibration's file where an estimator has learned many numbers: these are compressed, everything else is plain.

`{"packed": TEXT}` stands for the weights; `zlib.decompress(base64.b64decode(TEXT))` is their JSON.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from typing import Any, cast

_PACKED = "packed"
_MOST_PLAIN = 64
"""Columns that are written as plain numbers, five to a column."""
_LARGEST = 256 * 2**20
"""Bytes that a file's weights may have when they are spelled out: nobody has learned as many."""


def packed(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a calibration as its file holds it."""
    choice = content.get("choice")
    weights = choice.get("weights") if isinstance(choice, dict) else None
    if weights is None or len(weights["columns"]) <= _MOST_PLAIN:
        return dict(content)
    spelled = json.dumps(weights, separators=(",", ":")).encode()
    text = base64.b64encode(zlib.compress(spelled, 9)).decode("ascii")
    return {**content, "choice": {**cast("dict[str, Any]", choice), "weights": {_PACKED: text}}}


def spelled_out(content: Any) -> Any:
    """What `packed` was made of; anything else as it is.

    Raises:
        ValueError: what is packed is cut short or something else.
    """
    choice = cast("dict[str, Any]", content).get("choice") if isinstance(content, dict) else None
    weights = cast("dict[str, Any]", choice).get("weights") if isinstance(choice, dict) else None
    if not isinstance(weights, dict) or set(cast("dict[str, Any]", weights)) != {_PACKED}:
        return content
    return {**content, "choice": {**choice, "weights": _weights(cast("dict[str, Any]", weights)[_PACKED])}}


def _weights(text: Any) -> Any:
    try:
        opened = zlib.decompressobj()
        spelled = opened.decompress(base64.b64decode(text, validate=True), _LARGEST)
    except (TypeError, ValueError, zlib.error):
        raise ValueError("its packed weights cannot be read") from None
    if not opened.eof:
        raise ValueError("its packed weights are cut short")
    return json.loads(spelled)
