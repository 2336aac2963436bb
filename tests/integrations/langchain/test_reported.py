"""`GuardedChatModel` around a model of another server, scored by the log-probabilities that come with its answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from pydantic import BaseModel

from langchain_semgrad_guard import GuardedChatModel, calibrate_chain, get_verdict
from semgrad_guard import Policy
from semgrad_guard.errors import BindingMismatchError, InputError

ALL, NONE = Policy(threshold=1e9), Policy(threshold=-1.0)


class Entry(BaseModel):
    """An entry as Ollama's package has it."""

    token: str
    logprob: float
    top_logprobs: list[Any]


class Reporting(BaseChatModel):
    """A model as the partners' packages have them: fields for log-probabilities, which stream outside the messages."""

    model: str = "remote"
    logprobs: bool | None = None
    top_logprobs: int | None = None
    temperature: float | None = 0.0
    words: tuple[str, ...] = ("Par", "is")
    values: tuple[Any, ...] = (-0.1, -0.3)
    form: Literal["object", "list", "records"] = "object"
    reason: str | None = "stop"

    @property
    def _llm_type(self) -> str:
        return "reporting"

    def _reported_info(self, begin: int, end: int) -> dict[str, Any]:
        ended = {"finish_reason": self.reason} if self.reason and end == len(self.words) else {}
        if not self.logprobs:
            return ended
        top = [{"token": str(i), "logprob": -2.0 - i} for i in range(self.top_logprobs or 0)]
        pairs = list(zip(self.words, self.values, strict=True))[begin:end]
        entries = [{"token": word, "logprob": value, "top_logprobs": top} for word, value in pairs]
        if self.form == "object":
            return {"logprobs": {"content": entries}, **ended}
        records = entries if self.form == "list" else [Entry.model_validate(entry) for entry in entries]
        return {"logprobs": records, **ended}

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        message = AIMessage("".join(self.words), response_metadata={"model_provider": "openai"})
        made = ChatGeneration(message=message, generation_info=self._reported_info(0, len(self.words)))
        return ChatResult(generations=[made])

    def _stream(
        self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        for number, word in enumerate(self.words):
            info = self._reported_info(number, number + 1)
            message = AIMessageChunk(content=word, response_metadata={"model_provider": "openai"})
            yield ChatGenerationChunk(message=message, generation_info=info)


@pytest.mark.parametrize("form", ["object", "list", "records"])
@pytest.mark.parametrize("path", ["invoke", "ainvoke", "stream", "astream"])
async def test_every_path_is_scored_and_enforced(path: str, form: Any) -> None:
    model = Reporting(form=form)

    async def answered(guard: GuardedChatModel) -> AIMessage:
        if path == "invoke":
            return guard.invoke("Where?")
        if path == "ainvoke":
            return await guard.ainvoke("Where?")
        chunks = list(guard.stream("Where?")) if path == "stream" else [c async for c in guard.astream("Where?")]
        whole = chunks[0]
        for chunk in chunks[1:]:
            whole = whole + chunk
        return whole

    for policy, mode, text in (
        (ALL, "enforce", "Paris"),
        (NONE, "enforce", "I don't know."),
        (NONE, "observe", "Paris"),
    ):
        message = await answered(GuardedChatModel(model, policy, mode=mode))
        verdict = get_verdict(message)
        assert verdict is not None
        assert (message.text, verdict.status, verdict.model) == (text, "scored", "remote")
        assert verdict.gnll == pytest.approx(0.4)
        assert verdict.options == {"temperature": 0.0}
        assert text == "Paris" or "Par" not in str(message.model_dump())
    assert model.logprobs is None  # the user's model is left as it was


@pytest.mark.parametrize(
    ("words", "values"), [(("Par", "is"), (-0.1, None)), (("Par", "is"), (-0.1, float("nan"))), (("a",), (0.0,))]
)
def test_numbers_that_are_missing_are_no_score(words: tuple[str, ...], values: tuple[Any, ...]) -> None:
    guard = GuardedChatModel(Reporting(words=words, values=values), Policy(threshold=1e9, on_unscored="abstain"))
    for message in (guard.invoke("Where?"), *list(guard.stream("Where?"))[-1:]):
        verdict = get_verdict(message)
        assert verdict is not None
        assert (verdict.status, verdict.uncertainty, verdict.action) == ("unscored", None, "abstain")


def test_a_calibration_is_bound_and_promised() -> None:
    observed = GuardedChatModel(Reporting(), NONE, mode="annotate")
    examples = [(f"Where is number {i}?", ["Paris"]) for i in range(80)]
    made = calibrate_chain(observed, examples, "contains", alpha=0.2, delta=0.1, progress=False)
    assert made.binding is not None
    assert (made.binding.model, made.binding.settings) == ("remote", {"reported": True, "top_logprobs": 5})
    policy = Policy.from_calibration(made)
    for model, promised in ((Reporting(), True), (Reporting(temperature=0.7), False)):
        verdict = get_verdict(GuardedChatModel(model, policy).invoke("Where is number 7?"))
        assert verdict is not None
        assert (verdict.action, verdict.promised) == ("answer", promised)
    with pytest.raises(BindingMismatchError, match="model is 'other'"):
        GuardedChatModel(Reporting(model="other"), policy).invoke("Where is number 7?")


def test_what_cannot_be_scored_so_is_refused() -> None:
    from semgrad_guard import HybridGrad

    with pytest.raises(InputError, match="hybridgrad needs the model itself"):
        _ = GuardedChatModel(Reporting(), ALL, estimator=HybridGrad()).invoke("Where?")


@pytest.mark.parametrize("path", ["invoke", "stream"])
def test_an_answer_that_may_have_been_given_up_is_unscored(path: str) -> None:
    guard = GuardedChatModel(Reporting(reason=None), Policy(threshold=1e9))
    message = guard.invoke("Where?") if path == "invoke" else list(guard.stream("Where?"))[-1]
    verdict = get_verdict(message)
    assert verdict is not None
    assert (verdict.status, verdict.action) == ("unscored", "abstain")
    assert verdict.reason is not None
    assert "no reason why the answer ended" in verdict.reason
