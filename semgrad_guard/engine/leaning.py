"""Sentences that cannot be read without an earlier one: left out with it, and no surer than it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from semgrad_guard.engine.sentences import Span

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
_ITEM = re.compile(r"\s*(?:[-*+•·–]\s|\(?(?:\d{1,3}|[A-Za-z])[.)]\s|\|)")
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
        item = _ITEM.match(sentence) or _CODE.match(sentence)
        leans = number > 0 and _LEANS.match(sentence, 0 if item is None else item.end())
        if item is not None:
            found.append(number - 1 if leans else head)
            if head is None and sentence.lstrip().startswith("|"):
                head = number
            continue
        found.append(number - 1 if leans else None)
        head = number if _INTRODUCES.search(sentence) else None
    return found
