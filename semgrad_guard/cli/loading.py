"""From options to models, prompts, data and policies; torch is imported when needed."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from semgrad_guard import loading
from semgrad_guard.cli.options import Columns, Decoding, Wording
from semgrad_guard.cli.terminal import detail, is_verbose, note, note_problems, say_problems, status
from semgrad_guard.engine.prompts.semantic_token import TokenChoice
from semgrad_guard.errors import InputError
from semgrad_guard.loading import ModelSource
from semgrad_guard.questions.data import Need, Question, QuestionFile, read_questions
from semgrad_guard.questions.data_files import STDIN, read_text
from semgrad_guard.questions.job_record import Row
from semgrad_guard.questions.prompts import Phrasing
from semgrad_guard.settings import ONE_THRESHOLD, PolicyOptions

if TYPE_CHECKING:
    from semgrad_guard.engine.answers.options import GenerationOptions
    from semgrad_guard.engine.language_model import LanguageModel
    from semgrad_guard.guard import Policy

A = TypeVar("A", bound="Row")


def load(source: ModelSource) -> LanguageModel:
    """The model, while the terminal shows its name."""
    if source.clash is not None:
        raise typer.BadParameter(source.clash)
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


def given_text(value: str) -> str:
    """The text itself, or standard input for "-"."""
    return read_text(STDIN).strip() if value == str(STDIN) else value


def text_or_file(given: str) -> tuple[str, list[Path]]:
    """A text, and the file that it was read from ("@FILE"), if it was."""
    if not given.startswith("@"):
        return given, []
    path = Path(given[1:])
    return read_text(path).removesuffix("\n"), [path]


def phrasing(wording: Wording) -> tuple[Phrasing, list[Path]]:
    """How questions are put to the model, and the files that the options read it from."""
    system, files = wording.system, [] if wording.few_shot is None else [wording.few_shot]
    if system is not None:
        system, read = text_or_file(system)
        files += read
    examples = read_examples(wording.few_shot, wording.shots)
    if wording.prompt == "plain" or wording.prompt == "paper":
        return Phrasing(system, wording.prompt, None, examples), files
    template, read = text_or_file(wording.prompt)
    return Phrasing(system, "plain", template, examples), [*files, *read]


def read_examples(path: Path | None, shots: int | None) -> Sequence[Question]:
    """The few-shot examples, the first `shots` of the file; none without one."""
    if path is None:
        if shots is not None:
            raise InputError("--shots says how many examples of --few-shot FILE to take; name the file, too")
        return ()
    found = read_questions(path)
    say_problems(found.problems)
    if shots is not None and shots > len(found.rows):
        raise InputError(f"{path} has {len(found.rows)} examples, and --shots asks for {shots}")
    return found.rows[:shots]


def read_data(
    data: str | Path, columns: Columns, *, needs: Need = "answers", strict: bool, keeps: bool = False
) -> QuestionFile:
    """The questions of a source. Repeated lines that are left out are named, unless the caller keeps them."""
    found = read_questions(
        data, needs=needs, strict=strict, on_progress=lambda rows: note(f"{rows:,} rows are read."), **vars(columns)
    )
    say_problems(found.problems)
    note_problems([*(() if keeps else found.duplicates), *found.shared_ids])
    if found.unread:
        names = ", ".join(f'"{name}"' for name in found.unread)
        note(f"columns that are not read: {names}.")
    if needs == "answers" and (nowhere := sum(not row.answers for row in found.rows)):
        note(f"{nowhere} of {len(found.rows)} questions have no right answer: there, abstaining is right.")
    return found


def load_token(probe: Path | None) -> TokenChoice | None:
    """The t* that a probe's record recommends, read before any work."""
    return None if probe is None else TokenChoice.load(probe)


def decoding(options: Decoding) -> GenerationOptions:
    """How to generate."""
    from semgrad_guard.engine.answers.options import GenerationOptions

    return GenerationOptions(**vars(options))


def load_policy(calibration: Path | None, options: PolicyOptions | None = None) -> Policy | None:
    """The policy of the options, if they have one.

    Raises:
        BadParameter: they have two.
    """
    if calibration is not None and options is not None and options.threshold is not None:
        raise typer.BadParameter(ONE_THRESHOLD)
    policy = loading.load_policy(calibration, options)
    if policy is not None:
        tell_promise(policy)
    return policy


def tell_promise(policy: Policy) -> None:
    """A note where the promise is not the one that was asked for."""
    made = policy.calibration
    if made is not None and made.requested is not None:
        from semgrad_guard.calibration.promise import promise

        note(promise(made), label="Promise")
