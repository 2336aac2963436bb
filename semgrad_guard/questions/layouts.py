"""How well-known data and tools lay out their records: the text of a cell, the choices of a question, nested documents.

A cell holds one answer, several next to each other, or a list, dict or object that a program has written. Nothing is
guessed: a text that may be several answers, or none, is refused in the words of its kind (a table of `known.toml`), and
{"text": "..."} is the way to write one answer that looks like that.
"""

from __future__ import annotations

import ast
import html
import io
import itertools
import json
import re
import string
import tokenize
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, cast

from semgrad_guard.files import table_of

Record = dict[str, Any]
KNOWN: dict[str, Any] = table_of("semgrad_guard.questions", "known.toml")
"""The names and words of well-known data."""
TRUTH = {"true": True, "yes": True, "1": True, "1.0": True, "false": False, "no": False, "0": False, "0.0": False}
"""A flag or a grade, as programs and people write it."""

_RATE_OR_PATH = re.compile("|".join(KNOWN["one_answer"]["rate_or_path"]))
_WORKING, _BOXED = re.compile(r"(?:^|\s)####\s*"), re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_BULLET = re.compile(r"(?:[-*•]|\(?\d{1,2}[.)])\s+")
_AROUND_WORDS = "()[]<>.!\"'"


class FaultError(ValueError):
    """A record or a cell cannot be read, or may mean two things; the message completes the place of the record.

    Its words are those of the table of faults, filled with `parts`.
    """

    def __init__(self, fault: str, **parts: object) -> None:
        super().__init__(KNOWN["faults"][fault].format(**parts))


def shown(value: Any) -> str:
    """A value in a message, as JSON."""
    return json.dumps(value, ensure_ascii=False, default=str)


