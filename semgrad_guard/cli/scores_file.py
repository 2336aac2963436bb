"""The output of `score`: a line of JSON for each text, in a file or on stdout."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import typer

from semgrad_guard.cli.terminal import note

_ASKED = {"id", "question", "response"}
_CLAIMS = {*_ASKED, "estimator", "by", "segments"}
"""The fields of a line with --by."""


def require_outputs(output: Path | None, inputs: Iterable[Path | None]) -> None:
    """Refuse, before any work, a file that cannot be written, or must not be."""
    from semgrad_guard.evaluation.files import Output, require_outputs

    if output is not None:
        given = [path for path in inputs if path is not None]
        require_outputs([Output(output, "file of scores", are_scores)], inputs=given)


def record(output: Path) -> Path:
    """The record of a resumable run, until the file of scores is written."""
    return output.with_name(f"{output.name}.run")


def are_scores(path: Path) -> bool:
    """Whether a file holds only lines of `score`, and nothing that a user has added."""
    return all(_is_score(line) for line in path.read_bytes().splitlines())


def _is_score(line: bytes) -> bool:
    from semgrad_guard.records import Verdict

    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError):
        return False
    names = set(cast("dict[str, Any]", record)) if isinstance(record, dict) else set[str]()
    whole = {*_ASKED, "schema", "digest", *Verdict.model_fields}
    return names == _CLAIMS or {*_ASKED, "digest", "uncertainty", "action"} <= names <= whole


def sole_writer(output: Path | None) -> AbstractContextManager[None]:
    """Hold the file against every other run, if there is one."""
    from semgrad_guard.evaluation.files import sole_writer

    return nullcontext() if output is None else sole_writer(output)


def deliver(records: Iterable[Mapping[str, object]], output: Path | None, *, as_json: bool) -> None:
    """Write the lines to the file, if there is one, and to stdout on request."""
    from semgrad_guard.files import atomic_write

    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    text = "".join(lines)
    if output is not None:
        atomic_write(output, text)
        note(f"{len(lines)} scores are in {output}.", label=None, style="green")
    if as_json:
        typer.echo(text, nl=False)
