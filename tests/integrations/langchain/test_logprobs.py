"""Log-probabilities, scores for answers from elsewhere, pipelines, profiles."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from transformers import AutoTokenizer, LlamaForCausalLM, pipeline

from langchain_semgrad_guard import ChatSemGrad, get_verdict
from langchain_semgrad_guard.chat_model import profile_of
from semgrad_guard import LanguageModel
from semgrad_guard.adapters.calls import token_texts
from semgrad_guard.engine.scoring.scorer import Scorer
from semgrad_guard.errors import EmptyResponseError, InputError

from .support import QUESTION, ROUTES, Wire


@pytest.mark.parametrize("name", ROUTES)
def test_logprobs_in_openais_shape_on_every_path(language_model: LanguageModel, name: str) -> None:
    chat = ChatSemGrad.from_model(language_model, max_tokens=12, logprobs=True)
    pieces = ROUTES[name](chat, QUESTION, {})
    found = [piece.response_metadata["logprobs"] for piece in pieces if "logprobs" in piece.response_metadata]
    assert len(found) == 1
    assert json.loads(json.dumps(found)) == found
    tokens = found[0]["content"]
    generation = language_model.generate(QUESTION, chat._writing({}))
    assert "".join(token["token"] for token in tokens) == generation.text
    assert b"".join(bytes(token["bytes"]) for token in tokens) == generation.text.encode()
    assert all(token["top_logprobs"] == [] for token in tokens)
    expected = language_model.score(QUESTION, generation.text).log_probs
    assert [token["logprob"] for token in tokens] == pytest.approx(list(expected), rel=1e-3, abs=1e-6)


def test_logprobs_cost_no_further_pass(chat: ChatSemGrad, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    original = Scorer.score

    def score(self: Scorer, *args: Any, **kwargs: Any) -> Any:
        passes.append(1)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Scorer, "score", score)
    chat.invoke(QUESTION, logprobs=True)
    assert len(passes) == 1


def test_logprobs_are_asked_for_call_by_call(chat: ChatSemGrad, cache: Any) -> None:
    wire = Wire()
    assert "logprobs" not in chat.invoke(QUESTION).response_metadata
    answer = chat.bind(logprobs=True).invoke(QUESTION, {"callbacks": [wire]})
    assert answer.response_metadata["logprobs"]["content"]
    assert wire.results[0].generations[0][0].generation_info["logprobs"] == answer.response_metadata["logprobs"]  # type: ignore[index]
    assert "logprobs" not in chat.invoke(QUESTION).response_metadata
    several = chat.batch([QUESTION, "hello"], logprobs=True)
    assert all(message.response_metadata["logprobs"]["content"] for message in several)


def test_tokens_that_end_inside_a_character(language_model: LanguageModel) -> None:
    pocket = LanguageModel.from_pretrained("pocket")
    text = "Zürich 北京 🙂 ok, and a good deal more than eight tokens of it"
    ids = pocket.tokenizer(text, add_special_tokens=False)["input_ids"]
    texts = token_texts(pocket, ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == text
    assert "" in texts, "some character takes several tokens"


def test_an_answer_from_elsewhere_gets_a_verdict(chat: ChatSemGrad, language_model: LanguageModel) -> None:
    for messages in (QUESTION, [HumanMessage(QUESTION)], [("human", QUESTION)]):
        scored = chat.score(messages, "Nobody.")
        verdict = get_verdict(scored)
        assert verdict is not None
        assert (scored.text, verdict.action, verdict.text) == ("Nobody.", "answer", "Nobody.")
        assert verdict.uncertainty == pytest.approx(language_model.score(QUESTION, "Nobody.").hybridgrad, rel=1e-4)
    given = AIMessage("Nobody.", id="7", response_metadata={"model_name": "other", "finish_reason": "stop"})
    kept = chat.score(QUESTION, given)
    assert (kept.id, kept.response_metadata["model_name"]) == ("7", "other")
    assert "semgrad_guard" not in given.response_metadata, "the caller's message stays as it is"
    logged = ChatSemGrad.from_model(language_model, logprobs=True).score(QUESTION, "Nobody.")
    assert len(logged.response_metadata["logprobs"]["content"]) == len("Nobody.")


def test_what_cannot_be_scored_is_named(chat: ChatSemGrad) -> None:
    with pytest.raises(EmptyResponseError):
        chat.score(QUESTION, " ")
    with pytest.raises(InputError, match="tool calls"):
        chat.score(QUESTION, AIMessage("", tool_calls=[{"name": "a", "args": {}, "id": "1"}]))
    with pytest.raises(InputError, match="int"):
        chat.score(QUESTION, 3)  # type: ignore[arg-type]


def test_a_pipelines_model_is_used_as_it_is(tiny: str, chat: ChatSemGrad) -> None:
    model, tokenizer = LlamaForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)
    made = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu", do_sample=True)
    piped = ChatSemGrad.from_pipeline(made, max_tokens=12)
    assert piped.invoke(QUESTION).text == chat.invoke(QUESTION).text
    with pytest.raises(InputError, match="text-generation"):
        ChatSemGrad.from_pipeline(model)


def test_a_profile_is_read_without_loading(tiny: str, language_model: LanguageModel, tmp_path: Path) -> None:
    profile = ChatSemGrad(model=tiny).profile
    assert profile is not None
    assert profile["max_input_tokens"] == 256
    assert (profile["tool_calling"], profile["structured_output"]) == (False, True)
    assert profile == profile_of(language_model) == ChatSemGrad.from_model(language_model).profile
    template = (Path(__file__).parents[2] / "fixtures" / "chat_templates" / "qwen3.jinja").read_text()
    tooled = ChatSemGrad(model=tiny, template_options={"chat_template": template}).profile
    assert tooled is not None
    assert (tooled["tool_calling"], tooled["tool_choice"]) == (True, True)
    assert ChatSemGrad(model=str(tmp_path / "nowhere")).profile is None
    own = ChatSemGrad.from_model(language_model, profile={"max_input_tokens": 7})
    assert own.profile == {"max_input_tokens": 7}
    pocket = ChatSemGrad(model="pocket")
    assert pocket.profile is not None
    assert math.isfinite(pocket.profile["max_input_tokens"])
