"""The units of a text: sentences, the fields of JSON, and words.

Where a sentence ends is decided once and for all while the text is still being written. It ends with ".", "!", "?" or
"…" (quotation marks, brackets and Markdown may close behind it) before white space, with "。", "！" or "？", or with
its line. It does not end before a small letter; within a quotation, brackets or code; in an abbreviation, an initial or
an ordinal, as far as these are known; nor where a line of prose is wrapped. A code block is one sentence, a row of a
table and an item of a list are one each. Every sentence holds a letter or a digit, and owns the white space behind it.

A border is decided once what follows it is known far enough, at most `_HELD` characters further; until then the text
behind the last decided border is the open sentence.

Why no library: of 30 texts in eight languages that these rules had not been written for, they divided 27 as expected,
pysbd 0.3.4 (not changed since 2021) 21 and sentencex 1.0.32 20, both told the language, which a guard does not know.
Those 30 and 56 others are in tests/engine/test_text_units.py. Neither library says when a border is decided.

`leanings` finds sentences that cannot be read without an earlier one: left out with it, and no surer than it.

Words are normalised as in SQuAD (Rajpurkar et al., "SQuAD: 100,000+ questions for machine comprehension of text", EMNLP
2016).
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

Span = tuple[int, int]
"""Where a piece of a text begins, and where it ends."""

_HELD = 300
"""The longest quotation, and the longest brackets, within which no sentence ends."""
_WRAPPED = 40
"""The shortest line of prose that is taken for wrapped."""

_CLOSERS = "[\"'”’“»«)\\]}」』）】*_`]*"
_EMOJI = "[\u2600-\u27bf\ufe0f\u200d\U0001f300-\U0001faff]+"
_CANDIDATE = re.compile(
    rf"(?P<stop>[.!?…]+){_CLOSERS}(?:\s+{_EMOJI})*\s+|(?P<wide>[。！？｡।؟۔]+)[\"'”’»)\]}}」』）】*_]*\s*|\s*\n\s*"
)
_FINISHED = re.compile(rf"(?:[.!?…]+{_CLOSERS}(?:\s+{_EMOJI})*|[。！？｡।؟۔]+[\"'”’»)\]}}」』）】*_]*)\s*\Z")
_OPENERS = re.compile(r"[\"'“”‘’«»„(\[¿¡「『（*_]*")
_WORD = re.compile(r"[^\W\d_]+")
_ROMAN = re.compile(r"[IVXLC]+")

_PAIRS = ("“”", "„“”", "«»", "「」", "『』", "()", "（）", "``")
_CLOSED = [rf"{re.escape(p[0])}[^{re.escape(p)}\n]{{0,{_HELD}}}[{re.escape(p[1:])}]" for p in _PAIRS]
_OPEN = [rf"{re.escape(p[0])}[^{re.escape(p)}\n]{{0,{_HELD}}}\Z" for p in _PAIRS]
_STRAIGHT = r'(?<![^\s(\[—–-])"(?=\S)'
_CLOSED.append(rf'{_STRAIGHT}[^"\n]{{0,{_HELD}}}"')
_OPEN.append(rf'{_STRAIGHT}[^"\n]{{0,{_HELD}}}\Z')
_BLOCK = r"^[ \t]*(?P<fence>```+|~~~+)[^\n`]*(?:\n(?:(?s:.*?)\n)??[ \t]*(?P=fence)[ \t]*$|\n(?s:.*)\Z|\Z)"
_WHOLE = re.compile("|".join([_BLOCK, *_CLOSED]), re.MULTILINE)
_WHOLE_OR_OPEN = re.compile("|".join([_BLOCK, *_CLOSED, *_OPEN]), re.MULTILINE)


def _words(words: str) -> frozenset[str]:
    return frozenset(words.split())


_NEVER_LAST = _words(
    "MM M Mr Mrs Ms Messrs vs cf approx aprox esp incl viz e.g i.e c.-à-d p.ex p.ej z.B d.h u.a i.d.R o.Ä bzw vgl ca "
    "ggf evtl insb inkl exkl zzgl sog geb Hr Hrn Ud Uds Vd Vds ej av env gegr"
)
"""Abbreviations that are followed by a noun, whatever its first letter."""
_BEFORE_NAMES = _words(
    "Dr Prof St Sr Jr Gen Sen Rep Rev Hon Gov Capt Lt Col Sgt Maj Mt Ft Mme Mlle Mgr Sra Srta Sres Dra Profa Exmo "
    "Ilmo Exma Ing Lic Sig Sigg Dott Avv Arch Fr Hl Dipl Mag Inc Ltd Co Corp Bros Mio Mrd Jh Jhd Chr etc usw usf ecc "
    "EE UU Av Ave Blvd Bd Rd al JJ"
)
"""Abbreviations that end a sentence where a word that often begins one follows, and not before a name."""
_BEFORE_NUMBERS = _words(
    "No Nos no Nr nr Nº nº n pp p S Fig fig Figs Vol vol Art art Arts arts Abs Cap cap Eq eq Sec sec Ch ch Kap Abb "
    "Tab Bd Tel tel pág págs pag pagg núm num Núm Jan Feb Apr Aug Sept Sep Oct Okt Nov Dec Dez str Str op"
)
"""Abbreviations only before a number."""
_STARTERS = _words(
    "A An The This That These Those It Its He She They We You I His Her Their Our My In On At By For From With After "
    "Before During Since When While Where What Who Why How If Although Because But And Or So Then There However Also "
    "Both Each Many Most Some All No Not One Today Yes As To Der Die Das Den Dem Ein Eine Einen Es Er Sie Wir Ihr Im "
    "Am Auf Bei Mit Nach Seit Von Vor Zu Zur Zum Als Wenn Weil Aber Und Oder Dann Dort Hier Doch Auch Sein Seine Ihre "
    "Diese Dieser Dieses Man Heute Nur Le La Les Un Une Il Elle Ils Elles Nous Vous Je Ce Cette Ces Cet Son Sa Ses "
    "Dans En Au Aux Sur Par Pour Avec Puis Mais Et Depuis Selon C L D Cela El Los Las Una Unos Lo Él Ella Ellos Ellas "
    "Esto Este Esta Estos Estas Eso Su Sus Con Por Para Desde Después Pero Y Entre Hoy Se Gli Uno Essa Esso Egli Lui "
    "Lei Loro Questo Questa Questi Queste Nel Nella Dal Dalla Al Alla Per Poi Ma È Durante Si O Os Um Uma Ele Ela "
    "Eles Elas Isso Isto Esse Na Nos Nas Em De Do Da Com Depois Mas E É Foi Seu"
)
"""Words that often begin a sentence, and no name."""
_AFTER_ORDINALS = _words(
    "Januar Jänner Februar März April Mai Juni Juli August September Oktober November Dezember Jahrhundert "
    "Jahrhunderts Jahrtausend Jh"
)
_ORDINAL = re.compile(
    r"(?i:(?<!\bI )\bam|\b(?:der|die|das|dem|den|des|im|vom|zum|zur|beim|seit dem|seine[rnms]?|ihre[rnms]?))\s\d{1,3}\Z"
)
_ITEM = re.compile(r"(?:\A|\n)[\s>*_#(]*(?:\d{1,3}|[A-Za-z]|[ivxIVX]{1,4})\Z")
"""The number of a list's item."""
_SAID = re.compile(r"[とってなのを、，,]|[他她它我你们]{1,3}[^。！？\n]{0,4}[说說问問道]")
_LETTER = re.compile(r"[^\W_]")
_NUMBER = re.compile(r"(?<!\d)\d{1,3}\Z")
_ABBREVIATED = re.compile(r"(?<![^\s\"'’“„«(\[*_])(?:[^\W\d_]\.\s)*[^\W\d_][\w.-]*\Z")
_ACRONYM = re.compile(r"[^\W\d_]{1,2}(?:\.-?[^\W\d_]{1,2})+")
_COMMENT = 8
"""How many characters tell whether a quotation is commented on."""


