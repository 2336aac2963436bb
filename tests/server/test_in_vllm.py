"""In `vllm serve`, without vLLM: the messages between its server and its worker, our routes, and the queue."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

import httpx
from fastapi import FastAPI
from starlette.responses import JSONResponse

from semgrad_guard import GenerationOptions, HybridGrad, LanguageModel, Message, Policy
from semgrad_guard.adapters.calls import AnswerForm
from semgrad_guard.engine.prompts.thoughts import Codec
from semgrad_guard.errors import (
    AnswerCancelledError,
    BindingMismatchError,
    CalibrationError,
    InputError,
    PromptTooLongError,
    ScoringError,
    SemGradGuardError,
)
from semgrad_guard.guard import Answerer, EarlySentences, Terms, ThoughtPiece
from semgrad_guard.records import Verdict
from semgrad_guard.server.app import PATHS, make_app
from semgrad_guard.server.assembly import Server
from semgrad_guard.server.in_vllm.plugin import GuardPlugin, admission, settings_in
from semgrad_guard.server.in_vllm.queue import BegunAnswer, Part, Round, WorkerQueue
from semgrad_guard.server.in_vllm.scoring_worker import (
    ELSEWHERE,
    READ,
    SCORE,
    SEGMENTS,
    SENTENCES,
    Begun,
    Call,
    Failed,
    Opening,
    Scoring,
    ToRead,
    Written,
)
from semgrad_guard.server.scheduler import AnswerRequest, ForeignText
from semgrad_guard.server.server_settings import ServerSettings
from semgrad_guard.server.service import Service
from semgrad_guard.vllm.listener import Listener
from semgrad_guard.vllm.vllm_language_model import TwinLanguageModel
from tests.fixed_model import PIECES, TEXT
from tests.random_llama import byte_tokenizer, random_llama
from tests.thinking import ANSWERS, THOUGHTS, thinking_model
from tests.thinking import written as thought_through

from .conftest import asking

QUESTIONS = ("hello", "What is it?", "Who was the last one to leave?")


@pytest.fixture(scope="module")
def twin() -> TwinLanguageModel:
    return TwinLanguageModel.from_transformers(random_llama(), byte_tokenizer(), name="tiny")


@pytest.fixture(scope="module")
def say(twin: TwinLanguageModel) -> Callable[..., Any]:
    """`say(READ, to_read(request))`: what the worker answers to a message; it listens to no pass of vLLM's."""
    config = SimpleNamespace(structured_outputs_config=SimpleNamespace(backend="auto"))
    scoring = Scoring(twin, Opening(settings=ServerSettings(mode="annotate"), name="tiny"), config, Listener(runner()))

    return asking_of(scoring)


def asking_of(scoring: Scoring) -> Callable[..., Any]:
    """`ask(READ, to_read(request))`: its answer to a message."""

    def ask(call: Call[Any, Any], sent: Any) -> Any:
        return call.read(scoring.answered(call.name, call.sent.dump_json(sent).decode()))

    return ask


def runner() -> Any:
    """The part of vLLM's model runner that ends thoughts: no request is in its batch."""
    processors = SimpleNamespace(non_argmax_invariant=[])
    return SimpleNamespace(input_batch=SimpleNamespace(req_ids=[], req_output_token_ids=[], logitsprocs=processors))


def request_of(text: str, **fields: Any) -> AnswerRequest:
    options = GenerationOptions(max_tokens=12, stop=fields.pop("stop", ()), seed=3)
    return AnswerRequest(conversation=(Message(role="user", content=text),), options=options, **fields)


def to_read(request: AnswerRequest, name: str = "0") -> ToRead:
    return ToRead(request=request, names=(name,))


def written_by_vllm(tokens: Sequence[int], name: str = "0") -> Written:
    return Written(names=(name,), answers=(tuple(tokens),))


def tokens(model: LanguageModel, request: AnswerRequest) -> tuple[int, ...]:
    """The tokens of an answer as an engine hands them over: past a stop string's beginning, with the end token."""
    options = GenerationOptions(max_tokens=12)
    return tuple(model.generate(request.conversation, options).response_ids)


