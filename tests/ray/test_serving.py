"""The server behind Ray Serve: a real cluster, replicas with models of their own, one log in PostgreSQL."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from semgrad_guard.errors import ClusterError
from semgrad_guard.ray.serving import ReplicaSettings
from tests.ports import free_port
from tests.postgresql import Postgres
from tests.steps import LIMIT

from .processes import own_workers

pytestmark = pytest.mark.heavy
QUESTIONS = [
    f"What is the {what} of {place}?" for what in ("capital", "river") for place in ("Mongolia", "Peru", "Oslo")
]
PLAIN = {"mode": "annotate", "threshold": 1e9, "model": "pocket", "max_tokens": 12, "cpus": 0.4}
KILLS = 6
Answered = tuple[str, float, str]
"""Text, uncertainty and action."""


@pytest.fixture(scope="module")
def url(ray: Any) -> Generator[str]:
    """Where Ray's proxy listens."""
    serve = pytest.importorskip("ray.serve")
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}/v1"
    serve.shutdown()


@pytest.fixture
def deploy(url: str, postgres: Postgres, tmp_path: Path) -> Callable[..., None]:
    """Puts the server there, or another one in its place; returns once it is whole."""
    from ray import serve

    from semgrad_guard.ray import app

    def run(**changes: Any) -> None:
        log = {"log": postgres.url, "journal": tmp_path / "journal"}
        settings = ReplicaSettings.model_validate({**PLAIN, **log, "min_replicas": 2, "max_replicas": 2, **changes})
        serve.run(app(settings), name="guard", route_prefix="/")

    return run


def expected(**changes: Any) -> dict[str, Answered]:
    """The replies of the server of one process: text, uncertainty and action by question."""
    from starlette.testclient import TestClient

    from semgrad_guard.server.assembly import assemble
    from semgrad_guard.server.gate import Keys
    from semgrad_guard.server.settings import ServerSettings

    plain = {name: value for name, value in PLAIN.items() if name != "cpus"}
    server = assemble(ServerSettings(**{**plain, **changes}, no_log=True), keys=Keys(), hosts=None)
    with TestClient(server.app) as client:
        return {
            question: answer_of(client.post("/v1/chat/completions", json=body(question)).json())
            for question in QUESTIONS
        }


def body(question: str, **given: Any) -> dict[str, Any]:
    return {"model": "pocket", "messages": [{"role": "user", "content": question}], **given}


def answer_of(found: dict[str, Any]) -> Answered:
    record = found["choices"][0]
    verdict = found["semgrad_guard"]
    return record["message"]["content"], verdict["uncertainty"], verdict["action"]


def alike(one: Answered, other: Answered) -> bool:
    """The same text and decision, and the same number; a batch of other rows changes its last digits."""
    return (one[0], one[2]) == (other[0], other[2]) and one[1] == pytest.approx(other[1], rel=1e-4)


def stream_of(client: httpx.Client, url: str, question: str) -> tuple[str, bool]:
    """The text of a stream, and whether it was whole."""
    pieces, ended = list[str](), False
    with client.stream("POST", f"{url}/chat/completions", json=body(question, stream=True)) as response:
        for line in response.iter_lines():
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: "):
                for choice in json.loads(line[6:]).get("choices", ()):
                    pieces.append(choice["delta"].get("content") or "")
    return "".join(pieces), ended


@dataclass
class Load:
    """Clients that ask one question after the other until a signal stops them."""

    url: str
    clients: int = 4
    answers: list[tuple[str, Answered, str]] = field(default_factory=list)
    """Question, answer, and the id of its decision."""
    failures: list[int | str] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Load:
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(self.clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, more: int) -> None:
        """Return once so many further answers have come."""
        aim = len(self.answers) + more
        while len(self.answers) < aim:
            time.sleep(0.05)

    def _ask(self, number: int) -> None:
        with httpx.Client(trust_env=False, timeout=120) as client:
            for question in itertools.islice(itertools.cycle(QUESTIONS), number, None):
                if self._ended.is_set():
                    return
                try:
                    response = client.post(f"{self.url}/chat/completions", json=body(question))
                except httpx.TransportError as error:
                    self.failures.append(type(error).__name__)
                    continue
                if response.status_code != 200:
                    self.failures.append(response.status_code)
                    continue
                found = response.json()
                self.answers.append((question, answer_of(found), decision_of(found)))


