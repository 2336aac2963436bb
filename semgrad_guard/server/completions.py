"""Chat completions, whole or as a stream of chunks, each answer with its verdict.

The verdict is in `choices[i].logprobs.semgrad_guard`, which every client lets through, and at the top level as
`semgrad_guard` (a list where there are several answers). The text that replaces a withheld answer has no
log-probabilities and no tokens; where the answer was to be JSON it is a `refusal`, as in OpenAI's own answers.

Why: docs/adr/0141-verdict-in-logprobs.md
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from semgrad_guard.guard import Outcome
from semgrad_guard.records import Verdict
from semgrad_guard.server.answers import (
    ACTION_HEADER,
    ENFORCED_HEADER,
    ID_HEADER,
    KEY,
    Answer,
    public_record,
    tool_call_fields,
)
from semgrad_guard.server.service import Call

Json = dict[str, Any]


def completion(call: Call, outcomes: Sequence[Outcome[Answer]], *, request_id: str) -> Json:
    """A whole completion."""
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", **_message(call, outcome)},
            "finish_reason": _finish(outcome),
            "logprobs": _logprobs(outcome),
        }
        for index, outcome in enumerate(outcomes)
    ]
    return {
        **_head(call, request_id, "chat.completion"),
        "choices": choices,
        "usage": usage(call, outcomes),
        KEY: _together(outcomes),
    }


def headers(outcomes: Sequence[Outcome[Answer]]) -> dict[str, str]:
    """The headers of an answer that is complete before it is sent."""
    fields = {ACTION_HEADER: ",".join(outcome.verdict.action for outcome in outcomes)}
    if not all(outcome.verdict.enforced for outcome in outcomes):
        fields[ENFORCED_HEADER] = "false"
    ids = [outcome.verdict.decision_id for outcome in outcomes if outcome.verdict.decision_id is not None]
    return {**fields, ID_HEADER: ",".join(ids)} if ids else fields


async def chunks(call: Call, steps: AsyncIterator[str | Outcome[Answer]], *, request_id: str) -> AsyncIterator[Json]:
    """The chunks of a stream."""
    head, sent, outcomes = _head(call, request_id, "chat.completion.chunk"), "", list[Outcome[Answer]]()
    async for step in steps:
        index = len(outcomes)
        if not sent:
            yield _chunk(head, index, {"role": "assistant", "content": ""})
        if isinstance(step, str):
            sent += step
            yield _chunk(head, index, {"content": step})
            continue
        outcomes.append(step)
        for delta in _rest(call, step, sent):
            yield _chunk(head, index, delta)
        record = {KEY: public_record(step.verdict)}
        yield {**_chunk(head, index, {}, finish=_finish(step), logprobs=_logprobs(step)), **record}
        sent = ""
    if call.request.with_usage:
        yield {**head, "choices": [], "usage": usage(call, outcomes)}


def usage(call: Call, outcomes: Sequence[Outcome[Answer]]) -> Json:
    """The tokens of the prompt, and of the delivered answers.

    Where another server counts several answers together, and some were withheld, or does not count, the scored tokens
    are counted. Its count of a withheld answer's prompt is left out: it need not be about the prompt alone.
    """
    delivered = [(outcome.answer, outcome.verdict) for outcome in outcomes if outcome.answer is not None]
    together = {answer.together for answer, _ in delivered}
    if len(delivered) == len(outcomes) and len(together) == 1 and (whole := together.pop()) is not None:
        written = whole
    else:
        written = sum(_written(answer, verdict) for answer, verdict in delivered)
    shown = call.served.upstream is None or all(outcome.verdict.shows_draft for outcome in outcomes)
    read = call.prompt_tokens if shown else 0
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _written(answer: Answer, verdict: Verdict) -> int:
    if answer.completion_tokens is not None:
        return answer.completion_tokens
    return 0 if verdict.escalated is not None else verdict.scored_tokens  # after an escalation they are the draft's


def _head(call: Call, request_id: str, kind: str) -> Json:
    return {
        "id": f"chatcmpl-{request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": call.served.name,
        "system_fingerprint": None,
    }


def _chunk(head: Json, index: int, delta: Json, *, finish: str | None = None, logprobs: Json | None = None) -> Json:
    choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
    return {**head, "choices": [choice]}


def _message(call: Call, outcome: Outcome[Answer]) -> Json:
    if outcome.answer is None and call.request.wants_json:
        return {"content": None, "refusal": outcome.verdict.text}
    calls = _calls(outcome)
    content = outcome.verdict.text or (None if calls else "")
    return {"content": content, "refusal": None, **_reasoning(outcome), **({"tool_calls": calls} if calls else {})}


def _rest(call: Call, outcome: Outcome[Answer], sent: str) -> list[Json]:
    """The parts of an outcome that have not been sent in pieces."""
    if outcome.answer is None and call.request.wants_json:
        return [{"refusal": outcome.verdict.text}]
    text = outcome.verdict.text
    rest = text.removeprefix(sent) if text.startswith(sent) else ""  # another server's reasoning went out before it
    calls = [{"index": index, **call} for index, call in enumerate(_calls(outcome))]
    thought = _reasoning(outcome)
    return [
        *([thought] if thought else []),
        *([{"content": rest}] if rest else []),
        *([{"tool_calls": calls}] if calls else []),
    ]


def _reasoning(outcome: Outcome[Answer]) -> Json:
    """The reasoning before a delivered text, under the name that most servers use; withheld where the text is."""
    if outcome.answer is None:
        return {}
    thought = outcome.verdict.reasoning if outcome.verdict.escalated is None else outcome.answer.reasoning
    return {"reasoning_content": thought} if thought else {}


def _calls(outcome: Outcome[Answer]) -> list[Json]:
    return [] if outcome.answer is None else [tool_call_fields(call) for call in outcome.answer.tool_calls]


def _finish(outcome: Outcome[Answer]) -> str:
    return "stop" if outcome.answer is None else outcome.answer.finish_reason


def _logprobs(outcome: Outcome[Answer]) -> Json:
    content = None if outcome.answer is None else outcome.answer.logprobs
    return {"content": content, "refusal": None, KEY: public_record(outcome.verdict)}


def _together(outcomes: Sequence[Outcome[Answer]]) -> Json | list[Json]:
    records = [public_record(outcome.verdict) for outcome in outcomes]
    return records[0] if len(records) == 1 else records
