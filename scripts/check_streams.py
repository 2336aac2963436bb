"""Guarded streams of nonces through the fronts: no withheld sentence leaves, and the rest is the record's text.

    python scripts/check_streams.py [--streams 10000] [--seed 1] [--model pocket]

The model writes three sentences with nonces of their question. Thresholds, fronts, targets, slow readers, the places
where a reader leaves and the cuts of the server's clients are drawn. Pieces, chunks, tokens and ends that handlers hear
are searched for the nonces of sentences that the whole answer's verdict withholds, and so are checkpoints, memories and
records.
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
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, NamedTuple, Self

import httpx
import torch
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from transformers import LlamaConfig, LlamaForCausalLM

from langchain_semgrad_guard import ChatSemGrad, UncertaintyRouterCallback, get_verdict
from llama_index_semgrad_guard import SemGradLLM
from llama_index_semgrad_guard import UncertaintyRouterCallback as LlamaIndexRouter
from llama_index_semgrad_guard import guarded as guarded_engine
from semgrad_guard import GenerationOptions, Guard, HybridGrad, LanguageModel, Policy
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.estimators import MaxProbability
from semgrad_guard.guard import Answerer, Terms
from semgrad_guard.records import SentenceVerdict, Verdict
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
    cuts: dict[str, Any]


Pieces = AsyncIterator[tuple[str, Verdict | None]]
"""The pieces of a stream, and at its end the record, if the front shows one in this process."""


def guard_of(model: LanguageModel, drawn: Drawn) -> Guard:
    """A guard of the drawn policy."""
    return Guard(model, drawn.policy, **drawn.given)


async def guard_pieces(model: LanguageModel, drawn: Drawn, _: Heard) -> Pieces:
    """Those of `Guard.stream`, read in threads."""
    made = guard_of(model, drawn).stream(drawn.question)
    try:
        while (piece := await asyncio.to_thread(next, made, None)) is not None:
            yield piece, None
        yield "", made.verdict
    finally:
        made.close()


async def async_guard_pieces(model: LanguageModel, drawn: Drawn, _: Heard) -> Pieces:
    """Those of `Guard.astream`."""
    stream = guard_of(model, drawn).astream(drawn.question)
    try:
        async for piece in stream:
            yield piece, None
        yield "", await stream.verdict()
    finally:
        await stream.aclose()


async def served(model: LanguageModel, drawn: Drawn, *, stream: bool) -> str:
    """The response of a server, with the cuts of its client."""
    by: Any = drawn.given["on_doubt"]
    scheduler = Scheduler(Answerer(model, drawn.given["estimator"], by_sentence=by))
    one = ServedModel(name="m", scheduler=scheduler, terms=Terms(policy=drawn.policy), by_sentence=by)
    transport = httpx.ASGITransport(make_app(Service([one])))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        body = {"model": "m", "stream": stream, "messages": [{"role": "user", "content": drawn.question}]}
        return (await client.post("/v1/chat/completions", json={**body, **drawn.cuts})).text


async def server_pieces(model: LanguageModel, drawn: Drawn, events: Heard) -> Pieces:
    """Those of the server."""
    text = await served(model, drawn, stream=True)
    events.all.append(text)
    sent = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    for event in map(json.loads, sent):
        for choice in event["choices"]:
            yield choice["delta"].get("content") or "", None


async def langchain_pieces(model: LanguageModel, drawn: Drawn, events: Heard) -> Pieces:
    """Those of a chat model under a router, or in a guard."""
    chat, config = langchain_model(model, drawn, events)
    whole: Any = None
    async for chunk in chat.astream(drawn.question, config=config):
        whole = chunk if whole is None else whole + chunk
        yield str(chunk.content), None
    yield "", get_verdict(whole)


async def graph_pieces(model: LanguageModel, drawn: Drawn, events: Heard) -> Pieces:
    """Those of a graph, whose checkpoints are searched, also where the reader leaves."""
    chat, config = langchain_model(model, drawn, events)

    async def answer(state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
        return {"messages": [await chat.ainvoke(state["messages"], config)]}

    builder = StateGraph(MessagesState).add_node("answer", answer).add_edge(START, "answer")
    graph: Any = builder.compile(checkpointer=InMemorySaver())
    place = {**config, "configurable": {"thread_id": "1"}}
    try:
        async for message, _ in graph.astream({"messages": [("user", drawn.question)]}, place, stream_mode="messages"):
            yield str(message.content), None
    finally:
        states = graph.get_state_history(place)
        events.all += [repr(state.values["messages"][1:]) for state in states if state.values]
    yield "", get_verdict(graph.get_state(place).values["messages"][-1])


def langchain_model(model: LanguageModel, drawn: Drawn, events: Heard) -> tuple[Any, dict[str, Any]]:
    """A guarded chat model, and the config of its calls."""
    chat, router = ChatSemGrad.from_model(model, **drawn.given), UncertaintyRouterCallback(drawn.policy)
    if drawn.front == "router":
        return chat, {"callbacks": [events, router]}
    return chat.model_copy(update={"router": router}), {"callbacks": [events]}


async def llm_pieces(model: LanguageModel, drawn: Drawn, events: Heard) -> Pieces:
    """Those of a LlamaIndex LLM that decides by itself; its responses are searched."""
    llm = judging_llm(model, drawn)
    response: Any = None
    async for response in await llm.astream_complete(drawn.question):
        yield response.delta, None
    events.all += [repr(response.raw), repr(response.additional_kwargs)]


async def query_pieces(model: LanguageModel, drawn: Drawn, events: Heard) -> Pieces:
    """Those of a guarded query engine, whose response is searched."""
    response: Any = await query_engine(model, drawn).aquery(drawn.question)
    for piece in response.response_gen:
        yield piece, None
    events.all += [repr(response.metadata), repr(response.source_nodes)]


async def chat_pieces(model: LanguageModel, drawn: Drawn, events: Heard) -> Pieces:
    """Those of a guarded chat engine, whose memory and response are searched."""
    llm, memory = judging_llm(model, drawn), ChatMemoryBuffer.from_defaults(token_limit=3000)
    engine = guarded_engine(SimpleChatEngine.from_defaults(llm=llm, memory=memory), llm.router)
    response: Any = await engine.astream_chat(drawn.question)
    text = "".join(response.response_gen)
    yield text, None
    remembered = [str(message.content) for message in memory.get_all()][1:]
    events.all += [repr(response.metadata), repr(response.sources), *remembered]
    if text and [one.strip() for one in remembered] != [text.strip()]:
        raise AssertionError(f"{remembered} is remembered, {text!r} was delivered")


def judging_llm(model: LanguageModel, drawn: Drawn) -> SemGradLLM:
    """An LLM with a router of the drawn policy."""
    return SemGradLLM.from_model(model, router=LlamaIndexRouter(drawn.policy), **drawn.given)


def query_engine(model: LanguageModel, drawn: Drawn) -> Any:
    """A guarded engine with one passage."""
    llm = judging_llm(model, drawn)
    return guarded_engine(RetrieverQueryEngine.from_args(NothingMore(), llm=llm), llm.router)


class NothingMore(BaseRetriever):
    """Retrieves one passage without a nonce."""

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(text="Tea is a drink."), score=1.0)]


FRONTS: dict[str, Callable[[LanguageModel, Drawn, Heard], Pieces]] = {
    "guard": guard_pieces,
    "aguard": async_guard_pieces,
    "router": langchain_pieces,
    "guarded": langchain_pieces,
    "graph": graph_pieces,
    "server": server_pieces,
    "llm": llm_pieces,
    "query": query_pieces,
    "chat": chat_pieces,
}


async def whole_answer(model: LanguageModel, drawn: Drawn) -> Verdict:
    """The verdict on the same answer in one piece; a query engine's prompt is another one, and a client's cuts are the
    server's.
    """
    verdict = await guard_of(model, drawn).acall(drawn.question)
    if drawn.front == "server":
        whole = json.loads(await served(model, drawn, stream=False))
        return verdict.revised(text=whole["choices"][0]["message"]["content"])
    if drawn.front != "query":
        return verdict
    response: Any = await query_engine(model, drawn).aquery(drawn.question)
    sentences = map(SentenceVerdict.model_validate, response.metadata["semgrad_guard"]["sentences"])
    return verdict.revised(text=str(response), sentences=tuple(sentences))


async def searched(model: LanguageModel, chance: random.Random, front: str = "") -> str:
    """One stream, of a front that is drawn unless it is given: the kind of its end.

    Raises:
        AssertionError: something left that must not, or the text is not the record's.
    """
    nonces = ["-".join("".join(chance.choices("bcdfgklmnprst", k=3)) for _ in range(3)) for _ in range(3)]
    question = f"Which of these is tea: {', '.join(nonces)}?"
    estimator: Any = chance.choice([HybridGrad(), MaxProbability()])
    front, leaves = front or chance.choice(list(FRONTS)), chance.choice([None, None, 0, 1, 2])
    given = {"estimator": estimator, "by": "sentence", "on_doubt": chance.choice(["stop", "drop"])}
    every = await whole_answer(model, Drawn(front, question, Policy(threshold=1e30), given, {}))
    scores = sorted(sentence.uncertainty or 0.0 for sentence in every.sentences)
    policy = Policy(threshold=chance.choice([scores[0] * 0.99, *(score * 1.001 for score in scores)]))
    place, limit = chance.randrange(len(every.text)), chance.choice([None, chance.randrange(1, 60)])
    strings = chance.choice([None, ["zz"], [every.text[place : place + chance.randrange(1, 9)]]])
    cuts = {"stop": strings, "max_tokens": limit} if front == "server" else {}
    drawn = Drawn(front, question, policy, given, cuts)
    whole = await whole_answer(model, drawn)
    events, text, record = Heard(), "", None
    stream = FRONTS[front](model, drawn, events)
    try:
        async for piece, verdict in stream:
            text, record = text + piece, verdict or record
            if leaves is not None and text.count(".") > leaves:
                break
            if piece and chance.random() < 0.2:
                await asyncio.sleep(chance.random() / 50)
    finally:
        await stream.aclose()  # type: ignore[attr-defined]
    withheld = [nonce for nonce, one in zip(nonces, whole.sentences, strict=True) if one.action != "deliver"]
    seen = "\n".join([text, *events.all])
    if found := [nonce for nonce in withheld if nonce in seen]:
        raise AssertionError(f"{front} {given['on_doubt']}: {found} left, of {question}")
    if not whole.text.startswith(text) or (leaves is None and text != whole.text):
        raise AssertionError(f"{front} {given['on_doubt']} {cuts}: {text!r} left, of {whole.text!r}")
    if record is not None and record.text != whole.text:
        raise AssertionError(f"{front} {given['on_doubt']}: {record.text!r} is recorded, {whole.text!r} is due")
    return f"{front}, {'whole' if text == whole.text else 'left early'}"


def small_model() -> LanguageModel:
    """Random weights: the grammar decides the text, and any score serves a rule about what leaves."""
    embedded = LanguageModel.from_pretrained("pocket")
    changes = {
        "hidden_size": 32,
        "head_dim": 16,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
    }
    torch.manual_seed(0)
    config = LlamaConfig(
        **{**embedded._model.config.to_dict(), **changes, "num_key_value_heads": 1, "initializer_range": 0.3}
    )
    return LanguageModel.from_transformers(LlamaForCausalLM(config).eval(), embedded.tokenizer)


async def main() -> None:
    """Run the streams, eight at a time."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--streams", type=int, default=10_000)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--model", help="an identifier or a folder; a small random model where it is not given")
    given = options.parse_args()
    model = NonceModel.like(LanguageModel.from_pretrained(given.model) if given.model else small_model())
    ends, began = Counter[str](), time.monotonic()
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
