"""A tiny random Llama that answers in readable ASCII, paths through it, and all that listens to these."""

from __future__ import annotations

import asyncio
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.tracers.base import BaseTracer
from langchain_core.tracers.schemas import Run as TracedRun

from langchain_semgrad_guard import get_verdict
from semgrad_guard import Binding, Policy, Verdict, calibrate
from tests.random_llama import byte_tokenizer, random_llama

from .ways import collect

EVERYTHING, NOTHING = Policy(threshold=1e308, on_cut="score"), Policy(threshold=-1.0, on_cut="score")
"""Policies that let through every answer, and none: uncertainties are never negative."""

QUESTION = "Who are you?"


def policy_for_another_model() -> Policy:
    """A calibrated policy that no answer of these models may be judged by."""
    binding = Binding(model="other", estimator="hybridgrad")
    scores = [i / 100 for i in range(100)]
    return Policy.from_calibration(calibrate(scores, [True] * 100, alpha=0.2, delta=0.2, binding=binding))


def save_tiny(folder: Path, *, seed: int = 3, text: str = "", window: int = 256) -> Path:
    """A checkpoint whose answers are gibberish of its own in readable ASCII, different for each prompt, and repeatable.

    Every word of the text is a token. Answers are as long as they may be. HybridGrad takes three layers at least, and
    all that is more is only slower.
    """
    words = byte_tokenizer(words=text)
    size = {"vocab_size": len(words), "max_position_embeddings": window, "num_hidden_layers": 3}
    model = random_llama(seed=seed, **size).float()
    texts = [words.decode([token], skip_special_tokens=True) for token in range(len(words))]
    readable = [text.isascii() and text.isprintable() and text != "" for text in texts]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, 1.2 / parameter.shape[-1] ** 0.5)
        model.lm_head.weight *= 3 * torch.tensor(readable)[:, None]
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


Route = Callable[[Any, Any, dict[str, Any]], list[Any]]

ROUTES: dict[str, Route] = {
    "invoke": lambda model, prompt, config: [model.invoke(prompt, config)],
    "ainvoke": lambda model, prompt, config: [asyncio.run(model.ainvoke(prompt, config))],
    "batch": lambda model, prompt, config: model.batch([prompt], config),
    "abatch": lambda model, prompt, config: asyncio.run(model.abatch([prompt], config)),
    "stream": lambda model, prompt, config: list(model.stream(prompt, config)),
    "astream": lambda model, prompt, config: collect(model.astream(prompt, config)),
}
"""Every way to get an answer: the pieces it comes in."""


def verdict_of(message: Any) -> Verdict:
    """The verdict that a message carries."""
    verdict = get_verdict(message)
    assert verdict is not None
    return verdict


Run = Callable[..., Any]
RUNS: dict[str, Run] = {
    "invoke": lambda graph, given, config=None: graph.invoke(given, config),
    "ainvoke": lambda graph, given, config=None: asyncio.run(graph.ainvoke(given, config)),
}
"""The two ways to run a graph."""


def text_of(pieces: list[Any]) -> str:
    """The text of the pieces, as a user sees it."""
    return "".join(piece if isinstance(piece, str) else piece.text for piece in pieces)


def metadata_of(pieces: list[Any]) -> list[dict[str, Any]]:
    """The records that the pieces carry; there should be one."""
    found = [piece.response_metadata.get("semgrad_guard") for piece in pieces]
    return [record for record in found if record is not None]


# All that listens to a run, and all that an error takes along: where a withheld draft could be found.


class Ear(BaseCallbackHandler):
    """Writes down every event of every kind."""

    run_inline = True

    def __init__(self) -> None:
        self.events: list[str] = []
        self.names: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def hear(*given: Any, **named: Any) -> None:
            self.names.append(name)
            self.events.append(shown((name, given, named)))

        return hear


class Tracer(BaseTracer):
    """Writes down whole traces."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.roots: list[TracedRun] = []

    def _persist_run(self, run: TracedRun) -> None:
        self.roots.append(run)
        self.events.append(shown(run.model_dump()))


def shown(thing: Any) -> str:
    """A thing as a log, a database or another process would see it."""
    return f"{thing!r}\n{_pickled(thing)}"


def _pickled(thing: Any) -> str:
    try:
        pickler = _Pickler(held := io.BytesIO())
        pickler.dump(thing)
    except Exception:  # noqa: BLE001 - libraries refuse in many ways
        return ""  # it goes to no other process
    return held.getvalue().decode("latin-1")


class _Pickler(pickle.Pickler):
    """Leaves out the scripted models, which know their own answers."""

    def persistent_id(self, obj: Any) -> str | None:
        return "a scripted model" if type(obj).__name__ == "Scripted" else None


def errors_of(error: BaseException | None) -> Iterator[BaseException]:
    """An error with its causes and contexts, and the members of groups."""
    known: set[int] = set()
    open_ones = [error]
    while open_ones:
        one = open_ones.pop()
        if one is None or id(one) in known:
            continue
        known.add(id(one))
        yield one
        open_ones += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]


def record_of(error: BaseException | None) -> str:
    """All that an error tells: texts, fields, pickle, and the local variables of the frames it came through."""
    found = list[str]()
    for one in errors_of(error):
        found += [str(one), shown(one), repr(vars(one)), *getattr(one, "__notes__", ())]
        found += _locals(one.__traceback__)
    return "\n".join(found)


def _locals(frames: TracebackType | None) -> Iterator[str]:
    while frames is not None:
        module = frames.tb_frame.f_globals.get("__name__", "")
        if not module.startswith("tests."):
            yield from (f"{module}: {name} = {value!r}" for name, value in frames.tb_frame.f_locals.items())
        frames = frames.tb_next


def unpickled(thing: Any) -> Any:
    """A copy, as another process gets it."""
    return pickle.loads(pickle.dumps(thing))  # noqa: S301 - our own