def sentences(text: str) -> list[Span]:
    """The sentences of a finished text: adjacent half-open spans of characters that cover it."""
    return _spans(text, list(_ends(text, 0, finished=True)))


def is_unfinished(text: str) -> bool:
    """Whether a text ends within a sentence: without a mark that could end one."""
    return _FINISHED.search(text) is None


def decided(text: str, begin: int = 0) -> list[int]:
    """The ends of sentences behind `begin`, itself such an end, that are the same whatever text follows."""
    return list(_ends(text, begin, finished=False))


def _spans(text: str, ends: list[int]) -> list[Span]:
    return list(pairwise([0, *ends, len(text)]))


def _ends(text: str, begin: int, *, finished: bool) -> Iterator[int]:
    """The decided ends behind `begin`. One is decided once a letter or digit follows, for the next sentence's sake."""
    whole = _Whole(text, begin, finished=finished)
    reached, last = begin, None
    for match in _CANDIDATE.finditer(text, begin):
        if last is not None and _LETTER.search(text, last, match.start()):
            yield last
            reached, last = last, None
        held = whole.hold(match)
        ends = _is_end(text, match, finished=finished) if held is False else held and False
        if ends is None:
            return
        if ends and _LETTER.search(text, reached, match.end()):
            last = match.end()
    if last is not None and _LETTER.search(text, last):
        yield last


