"""A chat model as a judge: strict verdicts, and nothing that is none counts."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest

from semgrad_guard.errors import GradingError, MissingExtraError
from semgrad_guard.grading import AnswerToGrade
from semgrad_guard.grading.by_name import Judge, read_verdict

fakes = pytest.importorskip("langchain_core.language_models.fake_chat_models")
ANSWERS = [AnswerToGrade(f"question {i}", f"answer {i} {{x}}", ("one", "two")) for i in range(4)]


class Heard(fakes.FakeListChatModel):  # type: ignore[misc]
    """LangChain's list of replies, by the answer they are asked about; it remembers the prompts."""

    prompts: list[str] = []  # noqa: RUF012 - a pydantic field

    def _call(self, messages: list[Any], *arguments: Any, **named: Any) -> str:
        self.prompts.append(messages[-1].content)
        number = next(i for i in range(len(ANSWERS)) if f"answer {i} " in messages[-1].content)
        return self.responses[number]


@pytest.mark.parametrize(
    "reply",
    [
        "CORRECT",
        " correct.\n",
        "**Correct**",
        "Verdict: CORRECT",
        "<think>in\ncorrect</think>Correct",
        "[THINK]incorrect?[/THINK]Correct",
        "<thinking>INCORRECT</thinking>\nCORRECT",
    ],
)
def test_replies_that_say_correct(reply: str) -> None:
    assert read_verdict(reply) is True


@pytest.mark.parametrize("reply", ["INCORRECT", "Incorrect!", "<think>CORRECT</think>\n\nincorrect"])
def test_replies_that_say_incorrect(reply: str) -> None:
    assert read_verdict(reply) is False


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "yes",
        "not correct",
        "CORRECT or INCORRECT",
        "The answer is correct",
        "<think>CORRECT",
        "correctly",
        "in correct",
    ],
)
def test_other_replies_are_no_verdict_and_shown(reply: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "semgrad_guard"):
        assert read_verdict(reply) is None
    assert repr(reply) in caplog.text


def test_a_judge_sees_question_references_and_answer() -> None:
    chat = Heard(responses=["CORRECT", "INCORRECT", "perhaps", "correct"], prompts=[])
    judge = Judge(chat, name="fake")
    assert judge.grade(ANSWERS) == [True, False, None, True]
    assert judge.name == "judge(fake)"
    prompt = next(text for text in chat.prompts if "question 1" in text)
    assert all(part in prompt for part in ("question 1", "- one\n- two", "answer 1 {x}", "CORRECT or INCORRECT"))


def test_a_judge_that_cannot_be_asked_says_so() -> None:
    class Broken(Heard):
        def _call(self, messages: list[Any], *arguments: Any, **named: Any) -> str:
            raise TimeoutError("no route to the provider\nand a long trace")

    with pytest.raises(GradingError, match=r"judge\(.*\) cannot be asked: no route to the provider\. Grades"):
        Judge(Broken(responses=[])).grade(ANSWERS)


def test_judges_that_cannot_be_set_up() -> None:
    pytest.importorskip("langchain.chat_models")
    with pytest.raises(GradingError, match="The judge 'nobody:x' cannot be set up"):
        Judge.from_name("nobody:x")


def test_without_langchain_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "langchain.chat_models", None)
    with pytest.raises(MissingExtraError, match=r"semgrad-guard\[agents\]"):
        Judge.from_name("openai:gpt")


def test_a_sentence_is_judged_by_known_facts() -> None:
    chat = Heard(responses=["CORRECT"] * 4)
    sentence = AnswerToGrade("q", "answer 0 ", ("one",), sentence=True, passage="a passage")
    assert Judge(chat).grade([sentence]) == [True]
    assert "You grade one sentence" in chat.prompts[-1]
    assert "- one\n- a passage" in chat.prompts[-1]
