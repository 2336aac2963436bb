"""Whether a prompt holds the user's question."""

from __future__ import annotations

from dataclasses import replace

from semgrad_guard.records import PromptForm


def as_asked(form: PromptForm, question: str | None, *, prepared: bool) -> PromptForm:
    """A prompt's form, and whether its question may differ from the user's.

    It may where the user's words (`question`, None where they are unknown) are not in it, and where another call of a
    model came before in the same run (`prepared`): its text may be in the prompt, in any words.
    """
    literal = question is None or _plain(question) in _plain(form.text)
    return replace(form, rewritten=not literal or prepared)


def _plain(text: str) -> str:
    """A text, its white space aside."""
    return " ".join(text.split())