class _Whole:
    """The stretches within which no sentence ends: code, quotations and brackets."""

    def __init__(self, text: str, begin: int, *, finished: bool) -> None:
        line = len(text[:begin].rstrip(" \t"))  # the sentence before owns the indentation of a code block
        found = (_WHOLE if finished else _WHOLE_OR_OPEN).finditer(text, line)
        self._spans = [(max(match.start(), match.start("fence")), match.end()) for match in found]
        self._open = None if finished else len(text)

    def hold(self, match: re.Match[str]) -> bool | None:
        """Whether a candidate ends within one; None within one that may still turn out to be none.

        Candidates are asked about in their order.
        """
        while self._spans and self._spans[0][1] <= match.end():
            del self._spans[0]
        within = bool(self._spans) and self._spans[0][0] < match.end()
        return None if within and self._spans[0][1] == self._open else within


def _is_end(text: str, match: re.Match[str], *, finished: bool) -> bool | None:
    """Whether a sentence ends at a candidate; None where more text has to be seen."""
    begin, end = match.span()
    opened = _OPENERS.match(text, end)
    first = end if opened is None else opened.end()
    if first == len(text):
        return False if finished else None
    if match["wide"] is not None:  # it ends with its quotation, unless its speaker follows ("「はい。」と言った。")
        if match["wide"] == match[0].rstrip():
            return True
        if not finished and len(text) - end < _COMMENT:
            return None
        return _SAID.match(text, end) is None
    if "\n" in match[0]:  # it ends with its line, unless a long line of prose continues in the next one
        line = begin - (text.rfind("\n", 0, begin) + 1)
        return not (line >= _WRAPPED and match[0].count("\n") == 1 and text[end].islower() and text[begin - 1] != ":")
    if text[first].islower() and "`" not in text[end:first]:
        return False
    return match["stop"] != "." or _full_stop(text, begin, first, finished=finished)


