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
from typing import Any, cast

from semgrad_guard.files import table_of

KNOWN: dict[str, Any] = table_of("semgrad_guard.questions", "known.toml")
"""The names and words of well-known data."""
PLACEHOLDERS = frozenset(KNOWN["cells"]["missing"])
TRUTH = {"true": True, "yes": True, "1": True, "1.0": True, "false": False, "no": False, "0": False, "0.0": False}
"""A flag or a grade, as programs and people write it."""

_DATE = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d[\d:.]*(?:Z|[+-]\d\d:\d\d)?|1\d{12}")
"""A date as pandas and spreadsheets write it, or its milliseconds."""
_WORKING, _BOXED = re.compile(r"(?:^|\s)####\s*"), re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_BULLET = re.compile(r"(?:[-*•]|\(?\d{1,2}[.)])\s+")

_ALWAYS = r"[|¦‖∣；｜؛\x1c-\x1f]|\\n|(?i:<br\s*/?>|</?li>|<sep>|\[sep\]|</s>)|#{2}|%%|@@|\*{3}|[•·]\s"
_IN_SENTENCES = r";\s*(?=[^\sa-z])"
_IN_PHRASES = r";|[\t\n、／]|\s(?:~|::)\s|(?<!\d)\s+/|/\s+(?!\d)|(?i:(?<=\byes)/(?=no\b)|(?<=\bno)/(?=yes\b))"
_BETWEEN_WORDS = r"(?<=[^\W\d_]{2})/(?=[^\W\d_]{2})"
_OR = r"(?i:[\s(,]+(?:or|oder|ou?|oppure|или|a\.?k\.?a\.?|also known as)\s+|[(,]\s*also\s+)|または|もしくは|或"
_NUMBERED = r"(?:^|\s)\(?(?:\d|[a-d]|i{1,3})[.)]\s+"
"""Marks between answers: in any text, in a sentence, in a phrase; in a phrase without rates and paths, in a short one,
and in one that begins with a number."""
_RATE_OR_PATH = re.compile(r"\d|^/|//|\.\w+$|^(?:ac/dc|tcp/ip|and/or)$", re.IGNORECASE)

_CALL = (
    r"(?:\w+\.)*(?:array|Series|Index|tensor|set|frozenset|tuple|list|deque|dict\w*|OrderedDict|Counter|defaultdict"
    r"|str_|float\d+|int\d+|bool_|Decimal|Timestamp|date|datetime)\("
)
_CONTAINER = rf"[\[({{]\s*(?:\\?['\"\[({{]|{_CALL}).*[\])}}]|{_CALL}.*\)|\[\s*['\"{{].*|\{{\s*['\"].*|b'.*'|b\".*\""
_OBJECT = (
    r"(?:page_content=|content=|text=|Node ID: )['\"\w].*|[\[({]?\s*[A-Z]\w*\(\w+=.*\)[\])}]?"
    r"|\[?<[\w.]+ object at 0x[0-9a-fA-F]+>.*|[\[{]\s*'\w.*'.*[\]}]"
)
_PLAIN_LIST = r"[\[{].*[,;|].*[\]}]|\[[\d.\s]+\]|\([\d\s.,]*,[\d\s.,]*\)|\(\s*\)|\{\s*\}|.*\\boxed.*"
_SERIES = r"(?:\w+ .*\n)+.*\bdtype: \w+|[\"'][\[({]\s*['\"].*"
_TAGGED = r".*<(?P<tag>\w+)[^<>]*>.*</(?P=tag)>.*"
WRITTEN_OBJECT = re.compile(_OBJECT, re.DOTALL)
WRITTEN_PASSAGE = re.compile(f"{_CONTAINER}|{_OBJECT}|{_SERIES}", re.DOTALL)
_WRITTEN = re.compile(f"{_CONTAINER}|{_OBJECT}|{_SERIES}|{_PLAIN_LIST}", re.DOTALL)
"""Objects, containers and lists, as programs write them into a text, whole or broken off."""
_QUOTED = r"(?:(?:\"[^\"]*\"|'[^']*'|“[^”]*”)[\s,]*){2,}"
_NAMED = r"(?i:(?:the )?(?:\w+ )?(?:answer|text)(?: is)?\s*:).*|\w+\s*[:=][^,;]+(?:[,;]\s*\w+\s*[:=][^,;]+)+"
_CHOICE = r"\(?[A-Ja-j](?:\)|:\s).*|[A-J]\.|(?i:(?:option|choice|answer)\s+(?:[a-j]|\d))"
_NOTED = re.compile(f"{_TAGGED}|{_QUOTED}|{_NAMED}|{_CHOICE}", re.DOTALL)
"""Texts in tags or quotes, texts after names, and choices by their letters, as people note them in a cell."""


