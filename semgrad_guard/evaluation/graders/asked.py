"""What a question says about its answer: what it repeats, what it offers to choose from, what is to be counted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from semgrad_guard.evaluation.graders.reading import ARTICLES, Reading, Word, read
from semgrad_guard.evaluation.graders.word_forms import same_word, words_of

_SMALL = words_of(
    """what which who whom whose when where why how is are was were do does did can could the a an of in on at to
    for by from with and or it its i you me my tell give name please there has have had be been that this these
    their his her he she they we him them our us"""
)
_PERSON = re.compile(
    r"\b(?:[Ww]ho|[Ww]hom|[Ww]hose|[Ww]hich (?:person|author|writer|artist|composer|scientist|president|king|queen))\b"
)
_SEVERAL = re.compile(r"^\W*(?:name|list|give)\b|\b(?:an? example|can you (?:name|tell me an?|give))\b", re.IGNORECASE)
_COUNTED = re.compile(r"\bhow (?:many|much) ((?:[\w'-]+ ?){1,3})|\b(?:number|amount) of ([\w'-]+)", re.IGNORECASE)
_OPTION = re.compile(r"(?:^|[\s(])([A-H])[).:]\s*(.+?)(?=[\s,;(]+[A-H][).:]|[.?]\s|[.?]?$)", re.DOTALL)
_VERBS = "is are was were do does did can could has have had will would should must may am isn't aren't"
_YES_NO = re.compile(rf"^\W*(?:so |and |please |in [\w ]+, )?(?:{'|'.join(_VERBS.split())})\b", re.IGNORECASE)


@dataclass(frozen=True)
class Asked:
    """A question, read."""

    text: str
    reading: Reading

    @cached_property
    def content(self) -> frozenset[str]:
        """The forms of its words that carry meaning."""
        return frozenset(word for word in self.reading.forms if word not in _SMALL)

    @property
    def is_about_a_person(self) -> bool:
        """It asks who."""
        return bool(_PERSON.search(self.text))

    @property
    def is_yes_or_no(self) -> bool:
        """It begins with its verb and offers no alternatives."""
        return bool(_YES_NO.match(self.text)) and " or " not in self.text

    @property
    def wants_several(self) -> bool:
        """It asks for a list, or for any one of several."""
        return bool(_SEVERAL.search(self.text))

    @cached_property
    def counted(self) -> frozenset[str]:
        """The forms of what is to be counted: "how many strings"."""
        found = _COUNTED.search(self.text)
        words = read(found.group(1) or found.group(2)).forms if found else ()
        return frozenset(word for word in words if word not in _SMALL)

    @cached_property
    def options(self) -> dict[str, str]:
        """The lettered options: "A) Madrid B) Rome"."""
        found = {letter: text.strip(" ,;()") for letter, text in _OPTION.findall(self.text)}
        return found if len(found) > 1 and "A" in found else {}

    def repeated(self, answer: Reading, span: tuple[int, int]) -> bool:
        """A mention with a neighbour that it has in the question, too, is the question's own."""
        start, end = span
        here = answer.forms[start:end]
        size = end - start
        forms = self.reading.forms
        for i in range(len(forms) - size + 1):
            if forms[i : i + size] != here:
                continue
            before = (forms[i - 1] if i else None), (answer.forms[start - 1] if start else None)
            after = (
                (forms[i + size] if i + size < len(forms) else None),
                (answer.forms[end] if end < len(answer.forms) else None),
            )
            if any(one == other and one is not None and one not in ARTICLES for one, other in (before, after)):
                return True
        return False

    def holds_variant(self, reference: str, wanted: Sequence[str]) -> bool:
        """The question has the reference in another form (mouse, mice; Georgia, Georgian): only its own counts."""
        raw = read(reference).plain(0, 99).split()
        return (
            len(wanted) == 1
            and any(same_word(wanted[0], word) for word in self.reading.forms)
            and raw[-1] not in self.reading.plain(0, len(self.reading.words)).split()
        )

    def choice_against(self, wanted: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """What the question offers beside these words ("Jupiter or Mars", "apple, carrot or pear"), if it does."""
        offered = self._offered
        mine = [each for each in offered if set(wanted) <= set(each) or set(each) <= set(wanted)]
        return tuple(each for each in offered if each not in mine) if mine else ()

    @property
    def beside_the_choice(self) -> frozenset[str]:
        """The question's words about its alternatives, without these."""
        return self.content - {word for each in self._offered for word in each}

    @cached_property
    def _offered(self) -> tuple[tuple[str, ...], ...]:
        """The alternatives: what stands around "or", as long as the shorter side of it."""
        words = self.reading.words
        places = [i for i, word in enumerate(words) if word.form == "or" and 0 < i < len(words) - 1]
        if not places:
            return ()
        at = places[-1]
        right = [word.form for word in self._until_mark(range(at + 1, len(words)))]
        left = [word.form for word in self._until_mark(range(at - 1, -1, -1), backwards=True)][::-1]
        size = max(len([w for w in right if w not in ARTICLES]), 1)
        kept = [w for w in left if w not in ARTICLES][-size:]
        lists: list[tuple[str, ...]] = [tuple(kept), tuple(w for w in right if w not in ARTICLES)]
        start = at - len(left)
        while start > 0 and words[start].gap.strip() == ",":
            item = [word.form for word in self._until_mark(range(start - 1, -1, -1), backwards=True)][::-1]
            start -= len(item)
            if words[start].gap.strip() in (",", ":"):  # else it is what the list hangs on: "Which is larger, ..."
                lists.append(tuple(w for w in item if w not in ARTICLES)[-size:])
        return tuple(_bare(each) for each in lists if _bare(each))

    def _until_mark(self, indices: range, *, backwards: bool = False) -> list[Word]:
        found: list[Word] = []
        for i in indices:
            if not backwards and found and self.reading.words[i].gap.strip(" '\"“”"):
                break
            found.append(self.reading.words[i])
            if backwards and self.reading.words[i].gap.strip(" '\"“”"):
                break
        return found


def _bare(words: tuple[str, ...]) -> tuple[str, ...]:
    while len(words) > 1 and words[0] in ("in", "on", "at", "by", "to"):
        words = words[1:]
    return words


@lru_cache(maxsize=4096)
def ask(question: str) -> Asked:
    """Read a question."""
    return Asked(question, read(question))
