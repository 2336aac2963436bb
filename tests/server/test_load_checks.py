"""What `make check-load` looks with sees what is wrong; its ill-meant clients get what they may."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from semgrad_guard import GenerationOptions, LanguageModel
from semgrad_guard.adapters.calls import AnswerForm
from tests.steps import LIMIT

from .conftest import ALL, NONE, OPTIONS
from .test_hostile import running

pytest.importorskip("sqlalchemy", reason="the extra `log` is not installed")
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from load_checks import clients, nonces, pauses, saturation, scripted

Make = Callable[..., Any]
RECORD = {"action": "answer", "uncertainty": 0.5}


def reply(text: str, **record: Any) -> clients.Reply:
    """A whole answer with a verdict."""
    choice = {"index": 0, "message": {"content": text}, "logprobs": {"semgrad_guard": RECORD | record}}
    return clients.Reply(status=200, text=json.dumps({"choices": [choice]}), headers={})


def test_an_answer_that_is_somebody_elses_is_seen() -> None:
    twin = saturation.Twin("question", "text", "answer", 0.5)
    assert twin.differs(reply("text")) is None
    for other in (reply("texts"), reply("text", action="abstain"), reply("text", uncertainty=0.51)):
        assert "question" in str(twin.differs(other))
    withheld = saturation.Twin("question", "text", "abstain", 0.5)
    assert withheld.differs(reply("text", action="abstain", uncertainty=None)) is None
    assert "question" in str(withheld.differs(reply("text", action="abstain")))


def test_a_score_that_is_nearer_to_float64_than_a_single_processs_is_no_mixture() -> None:
    twin = saturation.Twin("question", "text", "answer", 0.5, exact=0.4999)
    assert [twin.differs(reply("text", uncertainty=found)) for found in (0.4999, 0.49985, 0.50004)] == [None] * 3
    for found in (0.4997, 0.5002, 0.51, None):
        assert "question" in str(twin.differs(reply("text", uncertainty=found)))
    coarse = saturation.Twin("question", "text", "answer", 0.5, exact=0.4)
    assert "question" in str(coarse.differs(reply("text", uncertainty=0.45)))


def test_a_score_may_be_off_by_what_single_processes_are_in_other_questions() -> None:
    twin = saturation.Twin("question", "text", "answer", 3.2e-6, exact=3.2e-6, rounding=3e-4)
    assert [twin.differs(reply("text", uncertainty=3.2e-6 * (1 + off))) for off in (1.4e-4, -2.9e-4)] == [None] * 2
    for off in (3.1e-4, -3.1e-4, 0.01):
        assert "question" in str(twin.differs(reply("text", uncertainty=3.2e-6 * (1 + off))))
    wild = saturation.Twin("question", "text", "answer", 0.5, exact=0.5, rounding=0.1)
    assert "question" in str(wild.differs(reply("text", uncertainty=0.5006)))


def test_a_part_of_a_draft_is_seen(language_model: LanguageModel) -> None:
    run = nonces.Run(b"secret", 0.5, language_model)
    word, other = (scripted.nonce(b"secret", number, 0) for number in (1, 2))
    assert word != other
    run.open.add(word)
    assert run.search([("metrics", f"model {word} {word[3:12]}")]) == 1
    assert run.problems == []
    run.search([("metrics", f"model {other[3:12]}")])
    assert [other[3:12] in problem for problem in run.problems] == [True]


def test_an_answer_of_another_row_is_seen(language_model: LanguageModel) -> None:
    run = nonces.Run(b"secret", 0.5, language_model, own=True)
    own, other = (f'"{scripted.nonce(b"secret", number, 0)}"' for number in (1, 2))
    assert run._judged(1, "", {}, reply(own)) == {own[1:-1]}
    assert run.problems == []
    for mixed in (other, own[:-3] + other[-3:], own + other):
        run._judged(1, "", {}, reply(mixed))
    assert len(run.problems) == 3


def test_the_grammar_of_a_request_allows_its_own_nonce_alone(language_model: LanguageModel) -> None:
    body = clients.asking("tiny", "1 ", response_format=nonces.own_format(b"secret", 1))
    form = AnswerForm.of({"response_format": body["response_format"]})
    found = language_model.generate("1 ", GenerationOptions(max_tokens=40, grammar=form.grammar(language_model)))
    assert found.text == f'"{scripted.nonce(b"secret", 1, 0)}"'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("policy", [ALL, NONE])
async def test_answers_are_read(make_served: Make, language_model: LanguageModel, stream: bool, policy: Any) -> None:
    with running(make_served(policy)) as address:
        async with clients.connected("http://{}:{}/v1".format(*address)) as http:
            found = await clients.ask(http, clients.asking("tiny", "hello", stream=stream))
            missing = await clients.ask(http, clients.asking("none", "hello", stream=stream))
    ((text, record),) = found.choices
    assert found.whole
    assert found.error is None
    assert text == (language_model.generate("hello", OPTIONS).text if policy is ALL else "I don't know.")
    assert record["action"] == ("answer" if policy is ALL else "abstain")
    assert missing.error == "model_not_found"


async def test_those_that_mean_it_ill_get_what_they_may(make_served: Make) -> None:
    with running(make_served(NONE)) as address:
        for way, allowed in clients.RUDE.items():
            assert await way(*address, clients.asking("tiny", "hello")) in allowed, way.__name__
        async with clients.connected("http://{}:{}/v1".format(*address)) as http:
            assert (await clients.ask(http, clients.asking("tiny", "hello"))).status == 200


def test_a_process_that_was_stopped_knows_it() -> None:
    code = """
import time
from pauses import Pauses
ours, calm, began = Pauses(tick=0.05, long=1.0), Pauses(tick=0.05, long=120.0), time.monotonic()
print("ready", flush=True)
input()
print(ours.since(began), calm.since(began))
while ours.since(time.monotonic()):  # only where the machine makes another pause
    pass
"""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(pauses.__file__).parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(2)
        process.send_signal(signal.SIGCONT)
        stdout, _ = process.communicate("\n", timeout=LIMIT)
    assert (stdout, process.returncode) == ("True False\n", 0)
