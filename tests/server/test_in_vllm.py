"""What vLLM's server and its worker say to each other, and what the plugin leaves of vLLM's routes; without vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

import httpx
from fastapi import FastAPI

from semgrad_guard import GenerationOptions, HybridGrad, LanguageModel, Message
from semgrad_guard.adapters.answer_form import AnswerForm
from semgrad_guard.errors import (
    BindingMismatchError,
    CalibrationError,
    InputError,
    PromptTooLongError,
    SemGradGuardError,
)
from semgrad_guard.server.in_vllm.messages import (
    ELSEWHERE,
    READ,
    SCORE,
    SEGMENTS,
    Asked,
    Call,
    Elsewhere,
    Opening,
    ToRead,
    Written,
)
from semgrad_guard.server.in_vllm.plugin import GuardPlugin, settings_in
from semgrad_guard.server.in_vllm.worker import Scoring
from semgrad_guard.server.settings import ServerSettings
from semgrad_guard.vllm.language_model import TwinLanguageModel
from tests.conftest import byte_tokenizer, random_llama

QUESTIONS = ("hello", "What is it?", "Who was the last one to leave?")


@pytest.fixture(scope="module")
def twin() -> TwinLanguageModel:
    return TwinLanguageModel.from_transformers(random_llama(), byte_tokenizer(), name="tiny")


@pytest.fixture(scope="module")
def say(twin: TwinLanguageModel) -> Callable[..., Any]:
    """`say(READ, to_read(request))`: what the worker answers to a message; it listens to no pass of vLLM's."""
    config = SimpleNamespace(structured_outputs_config=SimpleNamespace(backend="auto"))
    scoring = Scoring(twin, Opening(settings=ServerSettings(mode="annotate"), name="tiny"), config, None)

    def ask(call: Call[Any, Any], sent: Any) -> Any:
        return call.read(scoring.answered(call.name, call.sent.dump_json(sent).decode()))

    return ask


def asked(text: str, **given: Any) -> Asked:
    plain = {"form": AnswerForm(), "count": 1, "logprobs": False, "top_logprobs": 0, "prompt_limit": None}
    options = GenerationOptions(max_tokens=12, stop=given.pop("stop", ()), seed=3)
    return Asked(conversation=(Message(role="user", content=text),), options=options, **{**plain, **given})


def to_read(request: Asked) -> ToRead:
    return ToRead(asked=request, names=("0",))


def written_by_vllm(request: Asked, tokens: tuple[int, ...]) -> Written:
    return Written(asked=request, names=("0",), answers=(tokens,))


def tokens(model: LanguageModel, request: Asked) -> tuple[int, ...]:
    """The tokens of an answer as an engine hands them over: past a stop string's beginning, with the end token."""
    options = GenerationOptions(max_tokens=12)
    return tuple(model.generate(request.conversation, options).response_ids)


