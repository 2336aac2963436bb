"""Open-schema passages: records in sentences, small events, and "the {noun} of {name} is {value}".

Three generators, all of `Reading`s. `record` draws one to three entities of one kind from `data/documents.txt` and
tells a few of their attributes, so that the question must select entity *and* attribute. `event` makes sentences out
of subject, verb, object and circumstances over the whole word lists and asks for one of the parts (who, what, where,
when, why, with what, for how much). `attribute` uses any noun as an attribute of any name.
"""

# ruff: noqa: SIM905 (word lists read better as text)
from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple

from research.pocket.frames import Reading
from research.pocket.values import COLORS, DAYS, KINDS, invented, person, phrase
from research.pocket.words import some

DOCUMENTS_FILE = Path(__file__).parent / "data" / "documents.txt"
VERBS = """repair paint clean open close order deliver borrow visit inspect test pack mail return rent count weigh wash
film record publish print sketch measure design rescue discover invent collect polish destroy replace remove restore
sort store stack load paint finish start check approve reject review sign present display photograph describe mention
praise notice watch follow carry import export accept request change improve damage move lock unlock attach connect
install label wrap fix bake cook roast grill harvest plant water trim chase train feed examine treat cure own use
transport offer purchase acquire donate award grant assign supply""".split()
FEED = {"feed": "fed"}


class Attribute(NamedTuple):
    kind: str
    entity: str
    name: str
    value: str
    sentences: tuple[str, ...]
    questions: tuple[str, ...]


@cache
def attributes() -> tuple[Attribute, ...]:
    rows = []
    for line in DOCUMENTS_FILE.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            kind, _, rest = line.partition(": ")
            entity, name, value, sentences, questions = (part.strip() for part in rest.split(" | "))
            rows.append(
                Attribute(kind, entity, name, value, tuple(sentences.split(" / ")), tuple(questions.split(" / ")))
            )
    return tuple(rows)


@cache
def kinds() -> dict[str, tuple[Attribute, ...]]:
    names = dict.fromkeys(a.kind for a in attributes())
    return {name: tuple(a for a in attributes() if a.kind == name) for name in names}


def _tell(template: str, entity: str, answer: str = "") -> str:
    text = template.replace("{e}", entity).replace("{a}", answer)
    return text[0].upper() + text[1:]


def record(random: Random, *, held_out: bool = False, sentences: int | None = None) -> Reading:
    """One to three entities, two to six sentences; with `held_out`, questions in the wordings kept for measuring."""
    rows = kinds()[random.choice(list(kinds()))]
    entities = [KINDS[rows[0].entity](random) for _ in range(random.choice((1, 1, 2, 2, 3)))]
    facts = [(e, a, KINDS[a.value](random)) for e in dict.fromkeys(entities) for a in rows]
    written = random.sample(facts, min(len(facts), sentences or random.choice((2, 3, 4, 5, 6))))
    text = " ".join(_tell(random.choice(a.sentences), e, value) for e, a, value in written)
    pairs = random.sample(written, min(len(written), 3))
    questions = []
    for e, a, value in pairs:
        wording = a.questions[-1] if held_out else random.choice(a.questions[:-1])
        # as the passage writes it: a value that opens a sentence has a capital letter
        where = text.lower().find(value.lower())
        questions.append((_tell(wording, e), value if value in text else text[where : where + len(value)]))
    return Reading(text, tuple(questions))


def _past(verb: str) -> str:
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ied"
    return FEED.get(verb, verb + ("d" if verb.endswith("e") else "ed"))


def _thing(random: Random) -> str:
    article = random.choice(("the", "the", "a"))
    noun = some(random, random.choice(("thing", "thing", "food", "animal", "plant")))
    extra = random.choice(
        ("", "", some(random, "adj") + " ", random.choice(COLORS) + " ", some(random, "material") + " ")
    )
    return f"{article} {extra}{noun}"


def _actor(random: Random) -> str:
    roll = random.random()
    if roll < 0.45:
        return person(random)
    return invented(random) if roll < 0.6 else f"the {some(random, random.choice(('job', 'job', 'animal')))}"


def _where(random: Random) -> str:
    return random.choice((f"in {KINDS['town'](random)}", KINDS["place"](random), f"in the {some(random, 'thing')}"))


