"""A model's files on this disk, read before its weights are loaded: its config, and whether it calls tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from huggingface_hub import try_to_load_from_cache

from semgrad_guard.engine.prompts.tool_format import known_format
from semgrad_guard.errors import ModelNotFoundError
from semgrad_guard.named import folder_of


def read_json(name_or_path: str, file: str, revision: str | None) -> dict[str, Any] | None:
    """A file of a model; None where it is not on this disk."""
    text = _read(name_or_path, file, revision)
    return None if text is None else json.loads(text)


def template_calls_tools(name_or_path: str, revision: str | None, options: Mapping[str, Any] | None) -> bool | None:
    """Whether a model's chat template writes calls of tools in a form that can be read; None where it is not here."""
    if read_json(name_or_path, "config.json", revision) is None:
        return None
    tokenizer = read_json(name_or_path, "tokenizer_config.json", revision) or {}
    apart = _read(name_or_path, "chat_template.jinja", revision)
    template = (options or {}).get("chat_template") or apart or tokenizer.get("chat_template") or ""
    if isinstance(template, list):  # several named ones
        template = "\n".join(named["template"] for named in cast("list[dict[str, str]]", template))
    return known_format(template) is not None or ("tools" in template and bool(tokenizer.get("response_template")))


def _read(name_or_path: str, file: str, revision: str | None) -> str | None:
    try:
        folder = folder_of(name_or_path) or Path(name_or_path)
    except ModelNotFoundError:
        return None
    if folder.is_dir():
        path = folder / file
        return path.read_text() if path.is_file() else None
    if name_or_path.count("/") > 1 or name_or_path.startswith((".", "/", "~")):
        return None
    cached = try_to_load_from_cache(name_or_path, file, revision=revision)
    return Path(cached).read_text() if isinstance(cached, str) else None
