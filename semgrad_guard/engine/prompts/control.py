"""Control tokens in the texts of a conversation: a tokenizer reads them as marks of turns, whatever their author."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

_MARK = re.compile(r"[<\[{⟨｜].*[>\]}⟩｜]", re.DOTALL)
"""The form of marks ("<think>", "[TOOL_CALLS]") that a tokenizer knows as one token and does not call special."""


def control_tokens(tokenizer: PreTrainedTokenizerBase, texts: Any) -> tuple[str, ...]:
    """The control tokens that a tokenizer reads in texts: those of users, passages and tool results alike.

    With one of them a text can end its own turn and write another one, as the chat template does. `texts` is any
    structure of texts: messages, passages, arguments of calls.
    """
    added = tokenizer.added_tokens_decoder.items()
    control = {
        id: token.content for id, token in added if token.content and (token.special or _MARK.fullmatch(token.content))
    }
    first = {content[0] for content in control.values()}
    doubtful = [text for text in _strings(texts) if not first.isdisjoint(text)]
    if not doubtful:
        return ()
    read = cast("Any", tokenizer)(doubtful, add_special_tokens=False)["input_ids"]
    return tuple(sorted({control[id] for ids in read for id in ids if id in control}))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings(list(cast("Mapping[Any, Any]", value).values()))
    elif isinstance(value, (list, tuple)):
        for part in cast("list[Any]", value):
            yield from _strings(part)
