"""Recorded responses of the server in each of its protocols, whole and streamed: a rebuilt server has to send the same.

python -m tests.server.golden_bodies             the scenes whose responses are other ones than recorded; 1 if any
python -m tests.server.golden_bodies --record    record today's responses

A scene is one request in three protocols, an answer that another server writes (with log-probabilities, so that every
score is arithmetic), and the operator's settings. Ids and times are masked. A verdict is written down once for each
scene, without its empty fields; in the bodies stands its number.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from semgrad_guard import GenerationOptions, Policy
from semgrad_guard.guard import Terms
from semgrad_guard.server.app import make_app
from semgrad_guard.server.remote import RemoteServer
from semgrad_guard.server.service import ServedModel, Service
from semgrad_guard.server.upstream import RemoteTarget
from semgrad_guard.settings import Mode, OnDoubt

from .others import Other, behind

FOLDER = Path(__file__).parent / "golden"
PROTOCOLS = ("chat/completions", "completions", "responses")
KEY = "semgrad_guard"
Json = dict[str, Any]

SURE, DOUBT = -0.1, -2.0
CALL = {"id": "c1", "type": "function", "function": {"name": "paint", "arguments": '{"colour": "red"}'}}
TOOL = {"name": "paint", "parameters": {"type": "object", "properties": {"colour": {"type": "string"}}}}
SCHEMA = {"name": "it", "schema": {"type": "object"}}


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A request and its circumstances.

    `written` are the words of the upstream's answer with their log-probabilities, `message` further fields of it.
    `chat`, `text` and `response` are fields of the request in each protocol; None: this one has no such request.
    """

    written: Sequence[tuple[str, float]] = (("Paris", SURE), (" is", SURE), (" old", SURE), (".", SURE))
    message: Mapping[str, Any] = field(default_factory=dict[str, Any])
    finish: str | None = "stop"
    status: int = 200
    threshold: float = 0.5
    mode: Mode = "enforce"
    by_sentence: OnDoubt | None = None
    target: bool = False
    chat: Mapping[str, Any] | None = field(default_factory=dict[str, Any])
    text: Mapping[str, Any] | None = field(default_factory=dict[str, Any])
    response: Mapping[str, Any] | None = field(default_factory=dict[str, Any])

    @property
    def requests(self) -> Iterator[tuple[str, Json]]:
        """Each protocol with the request's body."""
        for path, body, more in zip(
            PROTOCOLS,
            ({"messages": [{"role": "user", "content": "hello"}]}, {"prompt": "hello"}, {"input": "hello"}),
            (self.chat, self.text, self.response),
            strict=True,
        ):
            if more is not None:
                yield path, {"model": "tiny", **body, **more}

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        """A client of the server in these circumstances."""
        count = len(self.written)
        usage = {"prompt_tokens": 4, "completion_tokens": count, "total_tokens": 4 + count}
        given = {"finish": self.finish, "status": self.status, "error": {"message": "not now"}, **self.message}
        entries = [{"token": token, "logprob": value, "top_logprobs": []} for token, value in self.written]
        writer = Other([token for token, _ in self.written], entries, usage=usage, **given)
        other = Other("Ask a cook.", usage={"prompt_tokens": 3, "completion_tokens": 5})
        served = ServedModel(
            **behind(writer, by_sentence=self.by_sentence),
            name="tiny",
            terms=Terms(policy=Policy(threshold=self.threshold), mode=self.mode, can_escalate=self.target),
            options=GenerationOptions(max_tokens=64),
            target=RemoteTarget(RemoteServer("http://large/v1", transport=other), "large") if self.target else None,
            by_sentence=self.by_sentence,
        )
        transport = httpx.ASGITransport(make_app(Service([served])))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            yield client

    async def responses(self) -> Json:
        """What every protocol answers, and the verdicts of these answers."""
        verdicts, found = list[Json](), dict[str, Any]()
        async with self.client() as client:
            for path, body in self.requests:
                whole, stream = [
                    await client.post(f"/v1/{path}", json={**body, "stream": stream}) for stream in (False, True)
                ]
                own = {name: value for name, value in whole.headers.items() if name.startswith("x-")}
                found[path] = {
                    "request": body,
                    "status": whole.status_code,
                    "headers": own,
                    "body": masked(whole.json(), verdicts),
                    "stream": masked(events(stream), verdicts),
                }
        return {**found, "verdicts": verdicts}


