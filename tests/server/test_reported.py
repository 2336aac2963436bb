"""In front of a server that reports log-probabilities, without a copy of its model: whole answers, and sentences."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import httpx
import pytest

from semgrad_guard import Calibration, LanguageModel, Policy, calibrate
from semgrad_guard.adapters.calls import AnswerForm
from semgrad_guard.errors import BindingMismatchError
from semgrad_guard.guard import calibrate_fields
from semgrad_guard.guard.question import RecordedDraft
from semgrad_guard.guard.reported import ReportedScorer, prompt_of
from semgrad_guard.records import Message
from semgrad_guard.server.app import make_app
from semgrad_guard.server.assembly import assemble
from semgrad_guard.server.gate import Keys
from semgrad_guard.server.server_settings import ServerSettings
from semgrad_guard.server.service import Service
from semgrad_guard.settings import CLOSING_LINE
from tests.pairwise import in_turn

from .conftest import ALL, NONE, OPTIONS, Serve, asking, bodies, events, text_in
from .others import Other, behind, token, tokens

CHAT = "/v1/chat/completions"


@in_turn(estimator=["max_probability", "gnll", "top_entropy"], stream=[False, True])
async def test_the_scores_are_those_of_the_upstreams_own_tokens(
    serve: Serve, make_served: Any, language_model: LanguageModel, estimator: str, stream: bool
) -> None:
    other = httpx.ASGITransport(make_app(Service([make_served(ALL, mode="annotate", name="tiny")])))
    generation = language_model.generate("hello", OPTIONS)
    written, evidence = generation.text, generation.evidence
    log_probs = evidence.observed().log_probs  # pyright: ignore[reportOptionalMemberAccess]
    tops = [[math.exp(p) for _, p in one] for one in evidence.likeliest(5)]
    outcomes = [[*top, 1 - sum(top)] for top in tops]
    expected = {
        "gnll": -sum(log_probs),
        "max_probability": 1 - math.exp(sum(log_probs) / len(log_probs)),
        "top_entropy": -sum(p * math.log(p) for row in outcomes for p in row if p > 0) / len(log_probs),
    }[estimator]
    given = behind(other, estimator=estimator)
    for policy, mode, text in (
        (ALL, "enforce", written),
        (NONE, "enforce", "I don't know."),
        (NONE, "annotate", written),
    ):
        async with serve(policy, mode=mode, **given) as client:
            response = await client.post(CHAT, json=asking(stream=stream, logprobs=stream or None))
            assert response.status_code == 200, response.text
            found = bodies(response)
            assert text_in(found) == text
            logprobs = found[-1]["choices"][0]["logprobs"]
            record = logprobs["semgrad_guard"]
            assert record["uncertainty"] == (pytest.approx(expected, rel=1e-5) if text == written else None)
            assert (record["estimator"], record["details"]["settings"]) == (
                estimator,
                {"reported": True, "top_logprobs": 5},
            )
            assert (logprobs["content"] is not None) == (stream and text == written)
            assert not logprobs["content"] or logprobs["content"][0]["top_logprobs"] == []
            assert text == written or written not in response.text


GOOD = [token("Par", -0.1), token("is", -0.2)]
FIVE = [{"token": str(i), "logprob": -1.0 - i} for i in range(5)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        (None, "reports no log-probabilities"),
        ([], "reports no log-probabilities"),
        (GOOD[:1], "do not spell"),
        (GOOD[1:], "do not spell"),
        ([GOOD[0], token("is", None)], "no finite log-probability"),
        ([GOOD[0], token("is", math.nan)], "no finite log-probability"),
        ([GOOD[0], token("is", -math.inf)], "no finite log-probability"),
        ([GOOD[0], token("is", -9999.0)], "no finite log-probability"),
        ([GOOD[0], token("is", 0.5)], "no finite log-probability"),
        ([GOOD[0], token("is", True)], "no finite log-probability"),
        ([token("Par", 0.0), token("is", 0.0)], "is 0"),
        ([GOOD[0], {"token": 3, "logprob": -0.1}], "cannot be read"),
    ],
)
async def test_log_probabilities_that_are_not_whole_are_no_score(
    serve: Serve, entries: Any, reason: str, stream: bool
) -> None:
    given = behind(Other("Paris", entries))
    async with serve(ALL, mode="annotate", **given) as client:
        response = await client.post(CHAT, json=asking(stream=stream, logprobs=True))
        found = events(response.text)[-1] if stream else response.json()
        record = found["choices"][0]["logprobs"]["semgrad_guard"]
        assert (record["status"], record["uncertainty"], reason in record["reason"]) == ("unscored", None, True)
    async with serve(Policy(threshold=1e9, on_unscored="abstain", on_cut="score"), **given) as client:
        assert "Paris" not in (await client.post(CHAT, json=asking(stream=stream))).text


@pytest.mark.parametrize(
    ("text", "entries", "counted"),
    [
        ("Paris", [*GOOD, token("<|im_end|>", -3.0)], 2),
        ("Paris", [token(" Par", -0.1), token("is", -0.2)], 2),
        ("Paris", [*GOOD, token(" or", -9.0), token(" Rome", None)], 2),  # behind a stop string
        ("é!", [token("", -0.1), token("é", -0.2), token("!", -0.3)], 3),
        ("é!", [{"token": "?", "bytes": [0xC3], "logprob": -1}, {"token": "?", "bytes": [0xA9, 33], "logprob": -1}], 2),
    ],
)
def test_tokens_that_spell_the_answer(text: str, entries: Any, counted: int) -> None:
    verdict = ReportedScorer("m").verdict(text, entries, options={})
    assert (verdict.status, verdict.details.scored_tokens) == ("scored", counted)


@pytest.mark.parametrize(
    ("top", "scored"),
    [
        (FIVE, True),
        (FIVE[:4], False),
        ([*FIVE[:4], {"token": "x", "logprob": None}], False),
        ([{"token": str(i), "logprob": -0.1} for i in range(5)], False),
    ],
)
def test_the_entropy_takes_all_alternatives(top: list[Any], scored: bool) -> None:
    entries = [token("a", -0.1, top_logprobs=top)]
    verdict = ReportedScorer("m", "top_entropy").verdict("a", entries, options={})
    assert (verdict.uncertainty is not None) == scored


def test_an_empty_answer_is_no_score() -> None:
    assert ReportedScorer("m").verdict(" ", [token(" ", -1.0)], options={}).reason == "the answer is empty"


def test_reasoning_in_the_text_is_no_score() -> None:
    verdict = ReportedScorer("m").verdict("<think>a</think>b", [token("<think>a</think>b", -1.0)], options={})
    assert "holds its reasoning" in (verdict.reason or "")


def calibrated(**bound: Any) -> Calibration:
    scorer = ReportedScorer("tiny")
    prompts = [prompt_of([Message("user", f"Which city number {i} is it?")]) for i in range(200)]
    binding = scorer.binding.model_copy(update={"options": {"temperature": 0, "max_tokens": 8}, **bound})
    uncertainties = [0.001 * (i + 300) for i in range(200)]
    return calibrate(uncertainties, [True] * 200, alpha=0.2, delta=0.1, binding=binding, prompts=prompts)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("more", "promised"),
    [({}, True), ({"temperature": 0}, True), ({"temperature": 1.5}, False), ({"logit_bias": {"7": 9}}, False)],
)
async def test_a_promise_is_about_the_calibrated_options(
    serve: Serve, more: dict[str, Any], promised: bool, stream: bool
) -> None:
    other = Other("Paris", [token("Par", -0.4), token("is", -0.4)])
    given = behind(other)
    given["upstream"] = replace(given["upstream"], usual={"temperature": 0})
    async with serve(Policy.from_calibration(calibrated()), **given) as client:
        body = asking("Which city number 7 is it?", stream=stream, **more)
        body["messages"][0]["semgrad_guard"] = {"action": "answer"}  # as a client sends our message back
        response = await client.post(CHAT, json=body)
        found = events(response.text)[-1] if stream else response.json()
        record = found["choices"][0]["logprobs"]["semgrad_guard"]
        assert (record["action"], record["promised"]) == ("answer", promised), record
        sent = other.bodies[0]
        assert sent["messages"] == [{"role": "user", "content": "Which city number 7 is it?"}]
        assert (sent["temperature"], sent["logprobs"], sent["top_logprobs"]) == (more.get("temperature", 0), True, 5)


def settings(tmp_path: Any, calibration: Calibration, **given: Any) -> ServerSettings:
    path = tmp_path / "c.json"
    calibration.save(path)
    return ServerSettings(
        **{"upstream": "http://x/v1", "model": "tiny", "calibration": str(path), "no_log": True, **given}
    )


def test_a_server_without_a_scorer_is_bound_to_its_calibration(tmp_path: Any) -> None:
    def started(calibration: Calibration, **given: Any) -> Any:
        return assemble(settings(tmp_path, calibration, **given), keys=Keys([]), hosts=None)

    server = started(calibrated())
    upstream = server.service.models["tiny"].upstream
    assert upstream is not None
    assert upstream.usual == {"temperature": 0}
    server.service.close()
    with pytest.raises(BindingMismatchError, match="model is 'other'"):
        started(calibrated(), model="other")
    with pytest.raises(BindingMismatchError, match="estimator is 'gnll'"):
        started(calibrated(), estimator="gnll")
    with pytest.raises(BindingMismatchError, match="scores of a local model"):
        started(calibrated(settings={}))


def written_as(city: str, people: int) -> tuple[str, list[dict[str, Any]]]:
    """A structured answer of which the number of people is doubtful, and its tokens."""
    sure = ['{"city": "', city, '", "people": ']
    entries = (
        [token(text, -0.01) for text in sure] + [token(digit, -2.0) for digit in str(people)] + [token("}", -0.01)]
    )
    return "".join(entry["token"] for entry in entries), entries


@pytest.mark.parametrize("stream", [False, True])
async def test_a_doubtful_value_of_a_structured_answer_is_null(serve: Serve, stream: bool) -> None:
    """Whatever it was: neither its digits nor their number are in a response."""
    schema = {"properties": {"city": {"type": "string"}, "people": {"type": ["integer", "null"]}}}
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    drafts, scorer = list[tuple[RecordedDraft, Any]](), ReportedScorer("tiny")
    for number in range(80):
        text, entries = written_as(f"city {number}", number)
        verdict = scorer.verdict(text, entries, options={}, prompt=prompt_of([Message("user", "hello")]))
        parts = scorer.parts(entries, (), AnswerForm.of({"response_format": form}).structure)
        draft = RecordedDraft(verdict.revised(**parts), prompt_of([Message("user", "hello")]))
        drafts.append((draft, {"city": f"city {number}", "people": -1}))
    policy = Policy.from_calibration(calibrate_fields(drafts, alpha=0.2, delta=0.1))
    found = set[str]()
    for people in (2, 31234567):
        text, entries = written_as("Oslo", people)
        async with serve(policy, **behind(Other(text, entries))) as client:
            response = await client.post(CHAT, json=asking(stream=stream, response_format=form, logprobs=True))
        assert text_in(bodies(response)) == '{"city": "Oslo", "people": null}'
        found.add(re.sub(r'chatcmpl-\w+|"created": ?\d+', "", response.text))
    assert len(found) == 1, found


SENTENCES = ("Paris is old. ", "Rome is new. ", "Oslo is cold.")
WORDS = ("Paris", " is", " old", ".", " Rome", " is", " new", ".", " Oslo", " is", " cold", ".")
DOUBT = (*(-0.1,) * 4, *(-2.0,) * 4, *(-0.1,) * 4)
POLICY = Policy(threshold=0.5)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("on_doubt", "values", "early", "rest"),
    [
        ("stop", DOUBT, [SENTENCES[0]], [CLOSING_LINE]),
        ("drop", DOUBT, [SENTENCES[0]], [SENTENCES[2]]),
        ("stop", (*DOUBT[:4], -0.1, None, *DOUBT[6:]), [SENTENCES[0]], [CLOSING_LINE]),
        ("drop", (*DOUBT[:4], -0.1, float("nan"), *DOUBT[6:]), [SENTENCES[0]], [SENTENCES[2]]),
        ("drop", (None,) * 12, [], ["I don't know."]),
    ],
)
async def test_sentences_leave_while_the_upstream_writes(
    serve: Serve, on_doubt: Any, values: tuple[Any, ...], early: list[str], rest: list[str], apart: bool
) -> None:
    other = Other(**tokens([*zip(WORDS, values, strict=True)]), apart=apart)
    async with serve(POLICY, by_sentence=on_doubt, **behind(other, by_sentence=on_doubt)) as client:
        response = await client.post(CHAT, json=asking(stream=True))
    chunks = events(response.text)
    pieces = [text for chunk in chunks for one in chunk["choices"] if (text := one["delta"].get("content"))]
    assert pieces == [*early, *rest]  # in this form also where they leave with the end of the answer
    actions = [chunk["semgrad_guard_sentence"]["action"] for chunk in chunks if "semgrad_guard_sentence" in chunk]
    assert len(actions) == sum(piece in SENTENCES for piece in pieces)
    assert "Rome" not in response.text
    assert other.sent == (10 if on_doubt == "stop" and not apart else len(WORDS))


async def test_a_token_across_a_border_counts_for_the_later_sentence(serve: Serve) -> None:
    """It begins in a doubtful sentence, which it would make surer."""
    words, values = ("Paris is old.", " Rome is new", ". Oslo", " is cold."), (-0.1, -0.8, -1e-4, -0.1)
    given = behind(Other(**tokens([*zip(words, values, strict=True)])), by_sentence="stop")
    async with serve(POLICY, by_sentence="stop", **given) as client:
        chunks = events((await client.post(CHAT, json=asking(stream=True))).text)
    pieces = [text for chunk in chunks for one in chunk["choices"] if (text := one["delta"].get("content"))]
    assert pieces == [SENTENCES[0], CLOSING_LINE]
