"""An engine calibrated on what it really asks: whose scores count, and which prompts are promised."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.chat_engine import ContextChatEngine, SimpleChatEngine
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from llama_index_semgrad_guard import (
    GuardedChatEngine,
    GuardedQueryEngine,
    SemGradLLM,
    acalibrate_engine,
    calibrate_engine,
)
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.errors import BindingMismatchError, CalibrationError, InputError
from semgrad_guard.estimators import FusedStates
from semgrad_guard.guard import questions_of_kind

from .conftest import PASSAGES, Passages
from .scripted import Scripted
from .test_authorship import Own, acc, engine

RATES: dict[str, Any] = {"alpha": 0.3, "delta": 0.2, "progress": False}
EXAMPLES = [(f"Where is number {number}?", "nowhere") for number in range(8)]
QUESTION_FIRST = PromptTemplate("Question: {query_str}\nContext: {context_str}\nAnswer:")


def wrong(text: str, answers: Sequence[str]) -> bool:
    """A grader by function: everything is wrong."""
    return False


class Towns(BaseRetriever):
    """An invented passage for every question, by its thing and town."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[str, str] = {}

    def invented(self, rng: random.Random) -> tuple[str, list[str]]:
        """A question, whose passage is known from now on, and its answer."""
        name = rng.choice(["Ada", "Bela", "Cyrus", "Dora", "Emil", "Fatima", "Goran", "Hanna", "Igor", "Jana"])
        home, town = rng.sample(["Ulm", "Graz", "Oslo", "Riga", "Lyon", "Bern", "Turin", "Porto", "Cadiz"], 2)
        thing, year = rng.choice(["bridge", "tower", "school", "library", "station"]), rng.randint(1810, 1999)
        pairs = [(f"Who built the {thing} of {town}?", name), (f"When was the {thing} of {town} built?", str(year))]
        question, answer = rng.choice(pairs)
        text = f"The {thing} of {town} was built by {name} in {year}. {name} was born in {home}."
        self.known[question] = text
        return question, [answer]

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(text=self.known[query_bundle.query_str]), score=1.0)]


async def test_the_engine_keeps_its_promise_and_other_prompts_have_none() -> None:
    llm, towns, rng = SemGradLLM(model="pocket", max_tokens=16), Towns(), random.Random(1)
    inner = RetrieverQueryEngine.from_args(towns, llm=llm, text_qa_template=QUESTION_FIRST)
    examples = dict(towns.invented(rng) for _ in range(150))
    calibration = calibrate_engine(
        inner, examples.items(), "token-f1", alpha=0.2, delta=0.1, max_concurrency=16, progress=False
    )
    assert calibration.threshold is not None
    policy = Policy.from_calibration(calibration)
    guarded, later = GuardedQueryEngine(inner, policy), [towns.invented(rng)[0] for _ in range(60)]
    assert guarded.promise is not None
    records = [response.metadata["semgrad_guard"] for response in await asyncio.gather(*map(guarded.aquery, later))]
    answered = [record for record in records if record["action"] == "answer"]
    assert sum(record["promised"] for record in answered) >= 0.95 * len(answered) > 20
    own_prompt = RetrieverQueryEngine.from_args(towns, llm=llm)
    for other in (own_prompt, ContextChatEngine.from_defaults(towns, llm=llm)):
        guard: Any = GuardedQueryEngine if other is own_prompt else GuardedChatEngine
        ask = (lambda engine: engine.query) if other is own_prompt else (lambda engine: engine.chat)
        record = ask(guard(other, policy))(later[0]).metadata["semgrad_guard"]
        assert (record["promised"], record["familiar"]) == (False, False)


