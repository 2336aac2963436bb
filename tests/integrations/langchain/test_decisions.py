"""Decision models with a promise: rules from labels, and LangChain's own consumers with them."""

from __future__ import annotations

import asyncio
import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain.agents.middleware import AutoModeMiddleware, ModelChoice, ModelRouterMiddleware
from langchain_core.decisions import BaseDecisionModel, Choice, ClassifierResponse, Noul, Score
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool

from langchain_semgrad_guard import CalibratedDecisions, calibrate_decisions
from semgrad_guard import Calibration
from semgrad_guard.errors import BindingMismatchError, CalibrationError, InputError

RISKY = Noul(instructions="Is this call risky?")
ROUTE = Choice(instructions="Which model?", criteria={"cheap": "Easy tasks.", "strong": "Hard tasks."})


class Told(BaseDecisionModel):
    """P(yes), or P(cheap), is the number that the state holds."""

    model: str = "told"
    version: str = "told-1"

    @property
    def _provider(self) -> str:
        return "tests"

    def _classify(self, state: Any, questions: Any) -> ClassifierResponse:
        p = float(str(getattr(state, "text", state)).rsplit(" ", 1)[-1]) if not isinstance(state, dict) else _in(state)
        answers: dict[str, Any] = {}
        for name, question in questions.items():
            if isinstance(question, Noul):
                answers[name] = {"type": "noul", "noul": p}
            else:
                others = [label for label in question.criteria if label != "cheap"]
                probabilities = {"cheap": p} | dict.fromkeys(others, (1 - p) / len(others))
                best = max(probabilities, key=probabilities.__getitem__)
                choice = {"type": "choice", "choice": best, "probabilities": probabilities}
                answers[name] = choice | {"confidence": probabilities[best]}
        return ClassifierResponse.model_validate({"model": self.version, "answers": answers})


def _in(state: Any) -> float:
    return float(state["tool_call"]["args"]["risk"])


def labelled(seed: int = 0, n: int = 200) -> list[tuple[str, bool]]:
    """States that are risky with the probability p ** 3, and are reported as p, off by two logits."""
    draw = random.Random(seed)
    found: list[tuple[str, bool]] = []
    for _ in range(n):
        p = draw.random()
        reported = 1 / (1 + math.exp(2 - math.log(p / (1 - p)))) if 0 < p < 1 else p
        found.append((f"state {reported}", draw.random() > p**3))
    return found


def rule(**options: Any) -> Calibration:
    return calibrate_decisions(Told(), RISKY, labelled(), alpha=0.1, delta=0.1, **options)


def test_a_rule_is_a_calibration_with_a_file(tmp_path: Path) -> None:
    made = rule()
    assert made.threshold is not None
    assert made.binding is not None
    assert made.binding.model == "tests:told"
    assert Calibration.load(made.save(tmp_path / "rule.json")) == made
    wrong = [not right for state, right in labelled(1, 5000) if made.lets_through(float(state.split()[1]))]
    assert 0.01 < sum(wrong) / len(wrong) <= 0.1
    assert len(wrong) > 1000


@settings(max_examples=30, deadline=None)
@given(p=st.floats(0, 1), q=st.floats(0, 1))
def test_every_threshold_of_a_consumer_decides_as_the_rule(p: float, q: float) -> None:
    made = rule()
    guarded = CalibratedDecisions(decisions=Told(), decided=(made,))
    moved = [guarded.invoke({"state": f"s {x}", "questions": {"a": RISKY}}).nouls["a"].noul for x in (p, q)]
    for x, noul in zip((p, q), moved, strict=True):
        assert noul <= 0.01 if made.lets_through(x) else noul >= 0.99
    assert (p <= q) <= (moved[0] <= moved[1]), "the order is kept"


def test_yes_may_be_the_safe_outcome() -> None:
    flipped = [(f"s {1 - float(state.split()[1])}", right) for state, right in labelled()]
    made = calibrate_decisions(Told(), RISKY, flipped, alpha=0.1, delta=0.1, safe="yes")
    assert made.threshold == pytest.approx(rule().threshold)
    guarded = CalibratedDecisions(decisions=Told(), decided=(made,))
    sure, unsure = (
        asyncio.run(guarded.ainvoke({"state": f"s {p}", "questions": {"a": RISKY}})).nouls["a"].noul for p in (1, 0)
    )
    assert sure >= 0.99
    assert unsure <= 0.01


@pytest.mark.parametrize(
    ("question", "options", "words"),
    [
        (Score(instructions="How bad?", criteria=["a", "b"]), {}, "no safe outcome"),
        (RISKY, {"safe": "maybe"}, "no outcome"),
        (RISKY, {"otherwise": "yes"}, "leave otherwise= out"),
        (ROUTE, {"safe": "cheap"}, "needs otherwise="),
        (ROUTE, {"safe": "cheap", "otherwise": "cheap"}, "needs otherwise="),
    ],
)
def test_what_cannot_be_promised_is_refused(question: Any, options: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        calibrate_decisions(Told(), question, labelled(), alpha=0.1, delta=0.1, **options)


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        ([], {}, "holds no state"),
        (None, {}, "labelled is a list of pairs"),
        ("ab", {}, "labelled is a list of pairs"),
        ([1, 2], {}, "labelled holds pairs"),
        (labelled(), {"model": "gpt"}, "decision model"),
        (labelled(), {"tries": None}, "tries numbers"),
        (labelled(), {"runs": 5}, "one entry per"),
        (labelled(), {"runs": [1]}, "runs has 1 entries"),
        (labelled(), {"runs": [[1]] * 200}, "Name each run"),
        (labelled(), {"runs": [None] * 200}, "name each run"),
        ([("state 0.1", "yes")], {}, "True or False"),
    ],
)
def test_what_is_no_label_is_refused(given: Any, options: dict[str, Any], words: str) -> None:
    how: dict[str, Any] = {"model": Told(), "question": RISKY, "alpha": 0.1, "delta": 0.1} | options
    with pytest.raises((InputError, CalibrationError), match=words):
        calibrate_decisions(how.pop("model"), how.pop("question"), given, **how)


