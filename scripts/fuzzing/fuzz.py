"""Sends a server requests inside and outside its OpenAPI schema; prints the results as one line of JSON.

python scripts/fuzzing/fuzz.py URL --model NAME --seed 1 --examples 100

Runs in an environment of its own, with schemathesis. A seed repeats a round.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis.generation import GenerationMode

sys.path.insert(0, str(Path(__file__).parents[1] / "load_checks"))

from pauses import Pauses

CHAT = "/v1/chat/completions"
_SECONDS = 60
_BUSY = 8
"""How many times as many requests a chat completion gets: it is where most of the code is."""
_ASKED = [{"role": "user", "content": "hello"}]


class Found:
    """The results of a round's requests."""

    def __init__(self) -> None:
        self.statuses, self.problems, self._pauses = Counter[str](), list[str](), Pauses()

    def send(self, case: Any) -> None:
        """Send one request, and record the response."""
        began = time.monotonic()
        try:
            response = case.call(timeout=_SECONDS, allow_redirects=False)
        except requests.exceptions.Timeout:
            if self._pauses.since(began):  # the machine had no time for any of us
                self.statuses["sent again"] += 1
                self.send(case)
                return
            self.statuses["hung"] += 1
            self._blame("hung", case)
            return
        except (requests.exceptions.RequestException, UnicodeError, ValueError) as error:
            # Not every path or header that can be thought of can be sent.
            self.statuses[f"not sent ({type(error).__name__})"] += 1
            return
        self.statuses[str(response.status_code)] += 1
        if response.status_code >= 500:
            self._blame(str(response.status_code), case, response.text)
        elif b"Traceback" in response.content:
            self._blame("a traceback", case, response.text)
        elif response.status_code >= 400 and not _has_form(response):
            self._blame("an error in another form", case, response.text)

    def _blame(self, what: str, case: Any, text: str = "") -> None:
        try:
            sent = json.dumps(case.body)
        except (TypeError, ValueError):
            sent = repr(case.body)
        self.problems.append(f"{what}: {case.method} {case.path} {case.query!r} {sent[:2000]} -> {text[:300]}")


def _has_form(response: Any) -> bool:
    """Whether an error is one as OpenAI's clients read them."""
    if response.status_code == 400 and "text/plain" in str(response.headers.get("content-type")):
        return True  # no request by HTTP's rules: it reached no route
    try:
        return set(response.json()["error"]) == {"message", "type", "param", "code"}
    except (ValueError, KeyError, TypeError):
        return False


def further_in(case: Any, model: str) -> Iterator[None]:
    """Change a body step by step so that it comes further in: no unknown fields, the model that there is, a question.

    Writing a request takes longer than answering it, so each is sent after every step.
    """
    body = case.body
    if not isinstance(body, dict):
        return
    known = case.operation.definition.raw["requestBody"]["content"]["application/json"]["schema"]["properties"]
    steps = {"model": model}, {"messages": _ASKED}, {"text": "an answer"}
    for step in steps:
        further = {name: value for name, value in (body | step).items() if name in known}
        if further != body:
            body.clear()
            body.update(further)
            yield


def fuzz(found: Found, operation: Any, mode: GenerationMode, *, model: str, seed: int, examples: int) -> None:
    """Send requests of one kind to one route."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        found.send(case)
        for _ in further_in(case, model):
            found.send(case)

    send()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--model", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--examples", type=int, required=True)
    options = parser.parse_args()
    found, schema = Found(), schemathesis.openapi.from_url(f"{options.url}/openapi.json")
    operations = [operation.ok() for operation in schema.get_all_operations()]
    for operation in operations:
        examples = options.examples * (_BUSY if operation.path == CHAT else 1)
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            with suppress(hypothesis.errors.Unsatisfiable):  # nothing that some routes take can be wrong
                fuzz(found, operation, mode, model=options.model, seed=options.seed, examples=examples)
    print(json.dumps({"routes": len(operations), "statuses": found.statuses, "problems": found.problems}))


if __name__ == "__main__":
    main()
