"""A tiny random Llama that answers in readable ASCII (so that a leak is recognised anywhere), handlers that write down
all that leaves a model, and every path through it."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import torch
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import LLMResult
from langchain_core.tracers.base import BaseTracer
from langchain_core.tracers.schemas import Run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from semgrad_guard import Binding, Policy, calibrate
from tests.random_llama import merges_of

EVERYTHING, NOTHING = Policy(threshold=1e308, on_cut="score"), Policy(threshold=-1.0, on_cut="score")
"""Policies that let through every answer, and none: uncertainties are never negative."""

QUESTION = "Who are you?"


def policy_for_another_model() -> Policy:
    """A calibrated policy that no answer of these models may be judged by."""
    binding = Binding(model="other", estimator="hybridgrad")
    scores = [i / 100 for i in range(100)]
    return Policy.from_calibration(calibrate(scores, [True] * 100, alpha=0.2, delta=0.2, binding=binding))


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>"]


def tokenizer(text: str = "") -> PreTrainedTokenizerFast:
    """Byte-level BPE over printable ASCII and the line feed, without merges but for those of a text's words."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    letters = sorted(letter for letter in alphabet if " " < letter < "\x7f" or letter in "ĠĊ")
    merges = merges_of(text)
    known = [*SPECIAL, *letters, *dict.fromkeys("".join(pair) for pair in merges)]
    vocabulary = {token: number for number, token in enumerate(known)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = CHATML
    return fast


def save_tiny(folder: Path, *, seed: int = 3, text: str = "", window: int = 256) -> Path:
    """A checkpoint whose answers are gibberish of its own, different for each prompt, and repeatable.

    Every word of the text is a token. With seeds 3 and 5 answers are as long as they may be. HybridGrad takes three
    layers at least, and all that is more is only slower.
    """
    words = tokenizer(text)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=window,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, 1.2 / parameter.shape[-1] ** 0.5)
        model.lm_head.weight.mul_(3)
        model.lm_head.weight[words.pad_token_id] = 0
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


class Ledger(BaseTracer):
    """A tracer that counts how often each run was opened and closed, and how."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[tuple[str, UUID]] = []
        self.closed: list[tuple[str, UUID]] = []
        self.runs: list[Run] = []

    def _persist_run(self, run: Run) -> None:
        pass

    def _on_llm_start(self, run: Run) -> None:
        self.opened.append(("llm", run.id))
        self.runs.append(run)

    _on_chat_model_start = _on_llm_start

    def _on_chain_start(self, run: Run) -> None:
        self.opened.append(("chain", run.id))
        self.runs.append(run)

    def _on_llm_end(self, run: Run) -> None:
        self.closed.append(("end", run.id))

    def _on_llm_error(self, run: Run) -> None:
        self.closed.append(("error", run.id))

    _on_chain_end, _on_chain_error = _on_llm_end, _on_llm_error

    def models(self) -> list[Run]:
        """The runs of chat models, in the order of their starts."""
        return [run for run in self.runs if run.run_type in ("llm", "chat_model")]

    def assert_balanced(self) -> None:
        """Every run that was opened was closed exactly once."""
        assert sorted(str(i) for _, i in self.opened) == sorted(str(i) for _, i in self.closed)
        assert not self.run_map


class Wire(BaseCallbackHandler):
    """Writes down every token that any model sends while it generates, and every end of a run."""

    run_inline = True

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.started: list[UUID] = []
        self.ended: list[UUID] = []
        self.results: list[LLMResult] = []

    def on_chat_model_start(self, serialized: Any, messages: Any, *, run_id: UUID, **_: Any) -> None:
        self.started.append(run_id)

    def on_llm_new_token(self, token: Any, **_: Any) -> None:
        self.tokens.append(token)

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **_: Any) -> None:
        self.ended.append(run_id)
        self.results.append(response)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
        self.ended.append(run_id)


def collect(stream: Any) -> list[Any]:
    """All items of an asynchronous stream."""

    async def run() -> list[Any]:
        return [item async for item in stream]

    return asyncio.run(run())


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


def _v2(model: Any, prompt: Any, config: dict[str, Any]) -> list[Any]:
    events = collect(model.astream_events(prompt, config, version="v2"))
    return [event["data"]["chunk"] for event in events if event["event"] == "on_chat_model_stream"]


def _v3(model: Any, prompt: Any, config: dict[str, Any]) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # version 3 is in beta
        stream = model.stream_events(prompt, config, version="v3")
    return _said(list(stream.text), stream.output)


def _av3(model: Any, prompt: Any, config: dict[str, Any]) -> list[Any]:
    async def run() -> list[Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stream = await model.astream_events(prompt, config, version="v3")
        try:
            return _said([text async for text in stream.text], await stream.output)
        finally:  # LangChain hands out the output, or the error, before it tells the handlers that the run has ended
            await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))

    return asyncio.run(run())


def _said(texts: list[str], output: AIMessage) -> list[Any]:
    assert "".join(texts) == output.text
    last = AIMessageChunk(content="", response_metadata=output.response_metadata)
    return [*(AIMessageChunk(content=text) for text in texts), last]


EVENT_ROUTES: dict[str, Route] = {"astream_events v2": _v2, "stream_events v3": _v3, "astream_events v3": _av3}
"""The event streams, as pieces too. Version 3 exists on models and graphs, not on sequences."""


def text_of(pieces: list[Any]) -> str:
    """The text of the pieces, as a user sees it."""
    return "".join(piece if isinstance(piece, str) else piece.text for piece in pieces)


def metadata_of(pieces: list[Any]) -> list[dict[str, Any]]:
    """The records that the pieces carry; there should be one."""
    found = [piece.response_metadata.get("semgrad_guard") for piece in pieces]
    return [record for record in found if record is not None]
