"""Values of a real model's calls: does a value's own uncertainty tell wrong from right better than the whole call's?

python scripts/check_fields.py [--calls 100]      (`semgrad-guard fetch smollm2` first; minutes)

SmolLM2 fills the arguments of a tool from requests that a seed makes, so that the right arguments are known. It
prints the AUROC for a wrong value of the value's own score and of the whole call's, and, over draws of half of the
calls for calibrating, the share of the other half's right values that are delivered, by values and by whole calls.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean
from typing import Any

from pydantic import BaseModel

from langchain_semgrad_guard import ChatSemGrad
from semgrad_guard import LanguageModel
from semgrad_guard.calibration import calibrate
from semgrad_guard.guard import calibrate_fields, recording
from semgrad_guard.guard.question import RecordedDraft
from semgrad_guard.metrics import auroc

SEED, DRAWS = 58, 200
ALPHA, DELTA = 0.2, 0.1
ESTIMATORS = ("gnll", "hybridgrad")

NAMES = ("Maria Keller", "Tom Okafor", "Aiko Sato", "Lars Nygaard", "Priya Nair", "Hugo Lambert", "Ines Duarte")
CITIES = ("Lisbon", "Oslo", "Nairobi", "Kyoto", "Lima", "Ghent", "Porto", "Tallinn", "Bergen", "Quito")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
COUNTS = ("one", "two", "three", "four", "five", "six")


class Booking(BaseModel):
    """Reserve a table at a restaurant."""

    name: str
    city: str
    day: str
    hour: int
    guests: int


@dataclass(frozen=True)
class Request:
    """What a user asks, and the right arguments."""

    text: str
    arguments: dict[str, Any]


def request(random: Random) -> Request:
    """A table, said in one of three ways; hours are of 24, and friends come with the one who asks."""
    name, city, day = random.choice(NAMES), random.choice(CITIES), random.choice(DAYS)
    hour, count = random.randint(5, 10), random.randrange(len(COUNTS))
    text, guests = random.choice(
        [
            (f"This is {name}. A table for {COUNTS[count]} on {day} at {hour} pm, in {city}, please.", count + 1),
            (f"Book us dinner in {city} for {day}, {hour} pm: me ({name}) and {COUNTS[count]} more.", count + 2),
            (f"Please reserve in {city} for {hour + 12}:00 on {day}, {count + 1} people, name {name}.", count + 1),
        ]
    )
    return Request(text, {"name": name, "city": city, "day": day, "hour": hour + 12, "guests": guests})


SHOWN = [request(Random(seed)) for seed in range(4)]
"""Requests that the model is shown with their arguments."""


@dataclass(frozen=True)
class Call:
    """What the model wrote, the right arguments, and whether each value is right, in the order of the fields."""

    draft: RecordedDraft
    arguments: dict[str, Any]
    right: tuple[bool, ...]

    @classmethod
    def of(cls, draft: RecordedDraft, arguments: dict[str, Any]) -> Call:
        """A call, graded."""
        values = json.loads(draft.verdict.text)
        names = [str(name) for (name,) in (field.path for field in draft.verdict.fields)]
        return cls(draft, arguments, tuple(values[name] == arguments[name] for name in names))


def written(model: LanguageModel, requests: Sequence[Request], estimator: str) -> list[Call]:
    """The model's calls, each after four examples; one that came to no end is left out."""
    chat = ChatSemGrad.from_model(model, max_tokens=120, estimator=estimator)
    extract = chat.with_structured_output(Booking, include_raw=True)
    found = list[Call]()
    shown = [turn for one in SHOWN for turn in (("human", one.text), ("ai", json.dumps(one.arguments)))]
    for one in requests:
        with recording() as recorder:
            answer: Any = extract.invoke([*shown, ("human", one.text)])
        if answer["parsed"] is not None:
            found.append(Call.of(recorder.drafts[0], one.arguments))
    return found


def separations(calls: Sequence[Call]) -> tuple[float | None, float | None]:
    """AUROC for a wrong value, by its own score and by the whole call's."""
    own = [field.uncertainty for call in calls for field in call.draft.verdict.fields]
    whole = [call.draft.verdict.uncertainty for call in calls for _ in call.right]
    right = [one for call in calls for one in call.right]
    return auroc(own, right), auroc(whole, right)


def by_value(known: Sequence[Call], others: Sequence[Call]) -> list[bool]:
    """Of the others' values that a threshold for values delivers, which are right."""
    rule = calibrate_fields([(call.draft, call.arguments) for call in known], alpha=ALPHA, delta=DELTA)
    return [
        right
        for call in others
        for field, right in zip(call.draft.verdict.fields, call.right, strict=True)
        if rule.lets_through(field.uncertainty)
    ]


def by_call(known: Sequence[Call], others: Sequence[Call]) -> list[bool]:
    """The same by a threshold for whole calls, which are right where all of their values are."""
    scores = [call.draft.verdict.uncertainty for call in known]
    rule = calibrate(scores, [all(call.right) for call in known], alpha=ALPHA, delta=DELTA)
    return [one for call in others if rule.lets_through(call.draft.verdict.uncertainty) for one in call.right]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=100)
    random = Random(SEED)
    requests = [request(random) for _ in range(parser.parse_args().calls)]
    model = LanguageModel.from_pretrained("smollm2", dtype="float32")
    for estimator in ESTIMATORS:
        calls = written(model, requests, estimator)
        values = [one for call in calls for one in call.right]
        own, whole = separations(calls)
        print(f"{estimator}: {len(calls)} calls, {len(values)} values, {values.count(False)} of them wrong")
        print(f"  AUROC for a wrong value: its own score {own:.3f}, the whole call's {whole:.3f}")
        for name, rule in (("value", by_value), ("call", by_call)):
            shares, wrong = list[float](), list[float]()
            for _ in range(DRAWS):
                drawn = random.sample(calls, len(calls))
                known, others = drawn[: len(calls) // 2], drawn[len(calls) // 2 :]
                delivered = rule(known, others)
                shares.append(sum(delivered) / sum(sum(call.right) for call in others))
                wrong += [1 - sum(delivered) / len(delivered)] if delivered else []
            error = f"{fmean(wrong):.3f} of the delivered are wrong" if wrong else "nothing is delivered"
            print(f"  by {name}: {fmean(shares):.0%} of the right values are delivered; {error}", flush=True)


if __name__ == "__main__":
    main()