@pytest.mark.parametrize("at_once", [1, 3])
def test_scores_are_those_of_the_guard(at_once: int, llm: SemGradLLM, tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    calibrate_engine(engine(llm), EXAMPLES, wrong, record=path, max_concurrency=at_once, **RATES)
    guarded = GuardedQueryEngine(engine(llm), Policy(threshold=1e308))
    for (question, _), line in zip(EXAMPLES, path.read_text().splitlines()[1:], strict=True):
        answered, response = json.loads(line), guarded.query(question)
        assert answered["text"] == str(response)
        assert question in answered["prompt"]["text"]
        expected = response.metadata["semgrad_guard"]["uncertainty"]  # type: ignore[index]
        assert answered["uncertainty"] == pytest.approx(expected, rel=1e-3)


def test_the_asynchronous_twin_and_a_guarded_engine_find_the_same(llm: SemGradLLM) -> None:
    inner = engine(llm)
    one = calibrate_engine(inner, EXAMPLES, wrong, **RATES)
    assert one == asyncio.run(acalibrate_engine(inner, EXAMPLES, wrong, **RATES))
    withholding = GuardedQueryEngine(inner, Policy(threshold=-1e308))
    assert one == calibrate_engine(withholding, EXAMPLES, wrong, **RATES)
    assert one.n_wrong == len(EXAMPLES)


def test_a_chat_engine_begins_each_example_anew(llm: SemGradLLM) -> None:
    chat = SimpleChatEngine.from_defaults(llm=llm)
    chat.chat("Hello")
    before = list(chat.chat_history)
    one = calibrate_engine(chat, EXAMPLES, wrong, **RATES)
    assert one.shape is not None
    assert (one.shape.turns.low, one.shape.turns.high) == (1, 1)
    assert chat.chat_history == before
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes?"}]
    examples = [([*turns, {"role": "user", "content": text}], answer) for text, answer in EXAMPLES]
    other = calibrate_engine(chat, examples, wrong, **RATES)
    assert other.shape is not None
    assert other.shape.turns.low == 3
    assert asyncio.run(acalibrate_engine(chat, examples, wrong, **RATES)) == other


def test_the_rule_is_part_of_the_binding(wide: LanguageModel) -> None:
    llm = Scripted.saying(wide, lambda prompt: (f"It is {len(prompt)}", 0.001 * len(prompt)))
    side_by_side = calibrate_engine(acc(llm), EXAMPLES, lambda *_: True, **RATES)
    assert side_by_side.binding is not None
    assert (side_by_side.binding.settings or {})["aggregate"] == "max"
    policy = Policy.from_calibration(side_by_side)
    assert (
        GuardedQueryEngine(acc(llm), policy).query("Where is number 3?").metadata["semgrad_guard"]["action"] == "answer"
    )  # type: ignore[index]
    one_passage = RetrieverQueryEngine.from_args(Passages(PASSAGES[0]), llm=llm, response_mode="accumulate")  # type: ignore[arg-type]
    assert GuardedQueryEngine(one_passage, policy).query("Where is number 3?").metadata is not None
    with pytest.raises(BindingMismatchError):
        GuardedQueryEngine(engine(llm), policy).query("Where?")
    with pytest.raises(BindingMismatchError):
        GuardedQueryEngine(acc(llm), policy, aggregate="mean").query("Where?")
    own = Own(do=lambda query: "So: " + llm.complete(query).text)
    with pytest.raises(CalibrationError, match="cannot be told"):
        calibrate_engine(own, EXAMPLES, wrong, **RATES)
    named = calibrate_engine(own, EXAMPLES, lambda *_: True, answering="Scripted", **RATES)
    assert (
        GuardedQueryEngine(own, Policy.from_calibration(named), answering="Scripted")
        .query("Where is number 3?")
        .metadata
    )  # type: ignore[truthy-bool]
    with pytest.raises(InputError, match="brings its own"):
        calibrate_engine(GuardedQueryEngine(own, policy), EXAMPLES, wrong, answering="Scripted", **RATES)


def test_bad_input_is_refused(llm: SemGradLLM, make_engine: Any) -> None:
    for given in (5, "engine", llm):
        with pytest.raises(InputError, match="is no query engine"):
            calibrate_engine(given, EXAMPLES, wrong, **RATES)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="is asked a text"):
        calibrate_engine(make_engine(), [({"a": 1}, "b")], wrong, **RATES)
    with pytest.raises(CalibrationError, match="No model was asked for any example"):
        calibrate_engine(make_engine(passages=()), EXAMPLES, wrong, **RATES)


class Sometimes(Passages):
    """Finds something for every other question."""

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return super()._retrieve(query_bundle) if int(query_bundle.query_str[-2]) % 2 else []


def test_an_example_for_which_nothing_is_retrieved_has_no_score(llm: SemGradLLM, tmp_path: Path) -> None:
    inner: Any = engine(llm)
    inner._retriever = Sometimes(*PASSAGES)
    examples = [(f"Where is {number}?", "nowhere") for number in range(8)]
    calibrating = {"record": tmp_path / "record.jsonl", **RATES}
    calibration = calibrate_engine(inner, examples, wrong, **calibrating)
    assert (calibration.n, calibration.n_unscored) == (8, 4)
    again = calibrate_engine(inner, examples, wrong, **calibrating)
    assert again.binding == calibration.binding


@pytest.mark.parametrize("estimator", ["auto", "states", "greatest_entropy", "hybridgrad"])
def test_every_estimator_serves_and_free_scores_are_kept(estimator: str, llm: SemGradLLM, tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    made = calibrate_engine(engine(llm), EXAMPLES, wrong, **RATES, estimator=estimator, record=record)
    expected = estimator if estimator in ("greatest_entropy", "hybridgrad") else "max_probability"
    assert made.binding is not None
    assert (made.binding.estimator, made.n) == (expected, len(EXAMPLES))
    kept = json.loads(record.read_text().splitlines()[1])["scores"]
    assert {"max_probability", "mean_entropy", "gnll", "greatest_entropy", "hidden_score", estimator} - {"auto"} <= set(
        kept
    )


def test_an_unfitted_estimator_is_refused_before_the_first_answer(llm: SemGradLLM) -> None:
    own = llm.model_copy(update={"estimator": FusedStates()})
    seen: list[tuple[int, int]] = []
    with pytest.raises(CalibrationError, match="which is not fitted"):
        calibrate_engine(engine(own), EXAMPLES, wrong, alpha=0.3, delta=0.2, progress=lambda *done: seen.append(done))
    assert seen == []


def test_each_kind_of_question_has_its_promise(wide: LanguageModel) -> None:
    kinds = ["easy", "hard"] * (len(EXAMPLES) // 2)
    llm = Scripted.saying(wide, lambda prompt: (f"It is {len(prompt)}", 0.001 * len(prompt)))
    for inner in (engine(llm), acc(llm)):  # one call, and several in one verdict
        found = calibrate_engine(inner, EXAMPLES, lambda *_: True, kind=kinds, **RATES)
        assert {kind: own.n for kind, own in found.kinds.items()} == {"easy": 4, "hard": 4}
        guarded = GuardedQueryEngine(inner, Policy.from_calibration(found), mode="annotate")
        for kind, known in (("easy", True), ("other", False), (None, False)):
            with questions_of_kind(kind):
                record = guarded.query(EXAMPLES[0][0]).metadata["semgrad_guard"]  # type: ignore[index]
            assert record["kind"] == kind
            assert ("kind" not in " ".join(record["unfamiliar"])) == known