def decision_of(found: dict[str, Any]) -> str:
    return found["semgrad_guard"]["decision_id"]


def kept(postgres: Postgres, ids: Sequence[str]) -> list[str]:
    """Those of these decisions that are in the database, in two minutes at the latest."""
    from semgrad_guard.decision_log.database import Database

    database = Database(postgres.url)
    deadline = time.monotonic() + LIMIT
    while (found := [decision for decision in ids if database.find(decision)]) != list(
        ids
    ) and time.monotonic() < deadline:
        time.sleep(1)
    database.close()
    return found


def test_replicas_answer_as_one_process_does(deploy: Callable[..., None], url: str) -> None:
    alone = expected()
    deploy()
    with Load(url) as load:
        load.wait_for(40)
    assert load.failures == []
    assert [(q, alone[q], a) for q, a, _ in load.answers if not alike(alone[q], a)] == []
    with httpx.Client(trust_env=False, timeout=120) as client:
        assert [stream_of(client, url, question) for question in QUESTIONS] == [
            (alone[question][0], True) for question in QUESTIONS
        ]
        decisions = client.get(f"{url}/decisions").json()["data"]
        assert len(decisions) >= 46, "the log is one for all replicas"
        assert client.get(f"{url}/models", headers={"host": "elsewhere"}).status_code == 421


def test_another_version_takes_over_under_load(deploy: Callable[..., None], url: str, postgres: Postgres) -> None:
    versions = [expected(), expected(threshold=-1)]
    assert not any(alike(versions[0][question], versions[1][question]) for question in QUESTIONS)
    deploy()
    with Load(url) as load:
        load.wait_for(20)
        deploy(threshold=-1)
        load.wait_for(60)
    assert load.failures == [], "an answer was lost"
    seen = [[alike(version[question], answer) for version in versions] for question, answer, _ in load.answers]
    assert all(any(matches) for matches in seen), "an answer is neither version's"
    assert {matches.index(True) for matches in seen} == {0, 1}
    ids = [decision for _, _, decision in load.answers]
    assert len(set(ids)) == len(ids)
    assert kept(postgres, ids) == ids


def test_killed_replicas_mix_nothing_up_and_lose_no_decision(
    deploy: Callable[..., None], url: str, postgres: Postgres
) -> None:
    alone = expected()
    deploy()
    killed = Counter[int]()
    with Load(url) as load:
        while len(killed) < KILLS:
            load.wait_for(15)
            alive = [number for number in own_workers("ServeReplica") if number not in killed]
            if alive:
                os.kill(alive[0], signal.SIGKILL)
                killed[alive[0]] += 1
        load.wait_for(60)
    assert [(q, alone[q], a) for q, a, _ in load.answers if not alike(alone[q], a)] == []
    assert set(load.failures) <= {500, 502, 503, "RemoteProtocolError", "ReadError"}
    ids = [decision for _, _, decision in load.answers]
    assert len(set(ids)) == len(ids)
    assert kept(postgres, ids) == ids


def test_replicas_come_with_load(deploy: Callable[..., None], url: str) -> None:
    from ray import serve

    alone = expected()
    serve.delete("guard")  # the replicas of an application that is deployed already would stay
    deploy(min_replicas=1, max_replicas=2, target_requests=1)
    assert running() == 1
    with Load(url, clients=6) as load:
        deadline = time.monotonic() + 240  # Ray looks for half a minute before it starts one; then it loads the model
        while running() < 2 and time.monotonic() < deadline:
            time.sleep(1)
        assert running() == 2
        load.wait_for(30)
    assert load.failures == []
    assert [(q, alone[q], a) for q, a, _ in load.answers if not alike(alone[q], a)] == []


