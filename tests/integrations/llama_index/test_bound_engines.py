"""A calibration belongs to one engine: a record of another one is refused, and so are other functions that choose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.query_engine import RetrieverQueryEngine

from llama_index_semgrad_guard import GuardedQueryEngine, SemGradLLM, Versioned, calibrate_engine
from semgrad_guard import Policy
from semgrad_guard.errors import BindingMismatchError, InputError

from .conftest import PASSAGES, Passages
from .test_authorship import Own

RATES: dict[str, Any] = {"alpha": 0.3, "delta": 0.2, "progress": False, "grid": [1e9], "max_concurrency": 8}
EXAMPLES = [(f"Where is number {number}?", "nowhere") for number in range(8)]


def right(text: str, answers: Sequence[str]) -> bool:
    """A grader by function: everything is right."""
    return True


def engine(llm: SemGradLLM, *passages: Any) -> RetrieverQueryEngine:
    return RetrieverQueryEngine.from_args(Passages(*passages), llm=llm)


CHANGED: dict[str, Callable[[SemGradLLM], Any]] = {
    "documents": lambda llm: {"engine": engine(llm, PASSAGES[1])},
    "several": lambda llm: {"engine": engine(llm, PASSAGES[0], PASSAGES[1])},
    "max_tokens": lambda llm: {"engine": engine(llm.model_copy(update={"max_tokens": 1}), PASSAGES[0])},
    "output": lambda llm: {"engine": engine(llm, PASSAGES[0]), "output": lambda text: str(text)[:1]},
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_record_belongs_to_the_whole_engine(llm: SemGradLLM, tmp_path: Path, name: str) -> None:
    record = tmp_path / "record.jsonl"
    first = calibrate_engine(engine(llm, PASSAGES[0]), EXAMPLES, right, record=record, **RATES)
    same = calibrate_engine(engine(llm, PASSAGES[0]), EXAMPLES, right, record=record, **RATES)
    assert (first.n_recorded, same.n_recorded) == (0, len(EXAMPLES))
    with pytest.raises(InputError, match="not a record of"):
        calibrate_engine(examples=EXAMPLES, grader=right, record=record, **CHANGED[name](llm), **RATES)


def test_a_function_that_chooses_is_bound_by_what_it_does(llm: SemGradLLM) -> None:
    def twice(query: str) -> str:
        llm.complete("first " + query)
        return llm.complete("then " + query).text + "!"

    own = Own(do=twice)

    def by(word: str) -> Callable[[Any], bool]:
        return lambda call: call.prompt.text.find(word) >= 0

    policy = Policy.from_calibration(calibrate_engine(own, EXAMPLES, right, answering=by("then"), **RATES))
    record = GuardedQueryEngine(own, policy, answering=by("then")).query(EXAMPLES[3][0]).metadata["semgrad_guard"]  # type: ignore[index]
    assert record["action"] == "answer"
    for other in (by("first"), lambda call: "first" in call.prompt.text, Versioned(by("then"), name="by", version="1")):
        with pytest.raises(BindingMismatchError, match="answering"):
            GuardedQueryEngine(own, policy, answering=other).query(EXAMPLES[3][0])


def test_a_function_whose_content_cannot_be_known_is_refused(llm: SemGradLLM) -> None:
    own = Own(do=lambda query: llm.complete(query).text)
    unknowns: list[Any] = ["x".startswith, callable]
    for unknown in unknowns:
        with pytest.raises(InputError, match=r"Versioned\("):
            GuardedQueryEngine(own, Policy(threshold=1.0), answering=unknown)
