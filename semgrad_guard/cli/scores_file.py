"""The output of `score`: a line of JSON for each text, in a file or on stdout."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import typer

from semgrad_guard.cli.terminal import note
from semgrad_guard.files import atomic_write
from semgrad_guard.records import Verdict

_ASKED = {"id", "question", "response"}
_CLAIMS = {*_ASKED, "estimator", "by", "segments"}
"""The fields of a line with --by."""


def record(output: Path) -> Path:
    """The record of a resumable run, until the file of scores is written."""
    return output.with_name(f"{output.name}.run")


def are_scores(path: Path) -> bool:
    """Whether a file holds only lines of `score`, and nothing that a user has added."""
    whole = {*_ASKED, "schema", "digest", *Verdict.model_fields}
    for line in path.read_bytes().splitlines():
        try:
            record: Any = json.loads(line)
        except (ValueError, RecursionError):
            return False
        names = set(cast("dict[str, Any]", record)) if isinstance(record, dict) else set[str]()
        if names != _CLAIMS and not {*_ASKED, "digest", "uncertainty", "action"} <= names <= whole:
            return False
    return True


def deliver(records: Iterable[Mapping[str, object]], output: Path | None, *, as_json: bool) -> None:
    """Write the lines to the file, if there is one, and to stdout on request."""
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    text = "".join(lines)
    if output is not None:
        atomic_write(output, text)
        note(f"{len(lines)} scores are in {output}.", label=None, style="green")
    if as_json:
        typer.echo(text, nl=False)
