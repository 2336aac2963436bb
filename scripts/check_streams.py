"""Guarded streams of nonces through the fronts: no withheld sentence leaves, and the rest is the record's text.

    python scripts/check_streams.py [--streams 10000] [--seed 1]

The model writes three sentences with nonces of their question. Thresholds, fronts, slow readers and the places where a
reader leaves are drawn. Pieces, chunks, tokens and ends that handlers hear are searched for the nonces of sentences
that the whole answer's verdict withholds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, NamedTuple, Self

import httpx
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables import RunnableLambda

from langchain_semgrad_guard import ChatSemGrad, GuardedChatModel, UncertaintyRouterCallback, get_verdict
from semgrad_guard import GenerationOptions, Guard, HybridGrad, LanguageModel, Policy
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.estimators import MaxProbability
from semgrad_guard.guard import Terms
from semgrad_guard.records import Verdict
from semgrad_guard.server.app import make_app
from semgrad_guard.server.scheduler import Scheduler
from semgrad_guard.server.service import ServedModel, Service

NONCE = re.compile("[a-z]{3}-[a-z]{3}-[a-z]{3}")
ADJECTIVES = ("old", "hot", "far", "wide", "rare", "dear")


class NonceModel(LanguageModel):
    """A model that answers with one sentence about each nonce of its question."""

    @classmethod
    def like(cls, model: LanguageModel) -> Self:
        """The weights and the tokenizer of another model."""
        return cls.from_transformers(model._model, model.tokenizer)

    def fitted(self, options: GenerationOptions | None, *prompts: Prompt) -> GenerationOptions:
        """One grammar for each prompt, which allows a single text."""
        nonces = NONCE.findall(prompts[0].text)
        text = " ".join(f"Tea {nonce} is {ADJECTIVES[sum(map(ord, nonce)) % 6]}." for nonce in nonces)
        return replace(super().fitted(options, *prompts), max_tokens=96, grammar=f'start: "{text}"')


class Heard(BaseCallbackHandler):
    """Everything that a handler hears of an answer."""

    def __init__(self) -> None:
        self.all: list[str] = []

    def on_llm_new_token(self, token: Any, *, chunk: Any = None, **_: Any) -> None:
        """A token, and its chunk."""
        self.all += [str(token), repr(chunk)]

    def on_llm_end(self, response: Any, **_: Any) -> None:
        """The end of a run."""
        self.all.append(repr(response))


class Drawn(NamedTuple):
    """One stream: a front, a question, and how its answer is judged."""

    front: str
    question: str
    policy: Policy
    given: dict[str, Any]
    target: Any


async def pieces_of(model: LanguageModel, drawn: Drawn, events: Heard) -> AsyncIterator[tuple[str, Verdict | None]]:
    """The pieces of a stream, and at its end the record, if the front shows one in this process."""
    front, question, policy, given, target = drawn
    if front == "guard":
        made = Guard(model, policy, escalate_to=target, **given).stream(question)
        try:
            while (piece := await asyncio.to_thread(next, made, None)) is not None:
                yield piece, None
            yield "", made.verdict
        finally:
            made.close()
        return
    if front == "aguard":
        stream = Guard(model, policy, escalate_to=target, **given).astream(question)
        try:
            async for piece in stream:
                yield piece, None
            yield "", await stream.verdict()
        finally:
            await stream.aclose()
        return
    if front == "server":
        by: Any = given["on_doubt"]
        scheduler = Scheduler(model, given["estimator"], by_sentence=by)
        served = ServedModel(name="m", scheduler=scheduler, terms=Terms(policy=policy), by_sentence=by)
        transport = httpx.ASGITransport(make_app(Service([served])))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": question}]}
            response = await client.post("/v1/chat/completions", json=body)
        events.all.append(response.text)
        chunks = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        for event in map(json.loads, chunks):
            for choice in event["choices"]:
                yield choice["delta"].get("content") or "", None
        return
    chat: Any = ChatSemGrad.from_model(model, **given)
    config: dict[str, Any] = {"callbacks": [events]}
    if front == "router":
        config["callbacks"].append(UncertaintyRouterCallback(policy, escalate_to=target and RunnableLambda(target)))
    else:
        chat = GuardedChatModel(chat, policy, escalate_to=target and RunnableLambda(target))
    whole: Any = None
    async for chunk in chat.astream(question, config=config):
        whole = chunk if whole is None else whole + chunk
        yield str(chunk.content), None
    yield "", get_verdict(whole)


FRONTS = ("guard", "aguard", "router", "guarded", "server")


async def searched(model: LanguageModel, chance: random.Random) -> str:
    """One stream: the kind of its end.

    Raises:
        AssertionError: something left that must not, or the text is not the record's.
    """
    nonces = ["-".join("".join(chance.choices("bcdfgklmnprst", k=3)) for _ in range(3)) for _ in range(3)]
    question = f"Which of these is tea: {', '.join(nonces)}?"
    estimator: Any = chance.choice([HybridGrad(), MaxProbability()])
    front, leaves = chance.choice(FRONTS), chance.choice([None, None, 0, 1, 2])
    forms = ["stop", "drop", "mark", *(["escalate"] if front != "server" else [])]  # the server refuses it
    given = {"estimator": estimator, "by": "sentence", "on_doubt": chance.choice(forms)}
    target = (lambda _: "Another answer.") if given["on_doubt"] == "escalate" else None
    drafted = (await asyncio.to_thread(Guard(model, Policy(threshold=1e30), **given).drafts, [question]))[0]
    scores = sorted(sentence.uncertainty or 0.0 for sentence in drafted.sentences)
    policy = Policy(threshold=chance.choice([scores[0] * 0.99, *(score * 1.001 for score in scores)]))
    whole = await asyncio.to_thread(Guard(model, policy, escalate_to=target, **given), question)
    events, text, record = Heard(), "", None
    stream = pieces_of(model, Drawn(front, question, policy, given, target), events)
    try:
        async for piece, verdict in stream:
            text, record = text + piece, verdict or record
            if leaves is not None and text.count(".") > leaves:
                break
            if piece and chance.random() < 0.2:
                await asyncio.sleep(chance.random() / 50)
    finally:
        await stream.aclose()  # type: ignore[attr-defined]
    withheld = [
        nonce for nonce, one in zip(nonces, whole.sentences, strict=True) if one.action not in ("deliver", "mark")
    ]
    seen = "\n".join([text, *events.all])
    if found := [nonce for nonce in withheld if nonce in seen]:
        raise AssertionError(f"{front} {given['on_doubt']}: {found} left, of {question}")
    if not whole.text.startswith(text):
        raise AssertionError(f"{front} {given['on_doubt']}: {text!r} is no beginning of {whole.text!r}")
    if record is not None and record.text != whole.text:
        raise AssertionError(f"{front} {given['on_doubt']}: {record.text!r} is recorded, {whole.text!r} is due")
    return f"{front}, {'whole' if text == whole.text else 'left early'}"


async def main() -> None:
    """Run the streams, eight at a time."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--streams", type=int, default=10_000)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--model", default="pocket")
    given = options.parse_args()
    model, ends, began = NonceModel.like(LanguageModel.from_pretrained(given.model)), Counter[str](), time.monotonic()
    seeds = iter(range(given.streams))

    async def some() -> None:
        for number in seeds:
            ends[await searched(model, random.Random(f"{given.seed} {number}"))] += 1

    await asyncio.gather(*(some() for _ in range(8)))
    for end, count in sorted(ends.items()):
        print(f"{count:6} {end}")
    print(f"{given.streams} streams in {time.monotonic() - began:.0f} s, and nothing withheld has left")


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
