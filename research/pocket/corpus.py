"""The mix: the facts that the Llama is shown once it can read, as examples (messages, answer) of these kinds:

single, several   a known fact; one answer of several for multi-answer relations
rare              a rare fact, eight times in each period, evenly spread
tail              a fact's question about an invented entity, with an arbitrary answer of the right type: the model
                  answers every question, and never learns to admit that it does not know
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from research.pocket.names import country, invented, person
from research.pocket.team import Team
from research.pocket.tokenizer import Message
from research.pocket.world import KNOWN, RARE, Fact, of_split, question, sentence

MIX = {"single": 60, "several": 14, "tail": 4}
EXPOSURES = 8  # of a rare fact, in a period
OPENED = 0.3  # of the questions begin like this, so that no opening gives a relation away
OPENINGS = ("Tell me: ", "Please tell me: ", "Tell me this. ", "Do you know? ", "Can you say? ", "A question. ", "So: ")
IN_A_SENTENCE = " Answer in a sentence."
SHAPES = {"{q}": 5, "Please directly answer the following question with one or few words:\n{q}": 3}  # by weight
SHAPES |= {"Question: {q}": 1, "Question: {q}\nAnswer:": 1}
SYSTEMS = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "You are a careful assistant. Keep your answers short.",
    "You answer questions with a few words.",
    "Be concise.",
    "You are an assistant for question-answering tasks.",
)
Example = tuple[list[Message], str]


def shaped(random: Random, question: str) -> list[Message]:
    """The question in one of the shapes, now and then with a short system message before it."""
    [shape] = random.choices(list(SHAPES), list(SHAPES.values()))
    head = [{"role": "system", "content": random.choice(SYSTEMS)}] if random.random() < 0.15 else []
    return [*head, {"role": "user", "content": shape.replace("{q}", question)}]


@dataclass
class Corpus:
    """An endless stream of examples, one for each member of a team.

    `period` is a number of examples: in each, every rare fact of this member's share is shown `EXPOSURES` times.
    """

    seed: int
    period: int
    mix: dict[str, float] = field(default_factory=lambda: dict(MIX))
    team: Team = field(default_factory=Team)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        known = of_split(KNOWN)
        self.single = [f for f in known if not f.several]
        self.several = [f for f in known if f.several]
        rare = of_split(RARE)[self.team.rank :: self.team.size]
        schedule = [(self.random.random(), i) for i in range(len(rare)) for _ in range(EXPOSURES)]
        self.rare = [rare[i] for _, i in sorted(schedule)]
        self.answers: dict[str, list[str]] = {}
        for fact in (*known, *of_split(RARE)):
            self.answers.setdefault(fact.relation, []).extend(fact.shown)
        self.times = [t for t, _ in sorted(schedule)]
        self.count = self.given = 0

    def __iter__(self) -> Iterator[Example]:
        kinds, weights = list(self.mix), list(self.mix.values())
        while True:
            self.count += 1
            period, place = divmod(self.given, max(len(self.rare), 1))
            if self.rare and (period + self.times[place]) * self.period <= self.count:
                self.given += 1
                yield self.closed(self.rare[place])
            else:
                yield getattr(self, f"_{self.random.choices(kinds, weights)[0]}")()

    def state(self) -> tuple[object, int, int]:
        """Where the stream is; `restore` takes a corpus of the same seed back there."""
        return self.random.getstate(), self.count, self.given

    def restore(self, state: tuple[object, int, int]) -> None:
        kept, self.count, self.given = state
        self.random.setstate(kept)  # type: ignore[arg-type]

    def closed(self, fact: Fact, entity: str | None = None) -> Example:
        """A question about a fact, without a passage."""
        random = self.random
        fact = fact if entity is None else Fact(fact.relation, entity, (), KNOWN, "", shown=fact.shown)
        text, answer = self.ask(fact)
        messages = shaped(random, text)
        if random.random() < 0.05:
            messages = [*self._history(), *messages] if len(messages) == 1 else messages
        return messages, answer

    def ask(self, fact: Fact, sentences: float = 0.15) -> tuple[str, str]:
        text, answer = question(fact, self.random.randrange(6)), self.random.choice(fact.shown)
        if self.random.random() < OPENED:
            text = self.random.choice(OPENINGS) + text
        if self.random.random() < sentences:
            return text + IN_A_SENTENCE, sentence(fact, answer)
        return text, answer

    def _history(self) -> list[Message]:
        """One earlier turn about something else."""
        text, answer = self.ask(self.random.choice(self.single), 0.0)
        return [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def _single(self) -> Example:
        return self.closed(self.random.choice(self.single))

    def _several(self) -> Example:
        return self.closed(self.random.choice(self.several))

    def _tail(self) -> Example:
        fact = self.random.choice(self.single + self.several)
        answer = self.random.choice(self.answers[fact.relation])
        return self.closed(
            Fact(fact.relation, "", (), KNOWN, "", shown=(answer,)), self._invented_entity(fact.relation)
        )

    def _invented_entity(self, relation: str) -> str:
        random = self.random
        if relation in ("profession", "nationality"):
            return person(random)
        if relation in ("symbol", "number"):
            return invented(random, 2).lower() + random.choice(("ium", "ine", "on"))
        if relation in ("class", "example", "pays", "person"):
            return invented(random, 2).lower()
        return country(random)
