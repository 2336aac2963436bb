"""The text of a cell: one answer, several next to each other, or a list, dict or object that a program has written.

Nothing is guessed: a text that may be several answers is refused by its reader, and a list of one text is the way to
write one answer with such marks in it.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterable
from typing import Any, cast

PLACEHOLDERS = frozenset(
    ("nan", "null", "none", "nil", "n/a", "#n/a", "<na>", "nat", "undefined", "<unk>", "-", "--", "—", "?", "na", "tbd")
)
"""Marks that programs and people write for a missing answer, in any case of letters (but "Na" is sodium)."""
OF_PROGRAMS = re.compile(r"TRUE|FALSE|\d{4}-\d\d-\d\d 00:00:00")
"""Values as spreadsheets and pandas write them, in the place of yes, no and a date."""
WORKING = re.compile(r"(?:^|\n)####[ \t]*(\S.*?)\s*\Z")
"""The end of GSM8K's references: the answer behind its working."""
_ENTITY = re.compile(r"&#?\w+;")
_IN_SENTENCES = (r"\|", r";\s*(?=[^\sa-z])")
_IN_PHRASES = (r"\|", r";", r"[\t\n]", r"(?<!\d)\s+/|/\s+(?!\d)", r"(?i)(?<=\byes)/(?=no\b)|(?<=\bno)/(?=yes\b)")
_WORDS, _NO_WORDS = r"(?<=[^\W\d_]{3})/(?=[^\W\d_]{3})", re.compile(r"\d|^/|//|\.\w+$")
_OR = r"(?i)\s+or\s+"
"""Marks between answers: in a sentence, in other texts; a slash between words, but for rates and paths; "or"."""
_CONTAINER = r"[\[({]\s*['\"\[({].*[\])}]"
_CALL = r"(?:array|Series|Index|tensor|set|frozenset|tuple|list|deque|dict\w*|OrderedDict|Counter|defaultdict)\(.*\)"
_OBJECT = r"page_content=['\"].*|[\[({]?\s*[A-Z]\w*\(\w+=.*\)[\])}]?|\[?<[\w.]+ object at 0x[0-9a-fA-F]+>.*"
WRITTEN_PASSAGE = re.compile(f"{_CONTAINER}|{_CALL}|{_OBJECT}", re.DOTALL)
_PLAIN_LIST = r"[\[{].*[,;|].*[\]}]|\[[\d.\s]+\]|\([\d\s.,]*,[\d\s.,]*\)|\(\s*\)|\{\s*\}"
WRITTEN = re.compile(f"{WRITTEN_PASSAGE.pattern}|{_PLAIN_LIST}", re.DOTALL)
"""Lists, dicts, tuples, sets, arrays and objects, as programs write them into a text."""


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


def several(text: str) -> list[str] | None:
    """The answers that a text seems to hold next to each other; None where it is one.

    A sentence is one answer, whatever marks are in it, and so are "AC/DC", "9/11", "60 miles/hour" and "AT&amp;T".
    """
    text = _ENTITY.sub("&", text.strip())
    words = text.split()
    if len(words) >= 8 and text.endswith((".", "!", "?")):
        marks = _IN_SENTENCES
    else:
        marks = [*_IN_PHRASES, *(() if _NO_WORDS.search(text) else (_WORDS,)), *((_OR,) if len(words) <= 5 else ())]
    for mark in marks:
        parts = [part.strip() for part in re.split(mark, text) if part.strip()]
        if len(parts) > 1:
            return parts
    return None
