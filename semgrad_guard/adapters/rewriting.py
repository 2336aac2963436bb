"""Whether a prompt asks what the user asked."""

from __future__ import annotations

from dataclasses import replace

from semgrad_guard.records import PromptForm


def as_asked(form: PromptForm, question: str | None, *, prepared: bool) -> PromptForm:
    """A prompt's form, and whether it may ask something else than the user.

    So it is where the user's words (`question`, None where they are not known) are not in it, and where another call of
    a model came before in the same run (`prepared`): what that one said may stand in the prompt, in whatever words.
    """
    asked = question is None or _plain(question) in _plain(form.text)
    return replace(form, rewritten=not asked or prepared)


def _plain(text: str) -> str:
    """A text, its white space aside."""
    return " ".join(text.split())
