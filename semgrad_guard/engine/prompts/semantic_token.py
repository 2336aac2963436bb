"""t*, the semantic token: the prompt token whose hidden states best preserve the meaning of the prompt.

The paper (section 3.2) picks t* per model by its Semantic Preservation Score and lands on the same place each time:
the first token of the assistant header (`<|im_start|>` for Qwen, `<|start_header_id|>` for Llama 3.1) or, where the
chat template has no header, the last token of the user's text (Mistral Nemo). That place can be read off the chat
template itself, by comparing renderings of one conversation:

    prompted      with the generation prompt: the prompt the model sees
    unprompted    without it: the assistant header starts where the two part
    marked        prompted, with `MARK` right behind the last user's text: that text ends where the two part

Nothing is searched for, so a user who writes the header's own text cannot move t*.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from semgrad_guard.errors import BindingMismatchError, InputError
from semgrad_guard.records import SemanticToken

MARK = "\ue000"
"""A private-use character: no chat template writes it, none strips it."""


@dataclass(frozen=True)
class TokenizedText:
    """A text and its tokens, with the half-open character span of each where the tokenizer knows it (fast ones do).

    Without spans, `encode` tokenises prefixes of the text, and the longest common prefix of token ids tells the token.
    """

    text: str
    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...] | None
    encode: Callable[[str], tuple[int, ...]]

    def first_token_of(self, position: int) -> int:
        """Index of the first token that holds the character at `position`, straddling tokens included."""
        if self.spans is None:
            return _shared(self.ids, self.encode(self.text[:position]))
        return next((i for i, (_, end) in enumerate(self.spans) if end > position), len(self.ids) - 1)

    def last_token_of(self, position: int) -> int:
        """Index of the last token that holds the character at `position`: a character may take several byte tokens."""
        if self.spans is None:
            prefix = self.encode(self.text[: position + 1])
            shared = _shared(self.ids, prefix)
            return shared - 1 if shared == len(prefix) else shared
        return max((i for i, (start, end) in enumerate(self.spans) if start <= position and end > 0), default=0)


def find_semantic_token(
    prompt: TokenizedText, *, unprompted: str, marked: str, special_tokens: Iterable[str] = ()
) -> SemanticToken:
    """t* of a prompt made by a chat template: the assistant header's first token, else the user text's last one.

    A difference that starts before the user's text ends is not a header (a template may also print the time of day).
    """
    header = header_start(prompt.text, unprompted, special_tokens=special_tokens)
    user_end = user_text_end(prompt.text, marked)
    if header is not None and header >= (user_end or 0):
        return SemanticToken(prompt.first_token_of(header) - len(prompt.ids), "assistant_header")
    if user_end:
        return SemanticToken(prompt.last_token_of(user_end - 1) - len(prompt.ids), "user_text")
    return SemanticToken(-1, "last_token")


def header_start(prompted: str, unprompted: str, *, special_tokens: Iterable[str] = ()) -> int | None:
    """The place of the assistant header's first visible character in `prompted`; None if the template has no header.

    Some templates close the text without the prompt (Phi-3 writes `<|endoftext|>` in place of `<|assistant|>`): the
    common prefix then holds a stray `<|`, so it must not end inside a special token.
    """
    boundary = _shared(prompted, unprompted)
    if boundary < len(unprompted):
        pattern = "|".join(re.escape(token) for token in sorted(special_tokens, key=len, reverse=True) if token)
        tokens = re.finditer(pattern, unprompted) if pattern else ()
        cut = (token.start() for token in tokens if token.start() < boundary < token.end())
        boundary = next(cut, boundary)
    header = prompted[boundary:].lstrip()
    return len(prompted) - len(header) if header else None


def header_text(prompted: str, unprompted: str, marked: str, *, special_tokens: Iterable[str] = ()) -> str:
    """The assistant header: the template's text after the last message, which opens an answer; "" if there is none.

    Of a template that writes its header in any case, it is all behind the user's text.
    """
    start, user_end = header_start(prompted, unprompted, special_tokens=special_tokens), user_text_end(prompted, marked)
    return "" if start is None and user_end is None else prompted[max(start or 0, user_end or 0) :]


def user_text_end(prompted: str, marked: str) -> int | None:
    """Where the marked text ends in `prompted` (exclusive); None if the template left it out."""
    return None if prompted == marked else _shared(prompted, marked)


def _shared(left: Sequence[object], right: Sequence[object]) -> int:
    """Length of the longest common prefix of two texts or of two id sequences, by bisection (long prompts are long)."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class TokenChoice(BaseModel):
    """Which prompt token to differentiate by.

    `offset` counts from the prompt's end (-1 is its last token); None means the place that the chat template
    itself gives, which is found in every prompt by itself. `template` is the fingerprint of the chat template and its
    options, without which an offset means nothing, `model` the name of the model that was probed (for people).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    offset: int | None = Field(lt=0)
    template: str
    model: str
    reason: str

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The choice in a probe's record.

        Raises:
            InputError: the file cannot be read, or holds no such choice.
        """
        source = Path(path)
        try:
            record: Any = json.loads(source.read_text(encoding="utf-8"))
            return cls.model_validate(record["semantic_token"])
        except OSError as error:
            raise InputError(f"Cannot read {source}: {error.strerror or error}.") from error
        except (ValueError, TypeError, KeyError, RecursionError, ValidationError) as error:
            raise InputError(
                f"{source} is not what `semgrad-guard probe` writes: it holds no intact semantic_token. Probe again."
            ) from error

    def offset_for(self, template: str) -> int | None:
        """The offset, for a model whose template has this fingerprint.

        Raises:
            BindingMismatchError: it has another.
        """
        if template != self.template:
            raise BindingMismatchError(
                f"t* was chosen for the chat template {self.template} ({self.model}), and this model's is {template}: "
                "the same offset is another token there. Probe this model, or leave t* to the template."
            )
        return self.offset