def test_tokens_are_scored_as_one_process_scores_them(twin: TwinLanguageModel, say: Callable[..., Any]) -> None:
    """Several requests in one message: each draft is that of the whole answer, generated and scored here."""
    requests = [asked(text) for text in QUESTIONS]
    for request, read in ((each, say(READ, to_read(each))) for each in requests):
        assert read.ids == tuple(twin.render(request.conversation).ids)
        assert read.end_tokens == twin.end_tokens
    whole = twin.generate(QUESTIONS[0], GenerationOptions(max_tokens=12))
    stop = whole.text[len(whole.text) // 2 :][:1]
    requests.append(asked(QUESTIONS[0], stop=(stop,)))
    found = say(SCORE, [written_by_vllm(each, tokens(twin, each)) for each in requests])
    for request, [draft] in zip(requests, found, strict=True):
        alone = twin.generate(request.conversation, request.options)
        assert draft.verdict.text == draft.answer.text == alone.text
        assert draft.answer.finish_reason == alone.finish_reason
        assert draft.verdict.uncertainty == pytest.approx(HybridGrad()(alone.evidence).uncertainty, rel=1e-4)
        assert draft.prompt == alone.prompt.form
        assert draft.verdict.fingerprint.startswith("vllm-")


def test_one_request_that_fails_is_nobody_elses(twin: TwinLanguageModel, say: Callable[..., Any]) -> None:
    long = asked("word " * 30, prompt_limit=5)
    with pytest.raises(PromptTooLongError, match="this server takes 5"):
        say(READ, to_read(long))
    form = AnswerForm.of({"response_format": {"type": "json_object"}})
    with pytest.raises(InputError, match="backend guidance"):
        say(READ, to_read(asked("hello", form=form)))
    good = asked(QUESTIONS[0])
    bad, [draft] = say(SCORE, [written_by_vllm(long, (1, 2)), written_by_vllm(good, (5, 6))])
    assert isinstance(bad.error(), PromptTooLongError)
    assert draft.verdict.uncertainty is not None


def test_texts_from_elsewhere(twin: TwinLanguageModel, say: Callable[..., Any]) -> None:
    said = Elsewhere(conversation=(Message(role="user", content="hello"),), text="So it is. Or not.")
    assert say(ELSEWHERE, said).verdict.uncertainty == pytest.approx(twin.score("hello", said.text).hybridgrad)
    reason = say(ELSEWHERE, Elsewhere(text="x", reason="because")).verdict
    assert (reason.status, reason.reason) == ("unscored", "because")
    parts = say(SEGMENTS, Elsewhere(conversation=said.conversation, text=said.text, by="sentence"))
    assert [part[0] for part in parts] == ["So it is. ", "Or not."]


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (InputError("say more"), InputError, "say more"),
        (BindingMismatchError(("a: 1, not 2",)), CalibrationError, "a: 1, not 2"),
        (ValueError("the secret question"), SemGradGuardError, "the worker failed"),
    ],
)
def test_errors_keep_their_kind(error: Exception, kind: type[Exception], says: str) -> None:
    """Ours also keep their words; the words of others may hold what was asked."""

    def work(_: ToRead) -> Any:
        raise error

    answer = READ.answered(READ.sent.dump_json(to_read(asked("x"))).decode(), work)
    with pytest.raises(kind, match=says):
        READ.read(answer)
    assert "secret" not in answer


def written(path: Path, settings: dict[str, Any]) -> str:
    path.write_text(json.dumps(settings))
    return str(path)


async def test_only_routes_that_write_nothing_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"mode": "annotate", "allow_unguarded": []}
    monkeypatch.setenv("SEMGRAD_GUARD_SETTINGS", written(tmp_path / "guard.json", settings))
    app = FastAPI()

    async def theirs() -> str:
        return "vLLM's"

    for path in ("/health", "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/new/route", "/generate"):
        app.add_api_route(path, theirs, methods=["GET", "POST"])
    plugin = GuardPlugin()
    plugin.attach_router(app)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        assert (await client.get("/health")).json() == "vLLM's"
        with pytest.raises(InputError, match="not begun"):
            await client.post("/v1/chat/completions", json={})
    assert [route.path for route in app.router.routes] == ["/health", "/semgrad-guard", ""]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (None, "names no file"),
        ({"model": "x"}, "leave model out"),
        ({"dtype": "float16", "device": "cuda"}, "leave device, dtype out"),
        ({"threshold": "much"}, "threshold"),
        ({"thresholds": 1}, "thresholds"),
    ],
)
def test_settings_that_cannot_be_read(tmp_path: Path, settings: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        settings_in(None if settings is None else written(tmp_path / "guard.json", settings))
    with pytest.raises(InputError, match="cannot be read"):
        settings_in(str(tmp_path / "nowhere.json"))


def test_the_plugins_module_can_hardly_fail() -> None:
    """vLLM goes on unguarded where a plugin cannot be imported: it must not need what may be missing."""
    code = (
        "import sys\n"
        "for each in ('sqlalchemy', 'prometheus_client', 'httpx', 'fastapi', 'transformers'):\n"
        "    sys.modules[each] = None\n"
        "from semgrad_guard.server.in_vllm.plugin import GuardPlugin, register\n"
        "register()\n"
        "GuardPlugin()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