def events(response: httpx.Response) -> list[Any]:
    """The events of a stream; or the body of an error, whose status came in time."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        return [response.status_code, response.json()]
    data = re.findall(r"^data: (.*)$", response.text, re.MULTILINE)
    return [one if one == "[DONE]" else json.loads(one) for one in data]


def masked(value: Any, verdicts: list[Json]) -> Any:
    """A body without ids and times, and with a number in the place of each verdict."""
    if isinstance(value, list):
        return [masked(one, verdicts) for one in value]
    if isinstance(value, str):
        return re.sub(r"^(chatcmpl-|cmpl-|resp_|msg_|rs_|fc_)[0-9a-f]{24}", r"\1*", value)
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if not isinstance(value, dict):
        return value
    found = {name: masked(one, verdicts) for name, one in value.items() if name != KEY}
    found |= {name: 0 for name in ("created", "created_at") if name in value}
    if KEY in value:
        found[KEY] = numbered(value[KEY], verdicts)
    return found


def numbered(record: Any, verdicts: list[Json]) -> Any:
    """The number of a verdict; of each, where there are several."""
    if isinstance(record, list):
        return [numbered(one, verdicts) for one in record]
    if isinstance(record, str):  # in a response's metadata
        return f"JSON of {numbered(json.loads(record), verdicts)}"
    empty = (None, [], {}, "")
    shown = {name: masked(one, []) for name, one in record.items() if one not in empty and name != "scoring_ms"}
    if shown not in verdicts:
        verdicts.append(shown)
    return f"verdict {verdicts.index(shown)}"


THREE = (
    *(("Paris", SURE), (" is", SURE), (" old", SURE), (".", SURE)),
    *((" Quito", DOUBT), (" is", DOUBT), (" new", DOUBT), (".", DOUBT)),
    *((" Oslo", SURE), (" is", SURE), (" cold", SURE), (".", SURE)),
)
LOGPROBS: Mapping[str, Any] = {
    "chat": {"logprobs": True, "top_logprobs": 1},
    "text": {"logprobs": 1},
    "response": {"include": ["message.output_text.logprobs"], "top_logprobs": 1},
}
TOOLS: Mapping[str, Any] = {
    "chat": {"tools": [{"type": "function", "function": TOOL}]},
    "text": None,
    "response": {"tools": [{"type": "function", **TOOL}]},
}
AS_JSON: Mapping[str, Any] = {
    "chat": {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    "text": {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    "response": {"text": {"format": {"type": "json_schema", **SCHEMA}}},
}
LIMIT: Mapping[str, Any] = {"chat": {"max_tokens": 2}, "text": {"max_tokens": 2}, "response": {"max_output_tokens": 2}}
USAGE = {"stream_options": {"include_usage": True}}

SCENES: Mapping[str, Scene] = {
    "delivered": Scene(**LOGPROBS),
    "withheld": Scene(threshold=-1, **LOGPROBS),
    "raised": Scene(threshold=-1, mode="raise"),
    "annotated": Scene(threshold=-1, mode="annotate"),
    "several": Scene(chat={"n": 2}, text={"n": 2}, response=None),
    "escalated": Scene(threshold=-1, target=True),
    "dropped": Scene(written=THREE, by_sentence="drop", chat={}, text={}),
    "stopped": Scene(written=THREE, by_sentence="stop"),
    "cut": Scene(**LIMIT),
    "calls": Scene(written=(), message={"content": None, "tool_calls": [CALL]}, mode="annotate", **TOOLS),
    "call_withheld": Scene(written=(), message={"content": None, "tool_calls": [CALL]}, **TOOLS),
    "thought": Scene(message={"reasoning_content": "Well."}, mode="annotate"),
    "json_withheld": Scene(threshold=-1, **AS_JSON),
    "refused_by_the_upstream": Scene(status=503),
    "broken_off": Scene(finish=None, mode="annotate"),
    "unknown_field": Scene(chat={"semgrad_guard": {"kind": "easy"}}, text={"tools": []}, response={"messages": []}),
}


def path_of(name: str) -> Path:
    """The file of a scene."""
    return FOLDER / f"{name}.json"


def recorded(name: str) -> Json:
    """The responses of a scene as they were recorded."""
    return json.loads(path_of(name).read_text(encoding="utf-8"))


def laid_out(value: Any, depth: int = 3) -> str:
    """JSON with one event of a stream, or one field of a body, to a line."""
    if not depth or not value or not isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    inner = (
        [f"{json.dumps(name)}: {laid_out(one, depth - 1)}" for name, one in value.items()]
        if isinstance(value, dict)
        else [laid_out(one, 0) for one in value]
    )
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return "\n".join((begin, ",\n".join(inner), end))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="record today's responses")
    record = parser.parse_args().record
    changed = list[str]()
    for name, scene in SCENES.items():
        found = asyncio.run(scene.responses())
        if record:
            path_of(name).parent.mkdir(exist_ok=True)
            path_of(name).write_text(f"{laid_out(found)}\n", encoding="utf-8")
        elif found != recorded(name):
            changed.append(name)
    print("\n".join(changed) or f"{len(SCENES)} scenes: {'recorded' if record else 'as recorded'}")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
