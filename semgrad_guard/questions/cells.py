"""The text of a cell: one answer, several next to each other, or a list, dict or object that a program has written.

Nothing is guessed: a text that may be several answers is refused by its reader, and {"text": "..."} is the way to write
one answer with such marks in it.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterable
from typing import Any, cast

from semgrad_guard.files import table_of

KNOWN: dict[str, Any] = table_of("semgrad_guard.questions", "known.toml")
"""The names and words of well-known data."""
PLACEHOLDERS = frozenset(KNOWN["cells"]["missing"])
NO_ANSWER = frozenset(KNOWN["cells"]["no_answer"])
TRUTH = {"true": True, "yes": True, "1": True, "1.0": True, "false": False, "no": False, "0": False, "0.0": False}
"""A flag or a grade, as programs and people write it."""
DATE = re.compile(r"\d{4}-\d\d-\d\d[ T]00:00:00(?:\.0+)?(?:Z|\+00:00)?|1\d{12}")
"""A date as pandas and spreadsheets write it, or its milliseconds."""

_WORKING = re.compile(r"(?:^|\n)####[ \t]*(\S.*?)\s*\Z")
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_BULLET = re.compile(r"(?:[-*•]|\(?\d{1,2}[.)])\s+")
_ENTITY = re.compile(r"&#?\w+;")
_STRONG = (r"\|", r"(?i)\\n|<br\s*/?>|<sep>|\[sep\]|</s>|\s#{2,3}\s", "[•·]\\s", "[；｜؛]")
_IN_SENTENCES = (*_STRONG, r";\s*(?=[^\sa-z])")
_IN_LISTS = (*_STRONG, r";")
_IN_PHRASES = (*_IN_LISTS, r"[\t\n、]", r"(?<!\d)\s+/|/\s+(?!\d)", r"(?i)(?<=\byes)/(?=no\b)|(?<=\bno)/(?=yes\b)")
_WORDS = r"(?<=[^\W\d_]{2})/(?=[^\W\d_]{2})"
_NO_WORDS = re.compile(r"\d|^/|//|\.\w+$|^(?:ac/dc|tcp/ip|and/or)$", re.IGNORECASE)
_OR = r"(?i)[\s(,]+(?:or|a\.?k\.?a\.?)\s+"
_NUMBERED = r"(?:^|\s)\(?(?:\d|[a-d]|i{1,3})[.)]\s+"
"""Marks between answers: in a sentence, in a list of one text, in other texts; a slash between words, but for rates and
paths; "or"; numbers or letters before each."""

_CALLED = (
    r"(?:\w+\.)*(?:array|Series|Index|tensor|set|frozenset|tuple|list|deque|dict\w*|OrderedDict|Counter|defaultdict"
    r"|str_|float\d+|int\d+|bool_|Decimal|Timestamp|date|datetime)\("
)
_CONTAINER = rf"[\[({{]\s*(?:['\"\[({{]|{_CALLED}).*[\])}}]|{_CALLED}.*\)"
_BROKEN_OFF = r"\[\s*['\"{].*|\{\s*['\"].*"
_BYTES = r"b'.*'|b\".*\""
_OBJECT = r"(?:page_)?content=['\"].*|[\[({]?\s*[A-Z]\w*\(\w+=.*\)[\])}]?|\[?<[\w.]+ object at 0x[0-9a-fA-F]+>.*"
OBJECT = re.compile(_OBJECT, re.DOTALL)
WRITTEN_PASSAGE = re.compile(f"{_CONTAINER}|{_OBJECT}|{_BROKEN_OFF}|{_BYTES}", re.DOTALL)
_PLAIN_LIST = r"[\[{].*[,;|].*[\]}]|\[[\d.\s]+\]|\([\d\s.,]*,[\d\s.,]*\)|\(\s*\)|\{\s*\}|.*\bdtype: \w+"
WRITTEN = re.compile(f"{WRITTEN_PASSAGE.pattern}|{_PLAIN_LIST}", re.DOTALL)
"""Lists, dicts, tuples, sets, arrays and objects, as programs write them into a text, whole or broken off."""


class FaultError(ValueError):
    """A record or a cell cannot be read, or may mean two things; the message completes the place of the record."""

    def __init__(self, kind: str, **words: Any) -> None:
        super().__init__(KNOWN["faults"][kind].format(**words))


def literal(value: Any) -> Any:
    """A list or a dict that is written in a text, as JSON or Python; else the text, or any other value, itself."""
    if not isinstance(text := value, str) or not text.lstrip().startswith(("[", "{", "(")):
        return value
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        found = _python_literal(text.strip())
    return cast("Any", found) if isinstance(found, list | dict) else text


def _python_literal(text: str) -> Any:
    """A container as `str` writes it; tuples and sets are lists, and hold texts alone: (1, 2) may be one answer.

    Without commas (numpy's way) Python would join texts: that is none.
    """
    try:
        tree = ast.parse(text, mode="eval").body
        found: Any = [*map(ast.literal_eval, tree.elts)] if isinstance(tree, ast.Set) else ast.literal_eval(tree)
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        strings = [token for token in tokens if token.type == tokenize.STRING]
    except (ValueError, SyntaxError, MemoryError, RecursionError, tokenize.TokenError):
        return None
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    if len(texts) != len(strings):
        return None
    if isinstance(tree, ast.Tuple | ast.Set):
        held = list(cast("Iterable[Any]", found))
        return held if held and all(isinstance(item, str) for item in held) else None
    return found


def result_of(text: str) -> str:
    r"""The answer behind a working: after GSM8K's `####`, or in the only `\boxed{}`; else the text."""
    if end := _WORKING.search(text):
        return end[1]
    boxed = _BOXED.findall(text)
    return str(boxed[0]) if len(boxed) == 1 else text


def lines_of(text: str) -> list[str]:
    """The lines of a cell, without the bullets of a list."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    bulleted = len(lines) > 1 and all(map(_BULLET.match, lines))
    return [_BULLET.sub("", line, count=1) for line in lines] if bulleted else lines


def several(text: str, *, listed: bool = False) -> list[str] | None:
    """The answers that a text seems to hold next to each other; None where it is one.

    A sentence is one answer, whatever marks are in it, and so are "AC/DC", "9/11", "60 miles/hour" and "AT&amp;T". A
    text that is `listed` alone in a list was meant as one, but for marks that no text has.
    """
    text = _ENTITY.sub("&", text.strip())
    words = text.split()
    if len(words) >= 8 and text.rstrip("\"')”’").endswith((".", "!", "?")):
        marks = _IN_SENTENCES
    elif listed:
        marks = _IN_LISTS
    else:
        numbered = (_NUMBERED,) if re.match(r"\(?(?:1|a|i)[.)]\s", text) else ()
        either = (_OR,) if len(words) <= 9 else ()
        marks = (*_IN_PHRASES, *numbered, *(() if _NO_WORDS.search(text) else (_WORDS,)), *either)
    for mark in marks:
        parts = [part.strip() for part in re.split(mark, text) if re.search(r"\w", part)]
        if len(parts) > 1:
            return parts
    return None