class FaultError(ValueError):
    """A record or a cell cannot be read, or may mean two things; the message completes the place of the record."""


def shown(value: Any) -> str:
    """A value in a message, as JSON."""
    return json.dumps(value, ensure_ascii=False, default=str)


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
        held = tree.elts if isinstance(tree, ast.Tuple | ast.Set) else []
        found: Any = [ast.literal_eval(item) for item in held] or ast.literal_eval(tree)
        tokens = [*tokenize.generate_tokens(io.StringIO(text).readline)]
    except (ValueError, SyntaxError, MemoryError, RecursionError, tokenize.TokenError):
        return None
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    is_joined = len(texts) != sum(token.type == tokenize.STRING for token in tokens)
    return None if is_joined or (held and not all(isinstance(item, str) for item in found)) else found


def result_of(text: str) -> str:
    r"""The answer behind a working: after GSM8K's `####`, or in the only `\boxed{}`; else the text."""
    if len(parts := _WORKING.split(text.strip())) == 2:
        return parts[1]
    boxed = _BOXED.findall(text)
    return str(boxed[0]) if len(boxed) == 1 else text


def lines_of(text: str) -> list[str]:
    """The lines of a cell, without the bullets of a list."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    bulleted = len(lines) > 1 and all(map(_BULLET.match, lines))
    return [_BULLET.sub("", line, count=1) for line in lines] if bulleted else lines


def require_answer(text: str, name: str) -> None:
    """Refuse a text that means a missing answer."""
    plainly = text.strip().lower()
    if {plainly, plainly.strip("()[]<>.!\"'")} & PLACEHOLDERS and text.strip() != "Na":
        raise FaultError(
            f'has {shown(text)} in "{name}", as programs write where an answer is missing: give the right answer, [] '
            f"if abstaining is right, or [{shown(text)}] if it is meant"
        )


def require_one(text: str, name: str, *, is_listed: bool = False) -> None:
    """Refuse a text that a program has written, or that may be several answers.

    A text that is `is_listed`, alone in a list, was meant as one, but for marks that no text has.
    """
    meant = shown({"text": text})
    if _WRITTEN.fullmatch(text.strip()):
        raise FaultError(
            f'has a list in "{name}" that cannot be read, {shown(text):.200}: write it as JSON, ["...", "..."], or '
            f"{meant:.200} if it is one answer"
        )
    if _DATE.fullmatch(text.strip()):
        raise FaultError(
            f'has {shown(text)} in "{name}", as programs write a date: write the words of an answer, or {meant} if it '
            "is meant"
        )
    if parts := _several(text, is_listed=is_listed):
        raise FaultError(
            f'has {shown(text):.200} in "{name}", which looks like several answers: write them as a list, '
            f"{shown(parts):.200}, or {meant:.200} if it is one"
        )
    if not is_listed and _NOTED.fullmatch(text.strip()):
        raise FaultError(
            f'has {shown(text):.200} in "{name}", with tags, quotes, a name or a letter around the answer: write the '
            f"answer's text alone, several as a list, or {meant:.200} if all of it is one answer"
        )


def _several(text: str, *, is_listed: bool) -> list[str]:
    """The answers that a text seems to hold next to each other; none where it is one.

    A sentence is one answer, whatever marks are in it, and so are "AC/DC", "9/11", "60 miles/hour" and "AT&amp;T".
    """
    text = re.sub(r"&#?\w+;", "&", text.strip())
    words, marks = text.split(), [_ALWAYS]
    if len(words) >= 8 and text.rstrip("\"')”’").endswith((".", "!", "?")):
        marks.append(_IN_SENTENCES)
    elif is_listed:
        marks.append(";")
    else:
        marks.append(_IN_PHRASES)
        marks += [_NUMBERED] if re.match(r"\(?(?:1|a|i)[.)]\s", text) else []
        marks += [_BETWEEN_WORDS] if not _RATE_OR_PATH.search(text) else []
        marks += [_OR] if len(words) <= 9 else []
    parts = [part.strip() for part in re.split("|".join(marks), text) if re.search(r"\w", part)]
    return parts if len(parts) > 1 else []