def test_tokens_are_scored_as_one_process_scores_them(twin: TwinLanguageModel, say: Callable[..., Any]) -> None:
    """Several requests in one message: each draft is that of the whole answer, generated and scored here."""
    requests = [request_of(text) for text in QUESTIONS]
    whole = twin.generate(QUESTIONS[0], GenerationOptions(max_tokens=12))
    stop = whole.text[len(whole.text) // 2 :][:1]
    requests.append(request_of(QUESTIONS[0], stop=(stop,)))
    for number, request in enumerate(requests):
        read = say(READ, to_read(request, str(number)))
        assert read.ids == tuple(twin.render(request.conversation).ids)
        assert read.end_tokens == twin.end_tokens
    written = [written_by_vllm(tokens(twin, one), str(number)) for number, one in enumerate(requests)]
    found = say(SCORE, written)
    for request, [draft] in zip(requests, found, strict=True):
        alone = twin.generate(request.conversation, request.options)
        assert draft.verdict.text == draft.answer.text == alone.text
        assert draft.answer.finish_reason == alone.finish_reason
        assert draft.verdict.uncertainty == pytest.approx(HybridGrad()(alone.evidence).uncertainty, rel=1e-4)
        assert draft.prompt == alone.prompt.form
        assert draft.verdict.details.fingerprint.startswith("vllm-")


async def written_in_parts(
    ask: Callable[..., Any], scores: Round[Any, Any], ids: Sequence[int], name: str, let: EarlySentences, codec: Codec
) -> Verdict:
    """The undecided verdict on an answer of these tokens, whose sentences leave while it is written."""
    options, part = GenerationOptions(max_tokens=len(ids)), Part(name, let, scores)
    read = ask(READ, to_read(replace(request_of(QUESTIONS[0]), options=options), name))
    answer = BegunAnswer(codec, read, options, part.open.add)
    for token in ids:
        answer.add([token])
        if not part.goes_on(answer):
            break
        for _ in range(4):
            await asyncio.sleep(0)
    await part.end()
    sent = (tuple(answer.ids[: part.tokens]),)
    [[draft]] = ask(SCORE, [Written(names=(name,), answers=sent, stopped=part.tokens is not None, known=let.known)])
    return draft.verdict


async def test_sentences_leave_while_their_answer_is_written(twin: TwinLanguageModel) -> None:
    """Of several answers at once; one ends behind a doubtful sentence, and one whose reader has left hands on none."""
    opening = Opening(settings=ServerSettings(threshold=1.0, by="sentence"), name="tiny")
    ask = asking_of(Scoring(twin, opening, None, Listener(runner())))
    ids = [*twin.tokenizer(TEXT, add_special_tokens=False)["input_ids"], twin.end_tokens[0]]
    expected = Answerer(twin, HybridGrad(), by_sentence="stop").scored(QUESTIONS[0], TEXT).verdict
    first, second, third = (one.uncertainty or 0.0 for one in expected.sentences)
    assert second > first
    rounds = list[int]()

    async def score(begun: list[Begun]) -> Any:
        rounds.append(len(begun))
        await asyncio.sleep(0)
        return ask(SENTENCES, begun)

    def gone(_: object) -> None:
        raise AnswerCancelledError("the reader has left")

    scores, high = Round[Any, Any](score), max(first, second, third) * 1.001
    pieces = [list[Any]() for _ in range(3)]
    wanted = [high, high, (first + second) / 2]
    answers = [*((at, own.append) for at, own in zip(wanted, pieces, strict=True)), (high, gone)]
    whole, other, cut, left = await asyncio.gather(
        *(
            written_in_parts(ask, scores, ids, str(number), EarlySentences(terms_of(at), hear), twin)
            for number, (at, hear) in enumerate(answers)
        ),
        return_exceptions=True,
    )
    for verdict, own in ((whole, pieces[0]), (other, pieces[1])):
        assert isinstance(verdict, Verdict)
        assert [piece.text for piece in own] == list(PIECES[:2])  # the last one comes with the answer's end
        assert verdict.text == TEXT
        for mine, its in zip(verdict.sentences, expected.sentences, strict=True):
            assert (mine.start, mine.end, mine.tokens) == (its.start, its.end, its.tokens)
            assert mine.uncertainty == pytest.approx(its.uncertainty, rel=1e-4)
    assert isinstance(cut, Verdict)
    assert ([piece.text for piece in pieces[2]], cut.text) == ([PIECES[0]], "".join(PIECES[:2]).rstrip())
    assert cut.details.cut is None  # by no limit
    assert isinstance(left, AnswerCancelledError)
    assert max(rounds) > 1  # scored together


def terms_of(threshold: float) -> Terms:
    return Terms(policy=Policy(threshold=threshold))


def test_a_listener_stays_in_its_process() -> None:
    request = request_of("hello", on_piece=print)
    assert READ.sent.validate_json(READ.sent.dump_json(to_read(request))).request == request_of("hello")


def test_one_request_that_fails_is_nobody_elses(twin: TwinLanguageModel, say: Callable[..., Any]) -> None:
    long = request_of("word " * 30, prompt_limit=5)
    with pytest.raises(PromptTooLongError, match="this server takes 5"):
        say(READ, to_read(long))
    form = AnswerForm.of({"response_format": {"type": "json_object"}})
    with pytest.raises(InputError, match="backend guidance"):
        say(READ, to_read(request_of("hello", form=form)))
    say(READ, to_read(request_of(QUESTIONS[0])))
    bad, [draft] = say(SCORE, [written_by_vllm((1, 2), "never read"), written_by_vllm((5, 6))])
    assert isinstance(bad.error(), ScoringError)
    assert draft.verdict.uncertainty is not None


def test_texts_from_elsewhere(twin: TwinLanguageModel, say: Callable[..., Any]) -> None:
    foreign = ForeignText(conversation=(Message(role="user", content="hello"),), text="So it is. Or not.")
    assert say(ELSEWHERE, foreign).verdict.uncertainty == pytest.approx(twin.score("hello", foreign.text).hybridgrad)
    reason = say(ELSEWHERE, ForeignText(text="x", reason="because")).verdict
    assert (reason.status, reason.reason) == ("unscored", "because")
    parts = say(SEGMENTS, foreign)
    assert [part["text"] for part in parts] == ["So it is. ", "Or not."]


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (InputError("say more"), InputError, "say more"),
        (BindingMismatchError(("a: 1, not 2",)), CalibrationError, "a: 1, not 2"),
        (ValueError("the secret question"), SemGradGuardError, "the worker failed"),
    ],
)
def test_errors_keep_their_kind(error: Exception, kind: type[Exception], says: str) -> None:
    """Ours also keep their words; the words of others may hold the question."""

    def work(_: ToRead) -> Any:
        raise error

    answer = READ.answered(READ.sent.dump_json(to_read(request_of("x"))).decode(), work)
    with pytest.raises(kind, match=says):
        READ.read(answer)
    assert "secret" not in answer


