"""The cost of the wrappers: a guarded answer through a chain or an engine, over generation and scoring alone.

    python benchmarks/wrappers.py [--model pocket | --layers 12 --width 768] [--rounds 20] [--output results.json]

The pocket model answers within milliseconds, which shows the wrapper's share. Random weights of a given size answer
as slowly as models in use, which puts that share in proportion.

The ways take turns within each round, in one process and in an order that alternates, so that whatever else the machine
does falls on all of them; times are CPU seconds of this process. Ratios are taken round by round: median (quartiles).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import command
import torch
from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate
from llama_index.core.query_engine import CustomQueryEngine
from machine import about
from rich.console import Console
from rich.table import Table
from shapes import speaking_model

from langchain_semgrad_guard import ChatSemGrad, UncertaintyRouterCallback
from llama_index_semgrad_guard import SemGradLLM
from llama_index_semgrad_guard import UncertaintyRouterCallback as LlamaIndexRouter
from llama_index_semgrad_guard import guarded as guarded_engine
from semgrad_guard import GenerationOptions, HybridGrad, LanguageModel, Policy

QUESTIONS = (
    "What is the capital of France?",
    "What is the chemical symbol of gold?",
    "What is the capital of Mongolia?",
    "Name the largest planet of the solar system.",
)
BARE = "bare: generate, score"
EVERYTHING = Policy(threshold=1e308)


class Asking(CustomQueryEngine):
    """The thinnest query engine there is: it calls the LLM, with nothing retrieved."""

    llm: SemGradLLM

    def custom_query(self, query_str: str) -> str:
        return self.llm.complete(query_str).text


def ways(model: LanguageModel, max_tokens: int) -> dict[str, Callable[[], Sequence[str]]]:
    """The ways to the same answers, each with its scores."""
    options, estimator = GenerationOptions(max_tokens=max_tokens), HybridGrad()
    chat = ChatSemGrad.from_model(model, max_tokens=max_tokens)
    router = chat.model_copy(update={"router": UncertaintyRouterCallback(EVERYTHING)})
    annotating = chat.model_copy(update={"router": UncertaintyRouterCallback(EVERYTHING, mode="annotate")})
    chain = ChatPromptTemplate.from_template("{question}") | router
    llm = SemGradLLM.from_model(model, max_tokens=max_tokens)
    deciding = llm.model_copy(update={"router": LlamaIndexRouter(EVERYTHING)})
    engine = guarded_engine(Asking(llm=deciding), deciding.router)

    def bare() -> list[str]:
        texts: list[str] = []
        for question in QUESTIONS:
            generation = model.generate(question, options, objective=estimator.objective)
            assert estimator(generation.evidence).uncertainty is not None
            texts.append(generation.text)
        return texts

    def through(runnable: Any, field: str | None = None) -> Callable[[], list[str]]:
        return lambda: [_text(runnable.invoke({field: q} if field else q)) for q in QUESTIONS]

    def streamed() -> list[str]:
        return ["".join(chunk.text for chunk in annotating.stream(question)) for question in QUESTIONS]

    return {
        BARE: bare,
        "ChatSemGrad.invoke": through(chat),
        "ChatSemGrad(router).invoke": through(router),
        "prompt | ChatSemGrad(router)": through(chain, "question"),
        "annotated live stream": streamed,
        "SemGradLLM.complete": lambda: [llm.complete(question).text for question in QUESTIONS],
        "SemGradLLM(router=...).complete": lambda: [deciding.complete(question).text for question in QUESTIONS],
        "guarded(engine).query": lambda: [str(engine.query(question)) for question in QUESTIONS],
    }


def _text(message: AIMessage) -> str:
    return str(message.text)


def measure(tasks: Mapping[str, Callable[[], Sequence[str]]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each way, round by round. All must give the same text."""
    expected = {name: list(task()) for name, task in tasks.items()}  # once unmeasured: buffers, kernels, identities
    assert len({tuple(texts) for texts in expected.values()}) == 1, f"the ways do not say the same: {expected}"
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for number in range(rounds):
        for name in tasks if number % 2 == 0 else reversed(list(tasks)):
            start = time.process_time()
            tasks[name]()
            seconds[name].append(time.process_time() - start)
    return seconds


def ratios(seconds: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Each way over the bare one: median, lower and upper quartile."""
    found: dict[str, list[float]] = {}
    for name, times in seconds.items():
        shares = [a / b for a, b in zip(times, seconds[BARE], strict=True)]
        lower, middle, upper = statistics.quantiles(shares, n=4)
        found[name] = [middle, lower, upper]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pocket", help="what to answer with (pocket, the fastest: the hardest case)")
    parser.add_argument("--layers", type=int, help="measure on random weights with so many layers instead")
    parser.add_argument("--width", type=int, default=768, help="of those random weights, a multiple of 64 (768)")
    parser.add_argument("--rounds", type=int, default=20, help="how often each way takes its turn, 2 or more (20)")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--output", type=Path, help="where the figures go (JSON)")
    arguments = command.parsed(parser)
    torch.set_num_threads(1)
    layers, width = arguments.layers, arguments.width
    model = speaking_model(layers, width) if layers else LanguageModel.from_pretrained(arguments.model)
    name = f"random weights, {layers} layers of {width}" if layers else arguments.model
    seconds = measure(ways(model, arguments.max_tokens), arguments.rounds)
    shares, console = ratios(seconds), Console(width=120)
    table = Table("way", "ms per answer", "over bare (quartiles)", title=f"{name}, {arguments.rounds} rounds")
    for way, (middle, lower, upper) in shares.items():
        milliseconds = 1000 * statistics.median(seconds[way]) / len(QUESTIONS)
        table.add_row(way, f"{milliseconds:.1f}", f"{middle:.3f} ({lower:.3f}-{upper:.3f})")
    console.print(table)
    command.keep({"machine": about(), "model": name, "seconds": seconds, "over_bare": shares}, arguments.output)


if __name__ == "__main__":
    main()