@pytest.mark.parametrize(
    ("model", "question"),
    [(Told(), Noul(instructions="Is this call risky? ")), (Told(), ROUTE), (Told(version="told-2"), RISKY)],
)
def test_another_question_or_version_is_refused(model: Told, question: Any) -> None:
    guarded = CalibratedDecisions(decisions=model, decided=(rule(),))
    with pytest.raises(BindingMismatchError):
        guarded.invoke({"state": "s 0", "questions": {"a": question}})


def test_another_model_and_other_calibrations_are_refused(answers: Calibration) -> None:
    with pytest.raises(BindingMismatchError, match="model"):
        CalibratedDecisions(decisions=Told(model="other"), decided=(rule(),))
    with pytest.raises(InputError, match="calibrate_decisions"):
        CalibratedDecisions(decisions=Told(), decided=(answers,))
    with pytest.raises(InputError, match="two rules for one question"):
        CalibratedDecisions(decisions=Told(), decided=(rule(), rule(tries=1)))
    with pytest.raises(InputError, match="log must be"):
        CalibratedDecisions(decisions=Told(), decided=(rule(),), log="log.db")


@pytest.fixture
def answers() -> Calibration:
    from semgrad_guard.pocket import CALIBRATION_PATH

    return Calibration.load(CALIBRATION_PATH)


def test_runs_are_the_units() -> None:
    """Copies of a label in one run tell nothing more: the rule is that of the runs, not of the calls."""
    states = labelled(n=60)
    runs = [run for run in range(60) for _ in range(5)]
    copied = calibrate_decisions(Told(), RISKY, [states[run] for run in runs], alpha=0.2, delta=0.1, runs=runs)
    alone = calibrate_decisions(Told(), RISKY, states, alpha=0.2, delta=0.1, runs=range(60))
    pooled = calibrate_decisions(Told(), RISKY, [states[run] for run in runs], alpha=0.2, delta=0.1)
    assert copied.n == alone.n == 60
    assert copied.threshold == alone.threshold
    assert pooled.n == 300


@tool
def delete(risk: float) -> str:
    """Delete."""
    return "deleted"


def agent_with(middleware: Any, *risks: float) -> list[str]:
    calls = [{"name": "delete", "args": {"risk": risk}, "id": f"c{n}"} for n, risk in enumerate(risks)]
    model = GenericFakeChatModel(messages=iter([AIMessage("", tool_calls=calls), AIMessage("done")]))
    model.__class__ = type("Tooled", (GenericFakeChatModel,), {"bind_tools": lambda self, tools, **_: self})
    state = create_agent(model, [delete], middleware=[middleware]).invoke({"messages": [("human", "q")]})
    return [str(message.status) for message in state["messages"] if isinstance(message, ToolMessage)]


def test_auto_mode_lets_through_what_the_rule_does() -> None:
    made = rule()
    assert made.threshold is not None
    risks = (made.threshold * 0.99, made.threshold * 1.01, 0.499)
    guarded = AutoModeMiddleware(tools=[delete], classifier=CalibratedDecisions(decisions=Told(), decided=(made,)))
    guarded.config.instructions, guarded.config.criteria = "Is this call risky?", None
    assert agent_with(guarded, *risks) == ["success", "error", "error"]
    plain = AutoModeMiddleware(tools=[delete], classifier=Told())
    assert agent_with(plain, *risks) == ["success", "success", "success"], "its constant lets all of them through"


@pytest.mark.filterwarnings("ignore:The middleware")
def test_a_router_keeps_tasks_where_the_rule_does() -> None:
    tasks = [(f"task {1 - float(state.split()[1])}", right) for state, right in labelled()]
    made = calibrate_decisions(Told(), ROUTE, tasks, alpha=0.1, delta=0.1, safe="cheap", otherwise="strong")
    assert made.threshold is not None
    routers = ModelRouterMiddleware(
        choices={
            label: ModelChoice(GenericFakeChatModel(messages=iter([AIMessage(label)] * 2)), about)
            for label, about in ROUTE.criteria.items()
        },
        instructions="Which model?",
        classifier=CalibratedDecisions(decisions=Told(), decided=(made,)),
    )
    agent = create_agent(GenericFakeChatModel(messages=iter([])), middleware=[routers])
    for p, expected in ((1 - made.threshold + 0.01, "cheap"), (1 - made.threshold - 0.01, "strong")):
        state = agent.invoke({"messages": [("human", f"task {p}")]})
        assert state["messages"][-1].text == expected
        assert math.isclose(sum(state["model_route"].probabilities.values()), 1)