def _full_stop(text: str, at: int, first: int, *, finished: bool) -> bool | None:
    """Whether the full stop at `at` ends a sentence, `first` being where the next word begins."""
    if _ITEM.search(text, max(0, at - 24), at):
        return False
    found = _ABBREVIATED.search(text, max(0, at - 24), at)
    number = _NUMBER.search(text, max(0, at - 4), at)
    if found is None and number is None:
        return True
    word = _WORD.match(text, first)
    following = "" if word is None else word[0]
    if not finished and following and first + len(following) + 1 > len(text) - 1:
        return None  # the word may be longer
    begins = following in _STARTERS and text[first + len(following) : first + len(following) + 1] != "."
    if found is None:
        return following not in _AFTER_ORDINALS and (begins or not _ORDINAL.search(text, max(0, at - 24), at))
    name = re.sub(r"\s", "", found[0])
    if name in _NEVER_LAST or name[0].lower() + name[1:] in _NEVER_LAST:
        return False
    if (name in _BEFORE_NUMBERS or name.endswith("str")) and (text[first].isdigit() or _ROMAN.fullmatch(following)):
        return False
    is_unit = found[0] in "mglsht" and text[: found.start()].rstrip()[-1:].isdigit()  # "5 m"
    if name in _BEFORE_NAMES or _ACRONYM.fullmatch(name) or (len(name) == 1 and not is_unit):
        return begins
    return True


_LEANS = re.compile(
    r"[\s\"'“«„(\[*_>]*(?:"
    # English
    r"(?:It|They|He|She|This|That|These|Those|Its|Their|Theirs|His|Hers?|Them|Both|Neither|Such|Another|Here|There|Then"
    r"|However|Therefore|Thus|Hence|Also|But|And|Or|So|Moreover|Furthermore|Instead|Otherwise|Consequently|Similarly"
    r"|Additionally|Likewise|Nevertheless|Nonetheless|Still|Yet|Afterwards|Later|The (?:former|latter|same|other))\b"
    r"|(?:As a result|For (?:this|that|example|instance)|In (?:addition|contrast|this|that|these|other words)"
    r"|Because of|At (?:this|that)|After (?:this|that)|On the other hand)\b"
    # German
    r"|(?:Er|Sie|Es|Dies(?:e[rnms]?)?|Jene[rnms]?|Ihr(?:e[rnms]?)?|Sein(?:e[rnms]?)?|Beide|Dort|Dann|Danach|Dabei|Dazu"
    r"|Daher|Deshalb|Damit|Dadurch|Dagegen|Jedoch|Aber|Und|Oder|Auch|Außerdem|Zudem|Allerdings|Trotzdem|Somit)\b"
    # French
    r"|(?:Il|Elle|Ils|Elles|Ce|Cette|Ces|Cet|Cela|Ceci|Son|Sa|Ses|Leurs?|Celui|Celle|Ceux|Mais|Et|Donc|Ainsi|Puis|Alors"
    r"|Cependant|Pourtant|Aussi|Ensuite)\b|C['’]est\b"
    # Spanish, Portuguese, Italian
    r"|(?:Él|Ella|Ellos|Ellas|Est[aeo]s?|Es[aeo]s?|Aquel(?:la|los|las)?|Sus?|Ambos|Pero|Y|También|Además|Entonces|Luego"
    r"|Ele|Ela|Eles|Elas|Isso|Isto|Aquilo|Seus?|Suas?|Ambas|Mas|E|Também|Além|Então|Depois"
    r"|Egli|Ess[aoei]|Lui|Lei|Loro|Quest[aoei]|Quell[aoei]|Suo|Suoi|Sue|Ma|Anche|Inoltre|Quindi|Poi|Entrambi)\b"
    # Chinese, Japanese
    r"|[它他她]|这|那|此外|因此|所以|但是|然而|并且|而且|同时|その|それ|この|これ|あの|彼|また|しかし|そして|だから|したがって)"
)
_LISTED = re.compile(r"\s*(?:[-*+•·–]\s|\(?(?:\d{1,3}|[A-Za-z])[.)]\s|\|)")
_CODE = re.compile(r"\s*(?:```|~~~)")
_INTRODUCES = re.compile(r"[:：][\s*_]*\Z")


