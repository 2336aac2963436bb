"""From options to models, prompts, data and policies; torch is imported when needed."""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from semgrad_guard import loading
from semgrad_guard.cli.command import path
from semgrad_guard.cli.terminal import detail, is_verbose, note, note_problems, say, say_problems, status
from semgrad_guard.loading import ModelSource
from semgrad_guard.questions.data import Need, Phrasing, QuestionFile, read_questions
from semgrad_guard.questions.data_files import STDIN, read_text
from semgrad_guard.settings import OnNoThreshold

if TYPE_CHECKING:
    from semgrad_guard.engine.language_model import LanguageModel
    from semgrad_guard.guard import Policy

Pairs = list[Any]
"""(name, value) of an option that is given several times."""
BATCH = 16
"""Answers that are requested together; where the memory is short, the engine writes fewer at a time."""


def engine_arguments(engine: str) -> dict[str, Any] | None:
    """The arguments of `vllm.LLM`; None where transformers or a server writes the answers."""
    name, _, arguments = engine.partition("=")
    return cast("dict[str, Any]", json.loads(arguments or "{}")) if name == "vllm" else None


def server_of(engine: str) -> str | None:
    """The URL of the server that writes the answers, if one does."""
    return engine if engine.startswith(("http://", "https://")) else None


def source_of(
    model: str, *, dtype: Any, device: str | None, template_option: Pairs | None, engine: str = "transformers"
) -> ModelSource:
    """The model of the options.

    Raises:
        BadParameter: two of them contradict each other.
    """
    source = ModelSource(
        model=model,
        dtype=dtype,
        device=device,
        template_option=dict(template_option or ()) or None,
        engine=engine_arguments(engine),
    )
    if source.clash is not None:
        raise typer.BadParameter(source.clash)
    if server_of(engine) is not None and source != ModelSource(model=model):
        raise typer.BadParameter(
            "--dtype, --device and --template-option are for a model here, and a server writes the answers"
        )
    return source


def load(source: ModelSource) -> LanguageModel:
    """The model, while the terminal shows its name."""
    began = time.monotonic()
    with status(f"Loading {source.model} …"):
        model = source.load(verbose=is_verbose())
    for doubt in model.doubts:
        note(doubt, label="Warning")
    if (slow := model.slow_dtype) is not None:
        note(
            f"This processor has no instructions for {slow}: prompts and batches take several times as long as with "
            "--dtype float32. A calibration belongs to one dtype."
        )
    if is_verbose():
        identity = model.identity
        detail(
            f"{identity.name} is loaded in {time.monotonic() - began:.1f} s: {model.n_layers} layers, "
            f"{identity.dtype}, fingerprint {identity.fingerprint}, "
            f"chat template {identity.template}, window {model.context_window}"
        )
    return model


@contextmanager
def quietly(what: str) -> Generator[None]:
    """Show a status, and keep the libraries quiet that would show their own."""
    with status(what):
        if not is_verbose():
            loading.silence_libraries()
        yield


def text_or_file(given: str) -> tuple[str, list[Path]]:
    """A text, and the file that it was read from ("@FILE"), if it was."""
    if not given.startswith("@"):
        return given, []
    file = path(given[1:]) if given != f"@{STDIN}" else STDIN
    return read_text(file).removesuffix("\n"), [file]


def phrasing(prompt: str, system: str | None) -> tuple[Phrasing, list[Path]]:
    """How questions are put to the model, and the files that the options read it from."""
    system, files = (None, []) if system is None else text_or_file(system)
    if prompt == "plain" or prompt == "paper":
        return Phrasing(system, prompt), files
    template, read = text_or_file(prompt)
    return Phrasing(system, "plain", template), [*files, *read]


def read_data(
    data: str | Path,
    columns: Pairs | None = None,
    *,
    needs: Need = "answers",
    strict: bool = False,
    keeps: bool = False,
) -> QuestionFile:
    """The questions of a source. Repeated lines that are left out are named, unless the caller keeps them."""
    with status(f"Reading {data} …"):
        found = read_questions(data, needs=needs, strict=strict, columns=dict(columns or ()))
    say_problems(found.problems)
    note_problems([*(() if keeps else found.duplicates), *found.shared_ids])
    if found.unread:
        names = ", ".join(f'"{name}"' for name in found.unread)
        note(f"columns that are not read: {names}.")
    if needs == "answers" and (nowhere := sum(not row.answers for row in found.rows)):
        note(f"{nowhere} of {len(found.rows)} questions have no right answer: every claim is wrong there.")
    return found


def load_policy(calibration: Path | None, on_no_threshold: OnNoThreshold) -> Policy | None:
    """The policy of a calibration, if there is one, with a word where its promise is another than the requested one."""
    policy = loading.load_policy(calibration, loading.PolicyOptions(on_no_threshold=on_no_threshold))
    made = None if policy is None else policy.calibration
    if made is not None and (made.requested is not None or made.reachable is not None):
        from semgrad_guard.calibration.promise import offer, promise

        text = promise(made) if made.reachable is None else f"The calibration has no threshold. {offer(made)}"
        say(text, label="Promise")
    return policy
