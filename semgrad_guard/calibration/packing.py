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
    choice = _object(content.get("choice"))
    weights = _object(choice.get("weights"))
    if len(weights.get("columns", ())) <= _MOST_PLAIN:
        return dict(content)
    spelled = json.dumps(weights, separators=(",", ":")).encode()
    text = base64.b64encode(zlib.compress(spelled, 9)).decode("ascii")
    return {**content, "choice": {**choice, "weights": {_PACKED: text}}}


def spelled_out(content: Any) -> Any:
    """What `packed` was made of; anything else as it is.

    Raises:
        ValueError: what is packed is cut short or something else.
    """
    whole = _object(content)
    choice = _object(whole.get("choice"))
    weights = _object(choice.get("weights"))
    if set(weights) != {_PACKED}:
        return content
    return {**whole, "choice": {**choice, "weights": _weights(weights[_PACKED])}}


def _object(value: Any) -> dict[str, Any]:
    """An object of JSON; an empty one where there is none."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _weights(text: Any) -> Any:
    try:
        opened = zlib.decompressobj()
        spelled = opened.decompress(base64.b64decode(text, validate=True), _LARGEST)
    except (TypeError, ValueError, zlib.error):
        raise ValueError("its packed weights cannot be read") from None
    if not opened.eof:
        raise ValueError("its packed weights are cut short")
    return json.loads(spelled)
