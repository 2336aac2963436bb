"""A graded run as a file, so that one report can hold several runs."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, cast

from semgrad_guard.errors import InputError
from semgrad_guard.evaluation.graded.graded_run import GradedRun
from semgrad_guard.files import atomic_write


def write_graded(path: Path, run: GradedRun) -> Path:
    """Write the run as JSON."""
    text = json.dumps(asdict(run), ensure_ascii=False)
    return atomic_write(path, text)


def read_graded(path: Path) -> GradedRun:
    """Read a run back.

    Raises:
        InputError: there is no such file, or it is no graded run.
    """
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"Cannot read {path}: {error.strerror or error}. Name the folder of an evaluation that has finished."
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is no graded run; evaluate (or --regrade) there again.") from error
    if not isinstance(found, dict) or set(cast("dict[str, Any]", found)) != {field.name for field in fields(GradedRun)}:
        raise InputError(f"{path} is no graded run; evaluate (or --regrade) there again.")
    return GradedRun(**cast("dict[str, Any]", found))