def running() -> int:
    """How many replicas answer requests."""
    from ray import serve

    found = serve.status().applications["guard"].deployments["guard"].replica_states
    return next((count for state, count in found.items() if state == "RUNNING"), 0)


def test_a_replica_whose_model_can_answer_nothing_is_replaced(
    deploy: Callable[..., None], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray import serve

    from semgrad_guard.ray import serving

    class Mortal(serving.Replica):
        """A replica whose model's thread can be ended from outside."""

        def end_thread(self) -> list[bool]:
            schedulers = [model.scheduler for model in self._server.service.models.values()]
            for scheduler in schedulers:
                scheduler.close()
            return [scheduler.is_alive for scheduler in schedulers]

    monkeypatch.setattr(serving, "Replica", Mortal)
    alone = expected()
    deploy(min_replicas=1, max_replicas=1, health_check_seconds=1)
    [before] = own_workers("ServeReplica")
    assert serve.get_app_handle("guard").end_thread.remote().result(timeout_s=60) == [False]
    deadline = time.monotonic() + 240
    while before in own_workers("ServeReplica") and time.monotonic() < deadline:
        time.sleep(0.5)
    assert before not in own_workers("ServeReplica")
    with Load(url, clients=1) as load:
        load.wait_for(3)
    assert load.answers
    assert [(q, alone[q], a) for q, a, _ in load.answers if not alike(alone[q], a)] == []


def test_a_healthy_replica_says_so_and_a_dead_one_which_model_it_is(url: str) -> None:
    from semgrad_guard.ray.serving import Replica

    replica = Replica(ReplicaSettings.model_validate({**PLAIN, "no_log": True}))
    replica.check_health()
    [served] = replica._server.service.models.values()
    served.scheduler.close()
    with pytest.raises(ClusterError, match="the thread of pocket has ended"):
        replica.check_health()


def test_it_is_run_from_the_command_line(tmp_path: Path) -> None:
    """As in docs/ray.md: a file for `serve run`, with the same options as `semgrad-guard serve`."""
    program = Path(sys.executable).with_name("serve")
    port = free_port()
    args = {"model": "pocket", "log": str(tmp_path / "log.db"), "max_tokens": "12"}
    application = {"name": "guard", "route_prefix": "/", "import_path": "semgrad_guard.ray:app", "args": args}
    config = {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]}
    (tmp_path / "serve.yaml").write_text(json.dumps(config))
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    with subprocess.Popen(
        [program, "run", str(tmp_path / "serve.yaml")],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            found = answered(f"http://127.0.0.1:{port}/v1", process)
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=LIMIT)
    assert found["semgrad_guard"]["action"] in ("answer", "abstain")
    assert found["semgrad_guard"]["calibration_id"] is not None


def answered(url: str, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """A server's reply once it is there."""
    while process.poll() is None:
        try:
            response = httpx.post(f"{url}/chat/completions", json=body(QUESTIONS[0]), trust_env=False, timeout=LIMIT)
        except httpx.TransportError:
            time.sleep(0.5)
            continue
        if response.status_code == 200:
            return response.json()
        time.sleep(0.5)
    raise AssertionError("serve run has ended")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "one decision log"),
        ({"no_log": True, "min_replicas": 3}, "min_replicas=3 is more than"),
        ({"no_log": True, "scorer": "pocket"}, "goes with --upstream"),
        ({"no_log": True, "cpu": 1}, "cpu\n"),
        ({"no_log": True, "max_tokens": "many"}, "max_tokens\n"),
    ],
)
def test_settings_that_cannot_be_are_refused(given: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEMGRAD_GUARD_LOG", raising=False)
    with pytest.raises(ValidationError, match=says):
        ReplicaSettings.model_validate(given)