def written(path: Path, settings: dict[str, Any]) -> str:
    path.write_text(json.dumps(settings))
    return str(path)


async def test_only_routes_that_write_nothing_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"mode": "annotate"}
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
    assert [route.path for route in app.router.routes] == ["/health", "/v1/semgrad-guard", "/v1"]  # type: ignore[attr-defined]


class Asking:
    """What asks for vLLM's key: below these prefixes, as in vLLM 0.32; its newest source adds those of the routes."""

    def __init__(self, app: Any, routes: Any = None) -> None:
        self._app, self._routes = app, routes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        guarded = ["/v1", "/v2", "/inference", "/cohere"]
        guarded += [route.path.partition("{")[0] for route in self._routes or () if route.path not in ("", "/health")]
        key = dict(scope["headers"]).get(b"authorization")
        if key != f"Bearer {KEY}".encode() and scope["path"].removeprefix(scope["root_path"]).startswith(
            tuple(guarded)
        ):
            await JSONResponse({}, 401)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


KEY = "token-abc123"
"""One that vLLM takes, and that would be too short for a key of ours."""


@pytest.mark.parametrize("asks", [None, "0.32", "newest"])
@pytest.mark.parametrize("root", ["", "/behind/a/proxy"])
async def test_every_route_is_behind_vllms_key(
    make_served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: str | None, root: str
) -> None:
    """By vLLM's own authentication, and by ours alone; no path outside of /v1 is ours."""
    monkeypatch.setenv("SEMGRAD_GUARD_SETTINGS", written(tmp_path / "guard.json", {"mode": "annotate"}))
    app, plugin = FastAPI(), GuardPlugin()
    app.root_path = root
    app.add_api_route("/health", lambda: "well")
    plugin.attach_router(app)
    if asks is not None:
        app.add_middleware(Asking, routes=app.router.routes if asks == "newest" else None)
    service = Service([make_served(Policy(threshold=1e9, on_cut="score"))])
    keys, hosts = admission(plugin._settings, SimpleNamespace(host=None, api_key=[KEY], uds=None))
    plugin._server = Server(make_app(service, keys=keys, hosts=hosts), service)
    paths = [route.path for route in plugin._server.app.routes]
    without = set() if asks else {f"/v1/semgrad-guard{path}" for path in (*PATHS, "/healthz", "/readyz")}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url=f"http://evil.example{root}") as client:
        assert (await client.get("/health")).status_code == 200
        for path in (*paths, *(f"/v1/semgrad-guard{path}" for path in paths), "/v1/", "/v1/nowhere"):
            for method in ("GET", "POST"):
                status = (await client.request(method, path)).status_code
                expected = {401} if path.startswith("/v1") else {404, 401} if asks == "newest" else {404}
                assert status in expected or path in without, (method, path)
        client.headers["authorization"] = f"Bearer {KEY}"
        for prefix in ("", "/v1/semgrad-guard"):
            assert (await client.get(f"{prefix}/v1/models")).json()["data"][0]["id"] == "tiny"
            answer = await client.post(f"{prefix}/v1/chat/completions", json=asking())
            assert answer.json()["semgrad_guard"]["action"] == "answer"
        for path in ("/", "/decisions", "/metrics", "/healthz", "/v1/models"):
            assert (await client.get(f"/v1/semgrad-guard{path}")).status_code == 200


