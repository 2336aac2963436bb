"""`ChatSemGrad` on its own: parameters, lazy and shared weights, streams, metadata, an unblocked event loop."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import threading
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from langchain_core.load import dumpd

from langchain_semgrad_guard import ChatSemGrad, get_verdict
from semgrad_guard import HybridGrad, LanguageModel, SemGrad
from semgrad_guard.errors import EmptyPromptError, InputError, ModelNotFoundError
from tests.steps import LIMIT

from .support import QUESTION, ROUTES, Ledger, Wire, collect, metadata_of


def test_an_answer_carries_its_score(chat: ChatSemGrad, language_model: LanguageModel) -> None:
    message = chat.invoke(QUESTION)
    generation = language_model.generate(QUESTION)
    assert generation.text.startswith(message.text)
    assert message.response_metadata["model_name"] == language_model.name
    assert message.response_metadata["model_provider"] == "semgrad_guard"
    assert message.response_metadata["finish_reason"] == "length"
    expected = language_model.score(QUESTION, message.text).hybridgrad
    assert message.response_metadata["semgrad_guard"]["uncertainty"] == pytest.approx(expected, rel=1e-4)
    assert message.usage_metadata == {
        "input_tokens": len(language_model.render(QUESTION).ids),
        "output_tokens": 12,
        "total_tokens": len(language_model.render(QUESTION).ids) + 12,
    }


def test_metadata_is_plain_json(chat: ChatSemGrad) -> None:
    for metadata in (chat.invoke(QUESTION).response_metadata, *metadata_of(list(chat.stream(QUESTION)))):
        assert json.loads(json.dumps(metadata)) == metadata


@pytest.mark.parametrize("mode", ["stream", "astream"])
def test_a_stream_ends_with_its_score(chat: ChatSemGrad, mode: str) -> None:
    whole = chat.invoke(QUESTION)
    chunks = list(chat.stream(QUESTION)) if mode == "stream" else collect(chat.astream(QUESTION))
    *pieces, last = chunks
    assert (last.content, last.chunk_position) == ("", "last")
    assert all(piece.content and not piece.response_metadata for piece in pieces)
    assert [c.usage_metadata is not None for c in chunks] == [False] * len(pieces) + [True]
    merged = chunks[0]
    for chunk in chunks[1:]:
        merged += chunk
    assert merged.text == whole.text
    assert merged.usage_metadata == whole.usage_metadata
    merged_verdict, verdict = get_verdict(merged), get_verdict(whole)
    assert merged_verdict is not None
    assert verdict is not None
    assert merged_verdict.revised(scoring_ms=None) == verdict.revised(scoring_ms=None)


def test_a_stream_that_is_left_early_stops_generating(
    chat: ChatSemGrad, language_model: LanguageModel, wire: Wire, ledger: Ledger
) -> None:
    steps: list[int] = []
    hook = language_model._model.register_forward_pre_hook(lambda *_: steps.append(1))
    chat.invoke("hello", max_tokens=1)  # a model with another hook is checked once
    steps.clear()
    stream = chat.stream(QUESTION, {"callbacks": [wire, ledger]}, max_tokens=200)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert sorted(map(str, wire.started)) == sorted(map(str, wire.ended))
    ledger.assert_balanced()
    chat.invoke("hello", max_tokens=1)  # waits until the model is free again
    hook.remove()
    assert len(steps) < 20


def test_the_event_loop_is_not_blocked(language_model: LanguageModel) -> None:
    """The model waits, at every step and before it scores, until the event loop has had a turn."""
    blocked: list[str] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()

        def wait_for_the_loop(what: str) -> None:
            turned = threading.Event()
            loop.call_soon_threadsafe(turned.set)
            if not turned.wait(LIMIT):
                blocked.append(what)
                raise RuntimeError("the event loop waits for the model")

        class Waiting(HybridGrad):
            def __call__(self, evidence: Any) -> Any:
                wait_for_the_loop("scoring")
                return super().__call__(evidence)

        hook = language_model._model.register_forward_pre_hook(lambda *_: wait_for_the_loop("generating"))
        chat = ChatSemGrad.from_model(language_model, max_tokens=12, estimator=Waiting())
        try:
            await chat.ainvoke(QUESTION)
            await chat.abatch([QUESTION, "hello"])
            async for _ in chat.astream(QUESTION):
                pass
        finally:
            hook.remove()

    asyncio.run(run())
    assert blocked == []


@pytest.mark.parametrize("name", ["ainvoke", "abatch", "astream"])
def test_weights_do_not_load_on_the_event_loop(
    tiny: str, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = shutil.copytree(tiny, tmp_path / "model")  # weights that no other test's model holds already
    threads: list[threading.Thread] = []
    original = LanguageModel.from_pretrained.__func__  # type: ignore[attr-defined]

    def from_pretrained(cls: Any, name_or_path: str, **kwargs: Any) -> LanguageModel:
        threads.append(threading.current_thread())
        return original(cls, name_or_path, **kwargs)

    monkeypatch.setattr(LanguageModel, "from_pretrained", classmethod(from_pretrained))
    ROUTES[name](ChatSemGrad(model=str(own), max_tokens=2), QUESTION, {})
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


def test_stop_strings_end_an_answer(chat: ChatSemGrad, draft: str) -> None:
    stop = draft[3:5]
    expected = draft[: draft.find(stop)]
    named = ChatSemGrad.from_model(chat.language_model, max_tokens=12, stop=[stop])
    assert named.invoke(QUESTION).text == expected
    assert named.invoke(QUESTION, stop=["~~~~~~"]).text == draft, "a call's stop strings replace the model's"
    assert chat.invoke(QUESTION, stop=[stop]).text == expected
    assert chat.bind(stop=[stop]).invoke(QUESTION).text == expected
    assert "".join(c.text for c in chat.stream(QUESTION, stop=[stop])) == expected
    assert chat.invoke(QUESTION, stop=[stop]).response_metadata["finish_reason"] == "stop"


def test_a_call_may_set_options(chat: ChatSemGrad, draft: str) -> None:
    assert chat.invoke(QUESTION, max_tokens=4).text == draft[:4]
    sampled = chat.bind(temperature=2.0, seed=5)
    assert sampled.invoke(QUESTION).text == sampled.invoke(QUESTION).text != draft


@pytest.mark.parametrize("unknown", [{"functions": []}, {"modle": "x"}, {"model": "other"}])
def test_an_option_that_would_be_ignored_is_refused(chat: ChatSemGrad, unknown: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(unknown))):
        chat.invoke(QUESTION, **unknown)
    with pytest.raises(InputError, match=next(iter(unknown))):
        chat.batch([QUESTION, "hello"], **unknown)


def test_bad_fields_are_refused(language_model: LanguageModel) -> None:
    with pytest.raises(InputError, match="temperature"):
        ChatSemGrad(temperature=-1)
    with pytest.raises(InputError, match="top_p"):
        ChatSemGrad(top_p=0)
    with pytest.raises(Exception, match="modle"):
        ChatSemGrad(modle="pocket")  # type: ignore[call-arg]
    with pytest.raises(InputError, match="dtype"):
        ChatSemGrad.from_model(language_model, dtype="float32")


def test_weights_load_at_the_first_answer_and_are_shared(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    original = LanguageModel.from_pretrained.__func__  # type: ignore[attr-defined]

    def from_pretrained(cls: Any, name_or_path: str, **kwargs: Any) -> LanguageModel:
        loaded.append(name_or_path)
        return original(cls, name_or_path, **kwargs)

    monkeypatch.setattr(LanguageModel, "from_pretrained", classmethod(from_pretrained))
    first, second = ChatSemGrad(model=tiny, max_tokens=2), ChatSemGrad(model=tiny, estimator=SemGrad(), max_tokens=2)
    copied = deepcopy(first.model_copy(update={"tags": ["nostream"]}))
    assert (repr(first), dumpd(first)["type"], first._get_ls_params()["ls_model_name"])[1:] == ("not_implemented", tiny)
    assert loaded == []
    assert [chat.invoke(QUESTION).text for chat in (first, copied, second)]
    assert loaded == [tiny]
    assert first.language_model is copied.language_model is second.language_model
    other = first.model_copy(update={"dtype": "float64"})
    assert other.language_model is not first.language_model, "a copy with other loading settings loads for itself"
    del first, second, copied, other
    gc.collect()
    ChatSemGrad(model=tiny, max_tokens=2).invoke(QUESTION)
    assert loaded == [tiny] * 3, "unused weights are let go"


def test_a_missing_model_is_named_and_its_run_closed(wire: Wire, ledger: Ledger) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        ChatSemGrad(model="./nowhere").invoke(QUESTION, {"callbacks": [wire, ledger]})
    assert sorted(map(str, wire.started)) == sorted(map(str, wire.ended))


def test_an_empty_prompt_is_refused_and_its_run_closed(chat: ChatSemGrad, wire: Wire, ledger: Ledger) -> None:
    for ask in (chat.invoke, lambda *args: list(chat.stream(*args))):
        with pytest.raises(EmptyPromptError):
            ask(" \n", {"callbacks": [wire, ledger]})
    ledger.assert_balanced()
    assert [how for how, _ in ledger.closed] == ["error", "error"]


def test_the_estimator_and_template_stand_in_the_record(language_model: LanguageModel) -> None:
    estimator = HybridGrad(tau=0.5)
    chat = ChatSemGrad.from_model(language_model, estimator=estimator, prompt_template="reading", max_tokens=4)
    record = chat.invoke(QUESTION).response_metadata["semgrad_guard"]
    assert record["details"]["settings"]["tau"] == 0.5
    assert record["details"]["prompt_template"] == f"reading@{language_model.identity.template}"


def test_it_is_not_serialised(chat: ChatSemGrad) -> None:
    assert not ChatSemGrad.is_lc_serializable()


@pytest.mark.parametrize("seconds", [-1, 0, float("nan")])
def test_a_limit_that_is_no_time_is_refused_at_once(seconds: float) -> None:
    with pytest.raises(InputError, match=r"timeout: .* is out of range: it is above 0"):
        ChatSemGrad(model="pocket", timeout=seconds)


@pytest.mark.parametrize("is_field", [False, True])
def test_the_likeliest_tokens_at_each_place(is_field: bool, chat: ChatSemGrad) -> None:
    wanted: dict[str, Any] = {"logprobs": True, "top_logprobs": 3}
    message = chat.model_copy(update=wanted).invoke(QUESTION) if is_field else chat.invoke(QUESTION, **wanted)
    for entry in message.response_metadata["logprobs"]["content"]:
        likeliest = [one["logprob"] for one in entry["top_logprobs"]]
        assert len(likeliest) == 3
        assert likeliest[0] == max(likeliest)
        assert entry["logprob"] == pytest.approx(likeliest[0], abs=1e-4), "greedy decoding takes the likeliest"
