"""Does a sentence assert what it mentions? Denials, refusals, comparisons and corrections are told by set phrases."""

from __future__ import annotations

import re

from semgrad_guard.evaluation.graders.reading import Reading


def _any(phrases: str) -> str:
    """A group of alternatives from phrases with commas between; each may hold further groups."""
    return "(?:" + "|".join(phrase.strip() for phrase in phrases.split(",")) + ")"


_NOT = _any("""not, never, neither, nor, no, isnt, arent, wasnt, werent, aint, cannot, cant, couldnt, doesnt, dont,
    didnt, wont, wouldnt, hardly, without""")
_NOT_DENYING = _any("only, just, merely, doubt, surprisingly, to mention, other")
_NEGATED = re.compile(rf"\b{_NOT}\b(?! {_NOT_DENYING})(?P<between>(?: \w+){{0,5}})$")

_INSTEAD = _any("""rather than, instead of, as opposed to, other than, except, except for, apart from, far from, unlike,
    excluding, contrary to""")
_MISTAKEN = _any(r"""confused? (?:it )?with, mistaken? (?:it )?for, misconception that, myth that, mistakenly, wrongly,
    incorrectly, (?:wrong|mistake|incorrect|false) to (?:say|think|believe|claim),
    (?:false|incorrect|wrong|untrue) that, not true that, doubt (?:that|whether|if), used to be, no longer,
    (?:some|many|most|others|several)(?: \w+)? (?:say|says|believe|think|claim|assume|guess)(?: that)?""")
_SET_AGAINST = re.compile(
    rf"\b{_INSTEAD}(?: \w+){{0,2}}$|\b{_MISTAKEN}(?: \w+){{0,4}}$|^unlike(?: (?!(?:is|are|was|were)\b)\w+)+$"
)
"""What stands before a mention that is denied; some words may stand between."""

_IS = _any("is, are, was, were, be, would be, seems, sounds")
_ADVERBS = _any("actually, certainly, definitely, clearly, also, simply, just")
_CONCEDED = re.compile(r"^(?:while|although|though|even though)\b")
_SUPPOSED = re.compile(r"\b(?:thought|believed|said|assumed|considered|mistaken|claimed|called)\b")
"""Both in one clause: "While Paris is often thought to be the capital, ..."."""
_UNTRUE = _any(r"""not (?!only|just|merely|to be|without), wrong\b, incorrect\b, false\b, never\b, untrue\b, a myth,
    a misconception, a mistake, no\b""")
_IS_NOT = _any("""isnt, arent, wasnt, werent, cannot be, cant be, is not, would not, wouldnt, doesnt, does not, did not,
    didnt, has never, was never, wrong, incorrect, false""")
_TAKEN_FOR = _any("mistaken, mistakenly, confused with, wrongly, incorrectly, falsely, erroneously")
_AFTER = re.compile(
    rf"^(?:(?:\w+ ){{0,4}}?{_IS} (?:{_ADVERBS} )?{_UNTRUE}|{_IS_NOT}\b(?! (?:only|just|merely)\b)"
    rf"|{_IS} (?:\w+ )?{_TAKEN_FOR}\b)"
)
"""What follows a mention that is denied."""

_TURNS = _any("""but, however, though, although, yet, rather, instead, actually, because, since, so, and, while,
    whereas, which, who, that, is, are, was, were""")
_TURN = re.compile(rf"\b{_TURNS}\b")
"""Behind such a word a negation before it says nothing any more."""
_OPINION = re.compile(r"^ (?:think|believe|say|sure|certain|true|mean|guess)(?: (?!but|however|because)\w+)*$")
"""... except in "I do not think that it is"."""

_CORRECTIONS = _any("""wait (?:no|actually|sorry|its|it is|that), correction, scratch that, i meant, no its, no it is,
    no that is""")
_CORRECTED = re.compile(rf"^(?:\w+ ){{0,6}}?{_CORRECTIONS}\b")
_REFUSALS = _any("""dont know, do not know, didnt know, not know, no idea, not sure (?:if|whether|that),
    unsure (?:if|whether), cant say, cannot say, cant tell, cannot tell, unable to, cant answer, cannot answer,
    could not find, couldnt find, no information, not have (?:any|the|that|this|enough) information,
    not enough information, not mentioned, not mention, doesnt mention, not specified, not specify, doesnt specify,
    not provide, doesnt provide, not stated, not given, not say, doesnt say,
    (?:is|are|was|were|remains?) (?:unknown|unclear|not clear), cannot determine, cannot be determined,
    not possible to (?:say|tell|determine), refuse to, wont answer, cant help, cannot help, sorry but i,
    havent any idea, impossible to (?:say|tell|know)""")