@pytest.mark.parametrize("host", [None, "", "0.0.0.0", "::", "192.0.2.1", "example.org"])  # noqa: S104
def test_without_a_key_only_this_machine_is_served(host: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    settings = ServerSettings(allow_host=("guard.example.org",))

    def admitted(**options: Any) -> Any:
        return admission(settings, SimpleNamespace(**{"host": host, "api_key": None, "uds": None, **options}))

    for without in ({}, {"api_key": [""]}, {"api_key": []}):
        with pytest.raises(InputError, match="--api-key KEY"):
            admitted(**without)
    for local in ({"host": "127.0.0.1"}, {"host": "::1"}, {"uds": "/tmp/socket"}):  # noqa: S108
        keys, hosts = admitted(**local)
        assert not keys
        assert hosts == {"localhost", "127.0.0.1", "::1", "guard.example.org"}
    monkeypatch.setenv("VLLM_API_KEY", "of-the-environment")
    assert admitted()[0].open_to("Bearer of-the-environment")
    assert not admitted(api_key=[KEY])[0].open_to("Bearer of-the-environment")  # vLLM's own order
    monkeypatch.delenv("VLLM_API_KEY")
    monkeypatch.setenv("SEMGRAD_GUARD_API_KEY", "k" * 16)
    assert all(admitted(api_key=[KEY])[0].open_to(f"Bearer {key}") for key in (KEY, "k" * 16))
    assert admitted()[1] == {"localhost", "127.0.0.1", "::1", "guard.example.org", (host or "0.0.0.0")}  # noqa: S104


async def test_the_server_does_not_begin_without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEMGRAD_GUARD_SETTINGS", written(tmp_path / "guard.json", {"mode": "annotate"}))
    plugin = GuardPlugin()
    plugin.attach_router(FastAPI())
    args = SimpleNamespace(host=None, api_key=None, uds=None, served_model_name=None, model="x")
    with pytest.raises(InputError, match="takes an API key"):
        await plugin.init_state(object(), None, args)


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
    """vLLM continues unguarded where a plugin cannot be imported: it must not need what may be missing."""
    code = (
        "import sys\n"
        "for each in ('sqlalchemy', 'prometheus_client', 'httpx', 'starlette', 'transformers'):\n"
        "    sys.modules[each] = None\n"
        "from semgrad_guard.server.in_vllm.plugin import GuardPlugin, register\n"
        "register()\n"
        "GuardPlugin()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_reasoning_is_told_apart_where_vllm_writes() -> None:
    """By the same rule where it is shown, token by token, and where it is scored."""
    thinker, question = thinking_model(), next(iter(ANSWERS))
    twin = TwinLanguageModel.from_transformers(thinker._model, thinker.tokenizer, name="thinker")
    opening = Opening(settings=ServerSettings(mode="annotate"), name="thinker")
    scoring = Scoring(twin, opening, SimpleNamespace(), Listener(runner()))
    request = replace(request_of(question), options=GenerationOptions(max_tokens=64))
    ask = asking_of(scoring)
    read = ask(READ, to_read(request))
    (ids,) = thinker.tokenizer([f"{thought_through(question)}<|im_end|>"], add_special_tokens=False)["input_ids"]
    pieces = list[Any]()
    answer = BegunAnswer(thinker, read, read.options[0], pieces.append)
    for token in ids:
        answer.add([token])
    assert "".join(piece.text for piece in pieces if isinstance(piece, ThoughtPiece)) == THOUGHTS[question]
    assert "".join(piece for piece in pieces if isinstance(piece, str)) == ANSWERS[question]
    assert len(pieces) > 2
    [[draft]] = ask(SCORE, [written_by_vllm(answer.ids)])
    assert (draft.verdict.status, draft.verdict.text, draft.verdict.details.reasoning) == (
        "scored",
        ANSWERS[question],
        THOUGHTS[question],
    )


def test_a_thought_is_ended_where_vllm_writes() -> None:
    """Its tokens are forced in vLLM's batch from the budget on, until the answer is scored."""
    thinker, question = thinking_model(), next(iter(ANSWERS))
    twin = TwinLanguageModel.from_transformers(thinker._model, thinker.tokenizer, name="thinker")
    of_vllm, options = runner(), GenerationOptions(max_tokens=64, max_thinking_tokens=4)
    listener, opening = Listener(of_vllm), Opening(settings=ServerSettings(mode="annotate"), name="thinker")
    scoring = Scoring(twin, opening, SimpleNamespace(speculative_config=None), listener)
    request = replace(request_of(question), options=options)
    READ.read(scoring.answered(READ.name, READ.sent.dump_json(to_read(request)).decode()))
    usual, closing = thinker.generate(question).preceding_ids, thinker.encode("\n</think>\n\n")
    ids = list(usual[:3])
    of_vllm.input_batch.req_ids = ["other", f"{to_read(request).names[0]}-0a1b"]
    of_vllm.input_batch.req_output_token_ids = [list(usual[:4]), ids]
    chosen = usual[3]
    for _ in range(len(closing) + 3):
        logits = torch.zeros(2, 500)
        logits[:, chosen] = 1.0
        other, mine = listener.apply(logits).argmax(-1).tolist()
        assert other == chosen
        ids.append(mine)
    assert tuple(ids) == (*usual[:4], *closing, chosen, chosen)
    asking_of(scoring)(SCORE, [written_by_vllm(ids)])
    assert not listener.answers
    guessing = Scoring(twin, opening, SimpleNamespace(speculative_config=object()), listener)
    with pytest.raises(InputError, match="speculative decoding"):
        READ.read(guessing.answered(READ.name, READ.sent.dump_json(to_read(request)).decode()))


# The queue in vLLM's server: no caller waits for ever, and the worker learns of each that has left.


class Client:
    """vLLM's engine, whose worker cannot be reached at first, and then refuses every request."""

    errored = False

    def __init__(self, unreachable: int) -> None:
        self.sent: list[dict[str, Any]] = []
        self._unreachable = unreachable

    async def collective_rpc(self, _: str, *, args: tuple[str, str]) -> list[str]:
        name, payload = args
        assert name == READ.name
        self.sent.append(json.loads(payload))
        if len(self.sent) <= self._unreachable:
            raise ConnectionError

        def refused(_: Any) -> Any:
            raise PromptTooLongError("the prompt is too long")

        return [READ.answered(payload, refused)]


async def test_names_of_abandoned_answers_are_sent_until_the_worker_has_them() -> None:
    client = Client(unreachable=2)
    queue = WorkerQueue(client, "tiny", HybridGrad(), Codec(byte_tokenizer()), limit=8)
    message = Message(role="user", content="hello")
    request = AnswerRequest(conversation=(message,), options=GenerationOptions(max_tokens=4))
    for error in (InputError, InputError, PromptTooLongError, PromptTooLongError):
        with pytest.raises(error):
            await queue.answer(request)
    names = [tuple(sent["names"]) for sent in client.sent]
    assert [set(sent["abandoned"]) for sent in client.sent[:3]] == [set(), {*names[0]}, {*names[0], *names[1]}]
    assert set(names[2]) <= set(client.sent[3]["abandoned"])
    assert queue.depth == 0


@pytest.mark.parametrize("results", [(), ("one",), ("one", "two", "three")])
async def test_a_reply_with_too_few_or_too_many_results_fails_every_caller(results: Sequence[str]) -> None:
    async def score(sent: list[str]) -> Sequence[str | Failed]:
        return results if len(sent) == 2 else ["later"]

    waiting = Round(score)
    found = await asyncio.wait_for(
        asyncio.gather(waiting.result("a"), waiting.result("b"), return_exceptions=True), timeout=60
    )
    assert [type(one) for one in found] == [ScoringError] * 2
    assert await waiting.result("c") == "later"
