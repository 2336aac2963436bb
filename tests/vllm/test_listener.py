"""However vLLM runs requests, in pieces or again, a tape holds the states of its own positions: here without vLLM."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from semgrad_guard import GenerationOptions
from semgrad_guard.engine.objective import Objective
from semgrad_guard.vllm.engine import WrittenAnswers
from semgrad_guard.vllm.language_model import TwinLanguageModel
from semgrad_guard.vllm.listener import Listener, VLLMAnswer
from tests.random_llama import byte_tokenizer, random_llama

QUESTIONS = ("Who?", "What is it, and where?", "Is it so?")
MODEL = TwinLanguageModel.from_transformers(random_llama(), byte_tokenizer(), name="tiny")


class Block(nn.Module):
    """A layer whose output and residual add up to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.Module()
        self.self_attn.attn = SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: "ANOTHER"))  # type: ignore[assignment]

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return states - 1, torch.ones_like(states)


class Runner:
    """Runs requests side by side as vLLM does; the state at a position names the request and the position."""

    def __init__(self) -> None:
        blocks = [Block() for _ in range(MODEL.n_layers)]
        self.model: Any = SimpleNamespace(
            model=SimpleNamespace(layers=blocks), compute_logits=lambda states: 2 * states
        )
        processors = SimpleNamespace(non_argmax_invariant=[])
        self.input_batch: Any = SimpleNamespace(logitsprocs=processors)

    def execute_model(self, scheduled: Any) -> None:
        """One pass; the scheduler's record also says where each request begins."""
        counts: dict[str, int] = scheduled.num_scheduled_tokens
        self.input_batch.req_ids = list(counts)
        self.input_batch.req_id_to_index = {name: row for row, name in enumerate(counts)}
        self.input_batch.num_computed_tokens_cpu = [first for _, first, _ in scheduled.spans]
        states = [state(*span) for span in scheduled.spans]
        for block in self.model.model.layers:
            block(torch.cat(states))
        self.model.compute_logits(torch.stack([own[-1] for own in states]))

    def run(self, spans: list[tuple[int, int, int]]) -> None:
        """A pass over so many positions of each request, from its first on."""
        counts = {f"{request}-0a1b": count for request, _, count in spans}
        self.execute_model(SimpleNamespace(num_scheduled_tokens=counts, spans=spans))


def state(request: int, first: int, count: int) -> torch.Tensor:
    return torch.tensor([[float(request), float(place)] for place in range(first, first + count)])


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(attn_metadata=None)
    monkeypatch.setitem(sys.modules, "vllm.forward_context", SimpleNamespace(get_forward_context=lambda: context))


@given(st.data())
def test_a_tape_holds_its_own_positions(data: st.DataObject) -> None:
    runner = Runner()
    listener = Listener(runner)
    listener.record(MODEL.scorer)
    batch = WrittenAnswers(MODEL, Objective(), listener=listener)
    rows = [batch.answer(MODEL.render(q), GenerationOptions(), name=str(n)) for n, q in enumerate(QUESTIONS)]
    batch.join(rows)
    begins = [row.begin for row in rows]
    # positions in vLLM's cache: a prefix that another request has left
    computed = [data.draw(st.integers(0, len(row.prompt.ids) - 1)) for row in rows]
    begun = set[int]()
    for _ in range(data.draw(st.integers(1, 12))):
        spans = list[tuple[int, int, int]]()
        for number in data.draw(st.permutations(range(len(rows))))[: data.draw(st.integers(1, len(rows)))]:
            if data.draw(st.integers(0, 9)) == 0:  # preempted
                computed[number] = data.draw(st.integers(0, computed[number]))
            if number not in begun:  # states of that prefix are nowhere
                begins[number] = max(begins[number], computed[number])
            begun.add(number)
            left = len(rows[number].prompt.ids) + len(rows[number].ids) - computed[number]
            spans.append(
                (number, computed[number], left if data.draw(st.booleans()) else data.draw(st.integers(1, left)))
            )
        runner.run(spans)
        for number, first, count in spans:
            computed[number] = first + count
            if computed[number] == len(rows[number].prompt.ids) + len(rows[number].ids):
                rows[number].ids.append(5)
    for number, (row, begin) in enumerate(zip(rows, begins, strict=True)):
        holds(listener, row, number, begin)


def holds(listener: Listener, row: VLLMAnswer, number: int, begin: int) -> None:
    """Whether all states of an answer are on its tape, and no other's."""
    if not row.ids:
        return
    tape, length = listener.tape(row), len(row.prompt.ids)
    assert tape is not None
    assert (tape.begin, tape.end) == (begin, length + len(row.ids) - 1)
    torch.testing.assert_close(tape.hidden([(tape.begin, tape.end)]), state(number, begin, tape.end - begin))
    finals, predicting = tape.steps("finals", length - 1, tape.end), state(number, length - 1, len(row.ids))
    assert finals is not None
    torch.testing.assert_close(torch.stack(finals), predicting)
    if (logits := tape.steps("logits", length - 1, tape.end)) is not None:
        torch.testing.assert_close(torch.stack(logits), 2 * predicting)


def test_what_was_not_recorded_is_no_tape() -> None:
    """A pass that guesses ahead has other rows before the head than requests."""
    runner = Runner()
    listener = Listener(runner)
    listener.record(MODEL.scorer)
    batch = WrittenAnswers(MODEL, Objective(), listener=listener)
    row = batch.answer(MODEL.render("Who?"), GenerationOptions(), name="0")
    batch.join([row])
    runner.run([(0, 0, len(row.prompt.ids))])
    row.ids.append(5)
    assert listener.tape(row) is not None
    row.ids.append(5)
    assert listener.tape(row) is None
