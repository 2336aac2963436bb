"""A client's `stop` and `max_tokens`: they cut what is delivered, and tell nothing of what is withheld."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from semgrad_guard import Calibration, GenerationOptions, Guard, LanguageModel, Policy
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.errors import InputError
from semgrad_guard.pocket import CALIBRATION_PATH
from semgrad_guard.records import ToolCall, Verdict, digest_of
from semgrad_guard.server.answers import CUT, Answer, Cuts
from semgrad_guard.server.app import make_app
from semgrad_guard.server.assembly import assemble
from semgrad_guard.server.gate import Keys
from semgrad_guard.server.scheduler import Scheduler, token_pieces
from semgrad_guard.server.server_settings import ServerSettings
from semgrad_guard.server.service import ServedModel, Service
from tests.fixed_model import FixedModel

from .conftest import ALL, NONE, OPTIONS, Serve, asking, bodies, events, text_in
from .others import Other, behind

pytest.importorskip("sqlalchemy", reason="the extra `log` is not installed")

from semgrad_guard.decision_log.decision_log import DecisionLog

CHAT = "/v1/chat/completions"


def attempts(draft: str) -> list[dict[str, Any]]:
    """Cuts by which the draft could be read out: each length, and strings that it holds, and others."""
    inside = [draft[3:4], draft[-4:-2], draft[:1]]
    stops = [[stop] for stop in (*inside, "zzzz", draft)] + [inside]
    lengths: list[dict[str, Any]] = [{"max_tokens": count} for count in (1, 2, 3, OPTIONS.max_tokens)]
    return [
        *lengths,
        {"max_completion_tokens": 2},
        *({"stop": stop} for stop in stops),
        {"max_tokens": 7, "stop": draft[0]},
    ]


def without_ids(response: httpx.Response) -> str:
    """All that a client sees, but for the names and times of this one request."""
    seen = f"{response.status_code} {sorted(response.headers.items())} {response.text}"
    return re.sub(r'chatcmpl-\w+|dec_\w+|"created": ?\d+', "", seen)


def surer_at_first(model: LanguageModel) -> Policy:
    """A policy that withholds the whole answer, and would let its beginning through."""
    scores = {
        count: model.generate("hello", GenerationOptions(max_tokens=count)).evidence.gradients().scores.hybridgrad
        for count in (1, 2, 3, OPTIONS.max_tokens)
    }
    whole = scores.pop(OPTIONS.max_tokens)
    assert min(scores.values()) < whole
    return Policy(threshold=(min(scores.values()) + whole) / 2, on_cut="score")


@pytest.mark.parametrize("mode", ["enforce", "raise"])
async def test_no_cut_tells_anything_of_a_withheld_answer(
    serve: Serve, language_model: LanguageModel, tmp_path: Path, mode: str
) -> None:
    draft = language_model.generate("hello", OPTIONS).text
    with DecisionLog(tmp_path / "log.db") as log:
        async with serve(surer_at_first(language_model), mode=mode, service={"log": log}) as client:
            before = (await client.get("/metrics")).text
            for more in ({}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}, {"stream": True}):
                cuts = attempts(draft) if not more else attempts(draft)[::4]
                seen = {without_ids(await client.post(CHAT, json={**asking(**more), **cut})) for cut in cuts}
                assert len(seen) == 1, seen
                assert f'"{draft[:3]}' not in next(iter(seen))
            found, after = (await client.get("/v1/decisions")).json(), (await client.get("/metrics")).text
        decisions = [decision for decision, _ in log.database.decisions(limit=100)]
    for row in found["data"]:
        names = ("uncertainty", "confidence", "reason", "drift", "tokens", "seconds", "scoring_ms")
        assert [row[name] for name in names] == [None] * len(names)
    for name in ("uncertainty_sum", "score_seconds_sum", "unscored_total"):
        assert _lines(before, name) == _lines(after, name)
    assert len({decision.uncertainty for decision in decisions}) == 1  # it is always the whole draft's
    assert decisions[0].uncertainty is not None
    assert "is above the threshold" in (decisions[0].reason or "")


def _lines(metrics: str, name: str) -> list[str]:
    return [line for line in metrics.splitlines() if line.startswith(f"semgrad_guard_{name}")]


def summed(chunks: Sequence[Any]) -> list[Any]:
    """Text, end, log-probabilities and tokens of one answer, whole or in chunks."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice.get("delta", choice.get("message")).get("content") or "" for choice in choices)
    entries = [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content") or ()]
    assert "".join(entry["token"] for entry in entries) == text
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == text
    return [text, choices[-1]["finish_reason"], len(entries)]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_delivered_is_cut_as_if_it_had_been_written_so(
    serve: Serve, language_model: LanguageModel, stream: bool
) -> None:
    draft = language_model.generate("hello", OPTIONS).text
    async with serve(ALL) as guarded, serve(ALL, mode="annotate") as plain:
        for cut in ({}, *attempts(draft)):
            more = {"stream": stream, "logprobs": True}
            own, reference = [
                (await client.post(CHAT, json={**asking(**more), **cut})).text for client in (guarded, plain)
            ]
            own, reference = [events(body) if stream else [json.loads(body)] for body in (own, reference)]
            (text, finish, count), expected = summed(own), summed(reference)
            halves = "\ufffd"  # of characters: a token may end inside one
            assert [text.rstrip(halves), finish] == [expected[0].rstrip(halves), expected[1]], cut
            record = own[-1]["choices"][0]["logprobs"]["semgrad_guard"]
            assert record["digest"] == digest_of(text)
            assert (CUT in record["details"]["unfamiliar"]) is (text != draft)
            if not stream:
                assert own[0]["usage"]["completion_tokens"] == count


async def test_nothing_is_promised_of_what_a_client_cut(
    make_served: Callable[..., ServedModel], tmp_path: Path
) -> None:
    policy, model = Policy.from_calibration(Calibration.load(CALIBRATION_PATH)), LanguageModel.from_pretrained("pocket")
    log = DecisionLog(tmp_path / "log.db", text=True)
    app = make_app(Service([make_served(policy, model=model, name="pocket")], log=log))
    body = {"model": "pocket", "messages": [{"role": "user", "content": "What is the capital of Japan?"}]}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        whole = (await client.post(CHAT, json=body)).json()
        text = whole["choices"][0]["message"]["content"]
        fits = (await client.post(CHAT, json={**body, "max_tokens": 8, "stop": "zzzz"})).json()
        cut = (await client.post(CHAT, json={**body, "stop": text[2:4]})).json()
        for steered in (
            {"response_format": {"type": "json_object"}},
            {"temperature": 0.5},
            {"messages": [*body["messages"], {"role": "assistant", "content": "It is"}]},
        ):
            response = await client.post(CHAT, json={**body, **steered})
            assert (response.status_code, response.json()["error"]["code"]) == (422, "calibration_mismatch")
    log.flush()
    found = [(decision.delivered, decision.promised) for decision, _ in log.database.decisions()]
    log.close()
    assert found == [(text[:2], False), (text, True), (text, True)]
    for answer, promised in ((whole, True), (fits, True), (cut, False)):
        record = answer["semgrad_guard"]
        assert (record["promised"], record["details"]["familiar"], record["action"]) == (promised, promised, "answer")
        assert record["uncertainty"] == whole["semgrad_guard"]["uncertainty"]
    assert cut["semgrad_guard"]["details"]["unfamiliar"] == [CUT]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_upstream_is_asked_for_the_whole_answer(serve: Serve, scorer: Scheduler, stream: bool) -> None:
    draft, seen, other = "One two three.", set[str](), Other(["One", " two", " three."])
    given = behind(other, scorer)
    async with serve(ALL, **given) as delivering, serve(NONE, **given) as withholding:
        for cut in attempts(draft):
            body = asking(stream=stream, **cut)
            seen.add(without_ids(await withholding.post(CHAT, json=body)))
            found = bodies(await delivering.post(CHAT, json=body))
            whole = draft.startswith(text_in(found))
            places = [draft.find(stop) for stop in cut.get("stop", ()) if stop in draft]
            assert text_in(found) == draft[: min(places)] if places and "max_tokens" not in cut else whole, cut
            for sent in other.bodies[-2:]:
                limits = [sent.get("max_tokens"), sent.get("max_completion_tokens")]
                assert (sorted(map(bool, limits)), 8 in limits, sent.get("stop")) == ([False, True], True, None)
        assert len(seen) == 1
        response = await delivering.post(CHAT, json=asking(stop_token_ids=[3]))
        assert (response.status_code, "stop_token_ids" in response.text) == (400, True)


async def test_answers_with_other_options_are_delivered_unpromised_where_the_operator_wants_it() -> None:
    settings = ServerSettings(on_other_options="deliver", no_log=True, max_tokens=40)
    server = assemble(settings, keys=Keys(), hosts=None)
    body = {"model": "pocket", "messages": [{"role": "user", "content": "What is the capital of Japan?"}]}
    transport = httpx.ASGITransport(server.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        for steered in ({"response_format": {"type": "json_object"}}, {"temperature": 0.5}):
            response = await client.post(CHAT, json={**body, **steered})
            record = response.json()["semgrad_guard"]
            assert (response.status_code, record["promised"]) == (200, False), response.text
            if record["action"] == "answer":
                assert record["uncertainty"] <= record["threshold"]
                assert "at calibration" in record["details"]["unfamiliar"][0]
            else:
                assert (record["uncertainty"], record["details"]["unfamiliar"]) == (None, [])
        plain = (await client.post(CHAT, json=body)).json()["semgrad_guard"]
        text = {"model": "pocket", "prompt": "What is the capital of Japan?", "temperature": 0.1}  # as OpenAILike
        sampled = (await client.post("/v1/completions", json=text)).json()["semgrad_guard"]
    server.service.close()
    assert (plain["promised"], plain["details"]["unfamiliar"], sampled["promised"]) == (True, [], False)


VERDICT = Verdict.of(status="scored", action="answer", text="", estimator="x", model="m", familiar=True, promised=True)
CALL = ToolCall("f", {"a": 1})


@pytest.mark.parametrize(
    ("cuts", "text", "finish", "count"),
    [
        ({"max_tokens": 2}, "One t", "length", 2),
        ({"max_tokens": 3}, "One t", "length", 3),  # the third token ends inside a character
        ({"max_tokens": 4}, "One t\u00e9", "length", 4),
        ({"stop": ("e", "t")}, "On", "stop", 1),
        ({"stop": ("One",)}, "", "stop", 0),
        ({"stop": ("t", "zz"), "max_tokens": 4}, "One ", "stop", 2),
        ({"stop": ("\u00e9 u",), "max_tokens": 3}, "One t", "length", 3),
        ({"max_tokens": 6}, "One t\u00e9 u.", "length", 6),  # the call that follows is not complete
    ],
)
def test_where_a_text_is_cut(cuts: Any, text: str, finish: str, count: int) -> None:
    pieces = ("One", " t", "", "\u00e9", " u", ".")
    whole = "".join(pieces)
    entries = [{"token": piece, "logprob": -1.0, "bytes": list(piece.encode())} for piece in pieces]
    answer = Answer(
        text=whole,
        pieces=pieces,
        logprobs=entries,
        tool_calls=(CALL,),
        completion_tokens=20,
        finish_reason="tool_calls",
    )
    verdict, left = Cuts(**cuts).delivered(VERDICT.model_copy(update={"text": whole, "tool_calls": (CALL,)}), answer)
    assert (left.text, left.finish_reason, left.completion_tokens) == (text, finish, count)
    assert "".join(entry["token"] for entry in left.logprobs or ()) == text
    assert (verdict.text, verdict.tool_calls, left.tool_calls) == (text, (), ())
    assert (verdict.promised, verdict.details.familiar, verdict.details.unfamiliar) == (False, False, (CUT,))
    assert Cuts(max_tokens=20, stop=("zz",)).delivered(verdict, answer) == (verdict, answer)
    with pytest.raises(InputError, match="at least one character"):
        Cuts(stop=("a", ""))


def test_tokens_that_spell_another_text_are_not_counted(language_model: LanguageModel) -> None:
    generation = language_model.generate("hello", OPTIONS)
    text, ids = generation.text, generation.response_ids
    for shown in (text, text[1:], "a town"):
        assert "".join(token_pieces(language_model, shown, ids)) == shown
    tokenizer: Any = language_model.tokenizer
    own = tokenizer("Tea is old.", add_special_tokens=False)["input_ids"]
    behind, whole = (token_pieces(language_model, shown, own) for shown in ("a is old.", "Tea is old."))
    assert behind[-3:] == whole[-3:]


def test_a_logprob_of_other_tokens_is_not_delivered() -> None:
    answer = Answer(text="ab", pieces=("a", "b"), logprobs=[{"token": "ab"}], completion_tokens=2)
    for entries in ([{"token": "ab"}], [{"token": "x"}, {"token": "b"}]):
        _, left = Cuts(max_tokens=1).delivered(VERDICT, Answer(**{**vars(answer), "logprobs": entries}))
        assert (left.text, left.logprobs) == ("a", None)


async def test_a_call_is_delivered_whole_or_not_at_all(
    serve: Serve, make_language_model: Callable[..., LanguageModel]
) -> None:
    from tests.engine.chat_templates import template
    from tests.random_llama import CALLS

    parameters = {"type": "object", "properties": {"colour": {"const": "red"}}, "required": ["colour"]}
    tool = {"type": "function", "function": {"name": "paint", "parameters": parameters}}
    model = make_language_model(chat_template=template("qwen2.5"), words=CALLS, max_position_embeddings=8192)
    body = asking(tools=[tool], tool_choice="required")
    async with serve(ALL, model=model, options=GenerationOptions(max_tokens=150)) as client:
        whole = (await client.post(CHAT, json=body)).json()
        length = whole["usage"]["completion_tokens"]
        for limit, stream in itertools.product((length // 2, length), (False, True)):
            response = await client.post(CHAT, json={**body, "max_tokens": limit, "stream": stream})
            found = bodies(response)
            choices = [choice for event in found for choice in event["choices"]]
            calls = [
                call
                for choice in choices
                for call in choice.get("delta", choice.get("message")).get("tool_calls") or ()
            ]
            assert [call["function"]["name"] for call in calls] == ["paint"] * (limit == length)
            assert choices[-1]["finish_reason"] == ("tool_calls" if limit == length else "length")
            assert "tool_call>" not in response.text


# In a stream by sentence: its text is that of the whole answer, and nothing behind a cut leaves.


LONG = GenerationOptions(max_tokens=120)
WRITTEN = "Tea is old.\n\nCafé crème – 茶 is hot! So is 🫖.  Milk: good. Go."


class Written(FixedModel):
    """Its grammar allows `WRITTEN` alone."""

    def fitted(self, options: GenerationOptions | None, *prompts: Prompt) -> GenerationOptions:
        text = WRITTEN.replace("\n", "\\n")
        return replace(super().fitted(options, *prompts), max_tokens=LONG.max_tokens, grammar=f'start: "{text}"')


places = st.tuples(st.integers(0, len(WRITTEN) - 1), st.integers(1, 12)).map(lambda at: WRITTEN[at[0] : at[0] + at[1]])
"""Stop strings that the answer holds, as far as it is delivered."""
stops = st.lists(st.one_of(places, st.sampled_from(["zz", " \n\n", "\n\n\nA", "!x", ".  N", "\n\nAsk"])), max_size=3)
limits = st.one_of(st.none(), st.integers(1, 70))


@pytest.fixture(scope="module")
def written(language_model: LanguageModel) -> LanguageModel:
    return Written.like(language_model)


@pytest.fixture(scope="module")
def thresholds(written: LanguageModel) -> list[float]:
    verdict = Guard(written, ALL, by="sentence")("hello")
    assert verdict.text == WRITTEN
    own = [sentence.uncertainty or 0.0 for sentence in verdict.sentences]
    assert len(own) == 5
    return [score * 1.001 for score in sorted(own)]


async def both(served: ServedModel, **cuts: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    transport = httpx.ASGITransport(make_app(Service([served])))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        whole = await client.post(CHAT, json=asking(**cuts))
        stream = await client.post(CHAT, json=asking(stream=True, stream_options={"include_usage": True}, **cuts))
    assert (whole.status_code, stream.status_code) == (200, 200), whole.text
    return whole.json(), events(stream.text)


def test_a_stream_is_the_whole_answer(
    make_served: Callable[..., ServedModel], written: LanguageModel, thresholds: list[float]
) -> None:
    made = {
        on_doubt: [
            make_served(Policy(threshold=one, on_cut="score"), model=written, options=LONG, by_sentence=on_doubt)
            for one in (thresholds[0] / 2, *thresholds)
        ]
        for on_doubt in ("stop", "drop")
    }

    @given(on_doubt=st.sampled_from(list(made)), number=st.integers(0, len(thresholds)), stop=stops, limit=limits)
    @example(on_doubt="stop", number=len(thresholds), stop=["\n\nCa"], limit=None)  # on both sides of a border
    @example(on_doubt="drop", number=len(thresholds), stop=[], limit=5)
    @settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
    def check(on_doubt: str, number: int, stop: list[str], limit: int | None) -> None:
        cuts = {"stop": stop or None, "max_tokens": limit}
        whole, chunks = asyncio.run(both(made[on_doubt][number], **cuts))
        choice, record, last = whole["choices"][0], whole["semgrad_guard"], chunks[-2]
        deltas = [one["delta"].get("content") or "" for chunk in chunks for one in chunk["choices"]]
        assert "".join(deltas) == choice["message"]["content"]
        assert last["choices"][0]["finish_reason"] == choice["finish_reason"]
        own = last["semgrad_guard"]
        for name in ("digest", "action", "promised", "threshold"):
            assert own[name] == record[name], name
        for name in ("familiar", "unfamiliar"):
            assert own["details"][name] == record["details"][name], name
        assert chunks[-1]["usage"] == whole["usage"]
        ends = [(one["action"], one["start"], one["end"]) for one in record["sentences"]]
        seen = [(one["action"], one["start"], one["end"]) for one in own["sentences"]]
        assert seen == (ends[: len(seen)] if on_doubt == "stop" else ends)
        for chunk in chunks:
            if sentence := chunk.get("semgrad_guard_sentence"):
                assert sentence["end"] <= len(choice["message"]["content"])

    check()