@dataclass(frozen=True)
class _Form:
    """A kind of text that is no answer, and where it is none."""

    kind: str
    where: str
    fault: str = ""
    words: Sequence[str] = ()
    patterns: Sequence[str] = ()

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Any of its whole texts."""
        return re.compile("|".join(self.patterns) or "(?!)", re.DOTALL)

    def holds(self, text: str) -> bool:
        """Whether a text is of this kind."""
        bare = text.lower()
        is_word = bool(self.words) and not {bare, bare.strip(_AROUND_WORDS)}.isdisjoint(self.words)
        return (is_word and text != "Na") or self.pattern.fullmatch(text) is not None


_FORMS = [_Form(**form) for form in KNOWN["forms"]]


def is_a(text: str, *kinds: str) -> bool:
    """Whether a text is of one of these kinds of the table."""
    return any(form.holds(text.strip()) for form in _FORMS if form.kind in kinds)


def require_plain(text: str, name: str, where: str) -> None:
    """Refuse a text of a column that is no answer.

    `where` it is: "text" (by itself), "object", "list" (alone in one: it was meant as one, but for marks that no
    text has) or "several" (in a list of several).
    """
    bare = unicodedata.normalize("NFKC", html.unescape(text)).strip()
    for form in _FORMS:
        if where in form.where.split():
            parts = _several(bare, is_listed=where == "list") if form.kind == "marks" else []
            if parts or form.holds(text.strip()) or form.holds(bare):
                meant = shown({"text": text})[:200]
                fault = form.fault or form.kind
                raise FaultError(fault, name=name, text=shown(text)[:200], parts=shown(parts)[:200], meant=meant)


def _several(text: str, *, is_listed: bool) -> list[str]:
    """The answers that a text seems to hold next to each other; none where it is one.

    A sentence is one answer, whatever marks are in it, and so are "AC/DC", "9/11" and "60 miles/hour".
    """
    words, marks = text.split(), ["always"]
    if len(words) >= 8 and text.rstrip("\"')”’").endswith((".", "!", "?")):
        marks.append("in_sentences")
    elif is_listed:
        marks.append("in_lists")
    else:
        marks.append("in_phrases")
        marks += ["numbered"] if re.match(r"\(?(?:1|a|i)[.)]\s", text) else []
        marks += ["between_words"] if not _RATE_OR_PATH.search(text) else []
        marks += ["alternatives"] if len(words) <= 9 else []
    parts = re.split("|".join(KNOWN["marks"][mark] for mark in marks), text)
    found = [part.strip() for part in parts if re.search(r"\w", part)]
    return found if len(found) > 1 else []


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


COLUMNS, MARKS, _BEFORE = (KNOWN["choices"][name] for name in ("columns", "marks", "before"))
_ENDS = ("abcdefghij", "123456789")
_LABELLED = re.compile(r"\(?([A-Ja-j])[).:]\s*(\S.*)", re.DOTALL)
_MARK = re.compile(r"\(?([A-Za-z]|\d+)[).:]?")
_LETTER = re.compile(r"[(（]?([A-Ja-jＡ-Ｊ]|\d)(?:[)）.:]?|[)）.:]\s.*)", re.DOTALL)
_LISTED = re.compile(
    r"(?:^|[\s(\[])([A-Ja-j]|[1-9](?=[).\]]))(?:[).:\]-]+[\s,?.]|[).\]]+$|(?<=\n[A-J])\s)",
)
_MARKS = re.compile(r"[A-J](?:\s*[,;&/]?\s*[A-J])+")
_COUNTED, _LIKE, _WRONG = (re.compile(KNOWN["choices"][name]) for name in ("counted", "like", "wrong"))


@dataclass(frozen=True)
class Choices:
    """Texts by label ("A", "B", ... where the data names none), and the columns that hold them.

    Numbers count `from_zero` where the data is known to: MMLU's `choices`.
    """

    texts: Mapping[str, Any]
    columns: Sequence[str]
    from_zero: bool = False

    def meant(self, value: Any, column: str) -> str | None:
        """The text of the choice that a value names; None where the value is an answer by itself.

        Raises:
            FaultError: it names none, or may name two.
        """
        text, of_columns = str(value).strip(), len(self.columns) > 1
        if of_columns and text.lower() in map(str.lower, self.columns):
            text = text[-1]
        mark, labelled = _MARK.fullmatch(text), _LABELLED.fullmatch(text)
        wanted = {text.casefold(), labelled[2].casefold() if labelled else ""}
        found = {
            str(choice)
            for choice in self.texts.values()
            if str(choice).casefold() in wanted and (isinstance(choice, int) or not isinstance(value, int))
        }
        if not found and _MARKS.fullmatch(text) and self.texts.keys() >= {*re.findall("[A-J]", text)}:
            raise FaultError("several_choices", name=column, text=text)
        if of_columns and not mark:
            return None  # columns A and B may be something else
        if mark:
            label = mark[1].upper()
            found |= {str(choice) for known, choice in self.texts.items() if known == label}
            if label.isdecimal() and self.from_zero:
                found |= {*map(str, [*self.texts.values()][int(label) : int(label) + 1])}
            if of_columns and not found and label.isdecimal() and int(label) > len(self.columns):
                return None
        is_counted = of_columns and text.isdecimal() and _COUNTED.search(plain(column))
        if len(found) != 1 or is_counted:
            raise FaultError("choice", text=shown(text), name=column, columns=", ".join(self.columns))
        return found.pop()

    def also_meant(self, value: Any, column: str) -> str | None:
        """The text that another column's value names; None too where it names none for sure."""
        try:
            return self.meant(value, column)
        except FaultError:
            return None


def require_no_choice(text: str, column: str, question: str, others: Mapping[str, Any]) -> None:
    """Refuse the letter or number of a choice that the question's own text lists, or one of the `others`: columns that
    no field is read from."""
    if (mark := _LETTER.fullmatch(text.strip())) is None:
        return
    listed = {one[1].upper() for one in _LISTED.finditer(question)}
    in_question = mark[1].upper() in listed and (listed >= {"A", "B"} or listed >= {"1", "2"})
    others = {name: held for name, held in others.items() if not _WRONG.search(plain(name))}
    like = [name for name in others if _LIKE.search(plain(name))]
    lists = [name for name in (others if mark[1].isalpha() else like) if _is_list_of_texts(others[name])]
    if in_question or lists or len(like) > 1:
        place = "the question lists" if in_question else f'"{(lists or like)[0]}" may list'
        raise FaultError("listed_choice", text=shown(text), name=column, place=place, meant=shown({"text": text}))


