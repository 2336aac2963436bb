"""Responses in every protocol, whole and streamed, are those that were recorded (`golden_bodies.py`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")

from .golden_bodies import FOLDER, PROTOCOLS, SCENES, recorded

HIDDEN = {
    **dict.fromkeys(("withheld", "raised", "escalated", "json_withheld", "refused_by_the_upstream"), "Paris"),
    **dict.fromkeys(("dropped", "stopped"), "Quito"),
    "call_withheld": "c1",
    "cut": " old",
}
"""What no response of a scene may hold."""


@pytest.mark.parametrize("name", SCENES)
async def test_responses_are_as_recorded(name: str) -> None:
    assert await SCENES[name].responses() == recorded(name)


def test_every_scene_and_no_other_is_recorded() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(SCENES)


def responses(name: str) -> Iterator[Any]:
    for path, found in recorded(name).items():
        yield found if path == "verdicts" else [found["headers"], found["body"], found["stream"]]


@pytest.mark.parametrize("name", HIDDEN)
def test_no_recorded_response_holds_what_is_withheld(name: str) -> None:
    assert not [one for one in responses(name) if HIDDEN[name] in json.dumps(one, ensure_ascii=False)]


@pytest.mark.parametrize("name", ["delivered", "dropped", "stopped", "annotated", "cut"])
def test_a_stream_spells_the_text_of_the_whole_body(name: str) -> None:
    found = recorded(name)
    chat, text, response = (found[path] for path in PROTOCOLS)
    deltas = [choice["delta"] for event in chat["stream"][:-1] for choice in event["choices"]]
    spelled = {
        "".join(delta.get("content") or "" for delta in deltas),
        "".join(choice["text"] for event in text["stream"][:-1] for choice in event["choices"]),
        "".join(event["delta"] for event in response["stream"] if event["type"] == "response.output_text.delta"),
    }
    assert spelled == {chat["body"]["choices"][0]["message"]["content"]}
    assert text["body"]["choices"][0]["text"] == response["body"]["output"][0]["content"][0]["text"] == spelled.pop()
    assert response["stream"][-1]["response"] == response["body"]