def _when(random: Random) -> str:
    day, year = f"on {random.choice(DAYS)}", f"in {KINDS['year'](random)}"
    return random.choice((day, year, f"at {KINDS['time'](random)}", f"in {KINDS['month'](random)}"))


def _why(random: Random) -> str:
    state = f"the {some(random, 'thing')} was {some(random, 'adj')}"
    return random.choice((state, f"{person(random)} wanted the {some(random, 'thing')}"))


CIRCUMSTANCES: dict[str, tuple[str, Callable[[Random], str]]] = {
    "Where": ("{x}", _where),
    "When": ("{x}", _when),
    "Why": ("because {x}", _why),
    "With what": ("with {x}", lambda random: f"a {some(random, 'thing')}"),
    "For how much": ("for {x}", lambda random: KINDS["money"](random)),
    "For whom": ("for {x}", _actor),
    "How long": ("for {x}", lambda random: KINDS["duration"](random)),
    "With whom": ("together with {x}", _actor),
}


def _one_event(random: Random) -> tuple[str, list[tuple[str, str]]]:
    """A sentence of subject, verb, object and one or two circumstances, and a question for each part."""
    actor, verb, thing = _actor(random), random.choice(VERBS), _thing(random)
    names = random.sample(list(CIRCUMSTANCES), random.choice((0, 1, 1, 2)))
    values = {name: CIRCUMSTANCES[name][1](random) for name in names}
    pieces = [CIRCUMSTANCES[name][0].replace("{x}", values[name]) for name in names]
    passive = random.random() < 0.25
    core = f"{thing} was {_past(verb)} by {actor}" if passive else f"{actor} {_past(verb)} {thing}"
    if pieces and random.random() < 0.25:
        core = f"{pieces.pop(0)}, {core}"
    text = " ".join([core, *pieces]) + "."
    definite = thing.replace("a ", "the ", 1) if thing.startswith("a ") else thing
    pairs = [
        (random.choice((f"Who {_past(verb)} {definite}?", f"By whom was {definite} {_past(verb)}?")), actor),
        (random.choice((f"What did {actor} {verb}?", f"What was {_past(verb)} by {actor}?")), thing),
    ]
    for name, value in values.items():
        pairs.append(
            (random.choice((f"{name} did {actor} {verb} {definite}?", f"{name} was {definite} {_past(verb)}?")), value)
        )
    return text[0].upper() + text[1:], pairs


def event(random: Random) -> Reading:
    """Two to four events with the questions of some of their parts."""
    events = [_one_event(random) for _ in range(random.choice((1, 2, 3, 3, 4)))]
    text = " ".join(t for t, _ in events)
    pool = [pair for _, pairs in events for pair in pairs]
    pairs = [(q, _as_written(a, text)) for q, a in random.sample(pool, min(len(pool), 4))]
    return Reading(text, tuple(pairs))


def _as_written(answer: str, text: str) -> str:
    where = text.lower().find(answer.lower())
    return answer if where < 0 or answer in text else text[where : where + len(answer)]


def attribute(random: Random) -> Reading:
    """Any noun of any name: "The mileage of Borvik is 40 km. Its texture was given as brass." """
    entities = [
        random.choice((invented, person, KINDS["product"], KINDS["company"]))(random)
        for _ in range(random.choice((1, 2, 2)))
    ]
    parts, pairs = [], []
    for _ in range(random.choice((2, 3, 4, 5))):
        entity, noun = random.choice(entities), some(random, random.choice(("attribute", "idea", "activity", "thing")))
        value = random.choice(
            (phrase, KINDS["int"], KINDS["duration"], KINDS["money"], person, KINDS["action"], KINDS["date"])
        )(random)
        name = random.choice((f"the {noun} of {entity}", f"{entity}'s {noun}"))
        parts.append(random.choice((f"{name} is {value}.", f"{name} was {value}.", f"as for {name}, it is {value}.")))
        wording = random.choice(
            (
                f"What is the {noun} of {entity}?",
                f"What is {entity}'s {noun}?",
                f"What was the {noun} of {entity}?",
                f"Which {noun} does {entity} have?",
            )
        )
        pairs.append((wording, value))
    text = " ".join(p[0].upper() + p[1:] for p in parts)
    return Reading(text, tuple((q, _as_written(a, text)) for q, a in random.sample(pairs, min(3, len(pairs)))))