def _is_list_of_texts(value: Any) -> bool:
    """Several texts, or an object of them by letters or numbers."""
    held: Any = literal(value)
    if isinstance(held, dict) and all(len(label) == 1 for label in cast("Record", held)):
        held = [*cast("Record", held).values()]
    texts = cast("list[Any]", held) if isinstance(held, list) else []
    return len(texts) > 1 and all(isinstance(text, str) for text in texts)


def choices_of(record: Mapping[str, Any], names: Mapping[str, Sequence[str]]) -> Choices | None:
    """The choices of a record, whose `names` are given by their plain spelling; None where it has none.

    Raises:
        FaultError: there are some that cannot be read.
    """
    for before, ends in itertools.product(_BEFORE, _ENDS):
        columns = [names[before + end][0] for end in ends if before + end in names]
        if len(columns) > 1 and {before + ends[0], before + ends[1]} <= {*names}:
            return Choices({column[-1].upper(): str(record[column]) for column in columns}, columns)
    for column in COLUMNS:
        for name in names.get(column, ()):
            if held := literal(record[name]):
                from_zero = column == "choices" and isinstance(held, list)
                return Choices(_by_label(held, name), [name], from_zero)
    return None


def _by_label(held: Any, name: str) -> dict[str, Any]:
    """Choices as a list of texts (perhaps with letters before them), or of objects; as an object; or ARC's."""
    labels: Sequence[Any] = string.ascii_uppercase
    texts: list[Any] = cast("list[Any]", held) if isinstance(held, list) else [None]
    if isinstance(held, dict):
        own = cast("dict[str, Any]", held)
        labels, texts = [*own], [*own.values()]
        if isinstance(own.get("text"), list):
            labels, texts = own.get("label", string.ascii_uppercase), own["text"]
    elif all(isinstance(choice, dict) and {"label", "text"} <= choice.keys() for choice in texts):
        labels, texts = [choice["label"] for choice in texts], [choice["text"] for choice in texts]
    if not all(isinstance(text, str | int | float) for text in texts):
        raise FaultError("choices", name=name)
    parts = [part for text in texts if (part := _LABELLED.fullmatch(str(text)))]
    if [part[1].upper() for part in parts] == [*labels][: len(texts)]:
        return {part[1].upper(): part[2].strip() for part in parts}
    return {str(label).upper(): text for label, text in zip(labels, texts, strict=False)}


@lru_cache(maxsize=4096)  # every record of a file has the same names
def plain(name: str) -> str:
    """A column's name without what spellings differ in: "Ground Truth", "ground_truth" and "groundTruth" are one."""
    return re.sub(r"[\W_]", "", name).lower()


_INPUTS, _OF_A_RUN, _ASSERTED = (KNOWN["layouts"][name] for name in ("inputs", "of_a_run", "asserted"))
_LISTS, _EXPECTED, _ANSWERS = (
    frozenset(map(plain, KNOWN["layouts"][name])) for name in ("lists", "expected", "answers")
)
_QUESTION = frozenset(map(plain, KNOWN["columns"]["question"]))
_REFERENCES = _EXPECTED | {"groundtruth", "groundtruths"}
_PARTS = _EXPECTED | {"outputs", *_INPUTS}
_AROUND = {"table", *map(plain, KNOWN["passages"]["names"][1])}
"""Fields of a document that all of its questions are about."""