def leanings(text: str, spans: Sequence[Span]) -> list[int | None]:
    """For each sentence the number of the earlier one that it leans on; None where it can be read by itself.

    It leans on the sentence before it if it opens with a pronoun, or with a word that joins it to that one. Items of a
    list and code lean on the line with a colon that introduces them, rows of a table on its head. No grammar is known:
    "It rains." leans, and a definite description ("The city has ...") does not.
    """
    found: list[int | None] = []
    head: int | None = None
    for number, (start, end) in enumerate(spans):
        sentence = text[start:end]
        item = _LISTED.match(sentence) or _CODE.match(sentence)
        leans = number > 0 and _LEANS.match(sentence, 0 if item is None else item.end())
        if item is not None:
            found.append(number - 1 if leans else head)
            if head is None and sentence.lstrip().startswith("|"):
                head = number
            continue
        found.append(number - 1 if leans else None)
        head = number if _INTRODUCES.search(sentence) else None
    return found


# The fields of JSON: every value that holds no others.

Path = tuple[str | int, ...]
"""The place of a value: names of objects and places in arrays, as in ("cities", 0, "name")."""

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},]|[^\s\[\]{},:"]+')


@dataclass(frozen=True)
class Field:
    """One value of a JSON text: text[start:end], without a string's quotes (an empty one is its quotes).

    `names` is where the names begin that lead to it from the value before it.
    """

    path: Path
    value: Any
    start: int
    end: int
    names: int


def fields_of(text: str, at: int = 0) -> list[Field]:
    """The fields of the JSON value that begins at a place of a text, in the text's order.

    Empty objects and arrays are fields. Of a name that an object has twice both are listed, with one path.

    Raises:
        ValueError: no JSON value begins there, or it is cut.
    """
    begin = at + len(text[at:]) - len(text[at:].lstrip())
    _, end = _DECODER.raw_decode(text, begin)
    found, path = list[Field](), list[Any]()  # of an object whose next name is yet to come the last entry is None
    names: int | None = None
    before = ""

    def note(value: Any, start: int, end: int) -> None:
        nonlocal names
        found.append(Field(tuple(path), value, start, end, start if names is None else names))
        names = None

    for token in _TOKEN.finditer(text, begin, end):
        match token[0]:
            case "{":
                path.append(None)
            case "[":
                path.append(0)
            case "}" | "]":
                path.pop()
                if before in ("{", "["):
                    note(json.loads(before + token[0]), text.rindex(before, 0, token.start()), token.end())
            case ",":
                path[-1] = path[-1] + 1 if isinstance(path[-1], int) else None
            case written:
                value = json.loads(written)
                if path and path[-1] is None:
                    path[-1], names = value, token.start() if names is None else names
                else:
                    quotes = int(isinstance(value, str) and bool(value))
                    note(value, token.start() + quotes, token.end() - quotes)
        before = token[0]
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON value")


_DECODER = json.JSONDecoder(parse_constant=_refuse)  # else it reads NaN and Infinity


# Words.

_PUNCTUATION = re.compile(rf"(?!(?<![^\W\d])\.\d|(?<!\w)-\.?\d)[{re.escape(string.punctuation)}]")
"""Any but the point and the sign of a number: SQuAD's own rule makes one answer of 1.5, 15 and -15."""
_DECIMAL_COMMA = re.compile(r"(?<![\d,])(\d+),(?=\d\d?(?![\d,]))")
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """Lower case, without punctuation, articles and extra white space; numbers keep their point and sign.

    Where nothing would be left (the answer "A", or "+"), only case and outer white space go.
    """
    bare = _ARTICLES.sub(" ", _PUNCTUATION.sub("", with_points(text).lower().replace("−", "-")))
    return " ".join(bare.split()) or text.strip().lower()


def with_points(text: str) -> str:
    """The text with decimal points for decimal commas: "2,54" is "2.54", while "2,540" and "2,5,4" stay."""
    return _DECIMAL_COMMA.sub(r"\1.", text)


def token_f1(text: str, answer: str) -> float:
    """Harmonic mean of precision and recall over the words of both, in [0, 1]."""
    words, expected = normalise(text).split(), normalise(answer).split()
    shared = sum((Counter(words) & Counter(expected)).values())
    return 2 * shared / (len(words) + len(expected)) if shared else 0.0