_REFUSED = re.compile(rf"\b{_REFUSALS}\b")
_DOUBTS = _any("if, whether, would, could, might, may, maybe, perhaps, possibly, suppose, either, guess, unless")
_DOUBTFUL = re.compile(rf"\b{_DOUBTS}\b")

_NEAR = _any("""related, similar, compared, comparable, close, closer, next, adjacent, equivalent, equal, opposed,
    belonged, according""")
_APART = _any("""(?:bordered|influenced|surrounded|followed|preceded|replaced|borders|bordering)(?: by)?, than, unlike,
    formerly, previously, (?:north|south)?(?:east|west) of, (?:north|south) of, derived from, different from,
    distinct from, away from, replacing, versus, vs, between, which (?:also )?includes?, ahead of, behind, against,
    defeated, beat, beating""")
_BESIDE = re.compile(rf"\b(?:{_NEAR} to|{_APART})(?: (?!(?:is|are|was|were)\b)\w+){{0,3}}$")
"""What stands before a mention that says nothing of the question's matter itself."""

_NOT_SO = re.compile(
    r"^(?:that|this|it) (?:is|was|s) (?:not|incorrect|wrong|false|no longer)\b"
    r"|^(?:thats|its|this is|that is) (?:not|wrong|incorrect|false)\b"
)
_BACK = _any("necessarily, actually, really, so, true, correct, right, the case, itself, one")
_TAKEN_BACK = re.compile(rf"\bbut (?:its|it is|that is|thats|this is|he is|she is) not {_BACK}\b")

_NEXT, _REMEMBERED = 12, 120


def asserted(text: Reading, start: int, end: int) -> bool:
    """The words from `start` to `end` are said of the question's matter, and not denied, doubted or merely compared."""
    first, last = text.around(start, end)
    before = re.sub(r"\bno other (?:\w+ )?than\b", "", text.plain(_clause_start(text, first, start), start))
    if "?" in text.gap_after(last - 1) or denied(text, start, end) or _BESIDE.search(before):
        return False
    return not _refused(text, start)


def denied(text: Reading, start: int, end: int) -> bool:
    """The sentence says that it is not so: "not Paris", "Paris is wrong", "rather than Paris"."""
    first, last = text.around(start, end)
    before = text.plain(_clause_start(text, first, start), start)
    if _negated_before(before):
        return True
    after = text.plain(end, last)
    if _CONCEDED.search(text.plain(first, start)) and _SUPPOSED.search(text.plain(end, end + _NEXT // 2)):
        return True
    stop = next((i for i in range(end, last) if i > start and re.search(r"[,:()]", text.words[i].gap)), last)
    if _AFTER.match(text.plain(end, stop)) or (
        stop == end and re.match(r"(?:is |thats |which is )?(?:wrong|incorrect|false)\b", after)
    ):
        return True
    if _TAKEN_BACK.search(after) or _CORRECTED.match(text.plain(end, end + _NEXT)):
        return True
    return bool(_NOT_SO.match(text.plain(last, last + _NEXT))) and last < len(text.words)


def _negated_before(before: str) -> bool:
    if _SET_AGAINST.search(re.sub(r"\bno other (?:\w+ )?than\b", "", before)):
        return True
    found = _NEGATED.search(before)
    if found is None:
        return False
    between = found.group("between")
    return not _TURN.search(between) or bool(_OPINION.match(between))


def _clause_start(text: Reading, first: int, start: int) -> int:
    """Where the clause begins: behind the last comma with a conjunction, semicolon or colon before the words."""
    for index in range(start, first, -1):
        gap = text.words[index].gap
        raw = text.words[index].form
        if index < start and raw in ("but", "however", "though", "although", "yet", "while", "whereas"):
            return index + 1
        if ":" in gap or (
            ("," in gap or "—" in gap or " - " in gap)
            and raw not in ("or", "nor", "and")
            and not _in_list(text, index, first)
        ):
            return index
    return first


def _in_list(text: Reading, index: int, first: int) -> bool:
    """The comma before this word continues a list begun by a negation: "neither Paris, Lyon nor Nice"."""
    return (
        bool(
            re.search(r"\b(?:neither|not|no|nor|except|unlike)(?: \w+){1,2}$", text.plain(max(first, index - 3), index))
        )
        and text.words[index].is_capital
    )


def _refused(text: Reading, start: int) -> bool:
    """The answer says that it does not know, in this sentence or before, and has not turned since."""
    said = text.plain(max(0, start - _REMEMBERED), start)
    found = list(_REFUSED.finditer(said))
    if not found:
        return False
    since = said[found[-1].end() :]
    turned = re.search(r"\b(?:but|however|although|though|nevertheless|still|actually)\b", since)
    return turned is None or bool(_DOUBTFUL.search(since[turned.end() :]))