def records_in(document: Record) -> list[Any]:
    """The records of a JSON document that is one object, or the object itself, if it is a record.

    SQuAD, TriviaQA and others (a list under a name), the hub's viewer (`rows`), pandas' columns by row, columns as
    lists, and objects by their ids (DROP).

    Raises:
        FaultError: it holds several lists of records.
    """
    names = {plain(name): name for name in document}
    if "columns" in names and all(isinstance(row, list) for row in document.get(names.get("data", ""), [None])):
        return [dict(zip(document[names["columns"]], row, strict=False)) for row in document[names["data"]]]
    questions = [held for name, held in flat(document).items() if plain(name) in _QUESTION]
    if any(isinstance(held, str) or (_objects(held) and "role" in held[0]) for held in questions):
        return [document]
    values = [*document.values()]
    are_lists = bool(values) and all(isinstance(column, list) for column in values)
    if are_lists and len({*map(len, values)}) == 1 and not all(map(_objects, values)):
        return [dict(zip(document, row, strict=True)) for row in zip(*values, strict=True)]
    if values and all(isinstance(held, dict) for held in values):
        if all(row.isdigit() for column in values for row in column):
            return [{name: document[name].get(row) for name in document} for row in values[0]]
        return [record for key, held in document.items() for record in _within({"id": key, **held})]
    lists = {name: cast("list[Any]", held) for name, held in document.items() if _objects(held)}
    named = {name: held for name, held in lists.items() if plain(name) in _LISTS} or lists
    if len(named) > 1:
        raise FaultError("lists", names=", ".join(named))
    around = _around(document, [*named.values()])
    return [{**around, **record} for held in named.values() for entry in held for record in _within(entry)] or [
        document
    ]


def _objects(held: Any) -> bool:
    """A list of objects, one at least."""
    return isinstance(held, list) and held != [] and all(isinstance(entry, dict) for entry in cast("list[Any]", held))


def _within(entry: Record) -> list[Record]:
    """The questions of one of SQuAD's articles or DROP's passages; a row of the hub's viewer; else the entry itself."""
    if isinstance(row := entry.get("row"), dict):
        cut = entry.get("truncated_cells", ())
        return [{name: held for name, held in cast("Record", row).items() if name not in cut}]
    held = next((entry[name] for name in ("paragraphs", "qas", "qa_pairs") if _objects(entry.get(name))), None)
    if held is None or not _QUESTION.isdisjoint(map(plain, entry)):
        return [entry]
    return [{**_around(entry, [held]), **record} for part in held for record in _within(part)]


def _around(document: Record, records: list[Any]) -> Record:
    """The fields that all of a document's `records` share."""
    return {name: held for name, held in document.items() if plain(name) in _AROUND and held not in records}


def flat(record: Record) -> Record:
    """The record with the fields of its parts as its own: those of tools, and Natural Questions' annotations."""
    if "annotations" in record and ("document_text" in record or isinstance(record.get("document"), dict)):
        return _natural_questions(record)
    found = _nested(record)
    if isinstance(found.get("inputs"), dict):
        found = _langsmith(found)
    for name in _INPUTS:
        if isinstance(found.get(name), dict):
            found |= found.pop(name)
    for name in found:
        if plain(name) in _EXPECTED:
            found[name] = _only(found[name])
    if isinstance(stem := found.get("question"), dict):  # CommonsenseQA's and NarrativeQA's questions
        parts = dict(cast("Record", stem))
        text = parts.pop("stem", parts.pop("text", None))
        found = {**parts, **found, "question": text}
    return _promptfoo(found)


def _nested(record: Record) -> Record:
    """The record with its parts as objects, where tables hold them as JSON, or each field of them as name.field."""
    found: Record = {}
    for name, value in record.items():
        part, mark, field = name.replace("/", ".").partition(".")
        if mark and plain(part) in _PARTS:
            found.setdefault(part, {})[field] = value
            continue
        found[name] = value
        if plain(name) in _PARTS and isinstance(value, str) and value.lstrip().startswith("{"):
            with suppress(ValueError):
                found[name] = json.loads(value)
    return found


def _langsmith(record: Record) -> Record:
    """LangSmith's record, whose `outputs` are references in an example, and a model's own in a run or a result."""
    found = dict(record)
    outputs = found.pop("outputs", None)
    if "reference" in found:
        found["reference_outputs"] = found.pop("reference")
    has_references = not _REFERENCES.isdisjoint(map(plain, found))
    is_example = not has_references and not any(name in record for name in _OF_A_RUN)
    if outputs is None:
        return found
    return {**found, "reference_outputs": outputs} if is_example else {**found, "response": _only(outputs)}


