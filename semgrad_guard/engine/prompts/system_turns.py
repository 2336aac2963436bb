"""System turns for chat templates without such a role, or with one at the beginning only: the user's turn has the text.

LlamaIndex's default prompts, agents' instructions and summaries are system turns, which the templates of Gemma 2 and of
the first Mistral refuse. Other templates leave a late system turn out in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from semgrad_guard.engine.prompts.marks import TEMPLATE_FAILURES

Turn = dict[str, Any]
_OTHER = "semgrad-guard: another text"


def foldings(turns: Sequence[Turn]) -> Iterator[list[Turn]]:
    """The turns without system turns but the first, then without any; none where there are none."""
    system = [index for index, turn in enumerate(turns) if turn["role"] == "system"]
    if any(system):
        yield [*turns[:1], *_folded(turns[1:])]
    if system:
        yield _folded(turns)


def drops_system(turns: Sequence[Turn], text: str, applied: Callable[[Sequence[Turn]], str]) -> bool:
    """Whether a prompt holds nothing of a system turn; `applied` is the template."""
    for index, turn in enumerate(turns):
        if turn["role"] == "system" and turn["content"].strip() and turn["content"].strip() not in text:
            try:
                if applied([*turns[:index], {**turn, "content": _OTHER}, *turns[index + 1 :]]) == text:
                    return True
            except TEMPLATE_FAILURES:  # it reads the text, in a way of its own
                continue
    return False


def _folded(turns: Sequence[Turn]) -> list[Turn]:
    """System turns as the beginning of the next turn of the user; as the end of the last one where none follows."""
    kept, waiting = list[Turn](), list[str]()
    for turn in turns:
        if turn["role"] == "system":
            waiting.append(turn["content"])
        elif turn["role"] == "user":
            kept.append({**turn, "content": _joined([*waiting, turn["content"]])})
            waiting.clear()
        else:
            kept.append(turn)
    last = max((index for index, turn in enumerate(kept) if turn["role"] == "user"), default=None)
    if last is None:
        return [*kept, {"role": "user", "content": _joined(waiting)}] if waiting else kept
    kept[last] = {**kept[last], "content": _joined([kept[last]["content"], *waiting])}
    return kept


def _joined(texts: Sequence[str]) -> str:
    return "\n\n".join(text for text in texts if text.strip())