def _only(outputs: Any) -> Any:
    """The answer among a record's outputs: the only one, or the only one that is called so."""
    if not isinstance(outputs, dict):
        return outputs
    held = cast("Record", outputs)
    if "text" in held or "value" in held or "aliases" in held:  # an answer as SQuAD and TriviaQA write it
        return held
    named = [held[name] for name in held if plain(name) in _ANSWERS and held[name] is not None]
    values = named or [value for name, value in held.items() if not re.search("fact|guideline", plain(name))]
    return values[0] if len(values) == 1 else {"several": held}  # no text, and refused as such


_PREFIX = re.compile(r"([a-z]+(?:-[a-z]+)*)(?:\([\d.]+\))?\s*:\s*(\S.*)", re.DOTALL)


def _promptfoo(record: Record) -> Record:
    """With `answers`: the one thing that promptfoo asserts of the output; what is no text is refused as such."""
    asserted: Any = record.get("assert")
    columns = [name for name in record if re.fullmatch(r"__expected\d*", name)]
    if columns:
        parts = [_PREFIX.fullmatch(str(record[name])) or ("", "equals", record[name]) for name in columns]
        any_of = [str(part[2]).split(",") if part[1].endswith("-any") else part[2] for part in parts]
        asserted = [{"type": part[1], "value": value} for part, value in zip(parts, any_of, strict=True)]
    if not _objects(asserted):
        return record
    found = cast("list[Record]", asserted)
    rest = {name: value for name, value in record.items() if name != "assert" and name not in columns}
    if len(found) != 1 or found[0].get("type") not in _ASSERTED:
        return rest | {"answers": {"assert": found}}
    value = found[0].get("value")
    if isinstance(value, str) and (variable := re.fullmatch(r"\{\{\s*(\w+)\s*\}\}", value)):
        value = rest.pop(variable[1], value)
    return rest | {"answers": value}


def _natural_questions(record: Record) -> Record:
    """Natural Questions with `answers`: the annotators' short answers; none where all of them found nothing at all."""
    tokens = str(record.get("document_text", "")).split(" ")
    answers: dict[str, None] = {}
    long_answers: list[int] = []
    for row in _rows(record["annotations"]):
        for short in _rows(row.get("short_answers") or []):
            text = short.get("text") or " ".join(tokens[short["start_token"] : short["end_token"]])
            answers.update(dict.fromkeys([text] if isinstance(text, str) else text))
        if str(row.get("yes_no_answer")).lower() in ("yes", "no", "0", "1"):
            answers["yes" if str(row["yes_no_answer"]).lower() in ("yes", "1") else "no"] = None
        long_answers.append(cast("Record", row.get("long_answer") or {}).get("start_token", -1))
    rest = {name: value for name, value in record.items() if name != "annotations"}
    if isinstance(question := record.get("question"), dict):
        rest["question"] = cast("Record", question).get("text")
    return {**rest, "answers": list(answers)} if answers or max(long_answers) < 0 else rest


def _rows(value: Any) -> Sequence[Record]:
    """Records as a list of them, or as an object of columns, as the hub's files have it."""
    if not isinstance(value, Mapping):
        return cast("Sequence[Record]", value)
    held = cast("Mapping[str, Any]", value)
    if not held or not all(isinstance(column, list) for column in held.values()):
        return [dict(held)]
    return [dict(zip(held, row, strict=True)) for row in zip(*held.values(), strict=False)]


def span_answers(held: Mapping[str, Any]) -> list[str] | None:
    """DROP's answer, a number, a date or a span; None where it has several spans, which may all be needed."""
    day = cast("Record", held.get("date") or {})
    date = " ".join(str(day[part]) for part in ("day", "month", "year") if day.get(part))
    texts = (str(held.get("number") or ""), date, *(held.get("spans") or ()))
    found = dict.fromkeys(text for text in texts if text)
    return [*found] if len(found) == 1 else None
