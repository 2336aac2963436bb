"""A server that is put together from its settings, as the command and Ray Serve do it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")

import httpx

from semgrad_guard import GenerationOptions, HybridGrad, LanguageModel, calibrate
from semgrad_guard.engine.scores.tape import FRUGAL
from semgrad_guard.errors import BindingMismatchError, InputError, ModelNotFoundError
from semgrad_guard.guard import Answerer
from semgrad_guard.loading import ModelSource
from semgrad_guard.server.assembly import MEMORY, Server, assemble
from semgrad_guard.server.gate import Keys
from semgrad_guard.server.scheduler import Scheduler
from semgrad_guard.server.server_settings import ServerSettings
from tests.steps import LIMIT

from .conftest import asking

ELSEWHERE = "http://127.0.0.1:9/v1"


@pytest.fixture
def made() -> Iterator[Any]:
    """`made(model=..., threshold=...)`: a server; its threads end with the test."""
    servers: list[Server] = []

    def make(**settings: Any) -> Server:
        settings = {"max_tokens": 4, "no_log": True, **settings}
        servers.append(assemble(ServerSettings(**settings), keys=Keys(), hosts=None))
        return servers[-1]

    yield make
    for server in servers:
        for served in server.service.models.values():
            served.scheduler.close()


def calibration_file(path: Path, checkpoint: Path, *, served: bool) -> Path:
    """A calibration of the tiny model's own answers, or of what another server wrote."""
    model = LanguageModel.from_pretrained(checkpoint)
    answerer = Answerer(model, HybridGrad(), GenerationOptions(max_tokens=4, seed=0), served=served)
    scores = [i / 100 for i in range(100)]
    found = calibrate(scores, [score < 0.9 for score in scores], alpha=0.3, delta=0.1, binding=answerer.binding())
    found.save(path)
    return path


def client_of(server: Server) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://127.0.0.1")


async def test_a_server_of_settings_answers(made: Any, checkpoint: Path) -> None:
    async with client_of(made(model=str(checkpoint), threshold=1e9, on_cut="score")) as client:
        found = (await client.post("/v1/chat/completions", json=asking() | {"model": checkpoint.name})).json()
    model = LanguageModel.from_pretrained(checkpoint)
    expected = model.generate("hello", GenerationOptions(max_tokens=4, seed=0)).text
    assert found["choices"][0]["message"]["content"] == expected
    assert found["semgrad_guard"]["action"] == "answer"


def test_whoever_loads_a_model_is_gone(checkpoint: Path) -> None:
    """OpenMP keeps threads for each thread that has computed, and the model's own would be slower for it."""
    seen: list[threading.Thread] = []

    def load(source: ModelSource) -> LanguageModel:
        seen.append(threading.current_thread())
        return source.load()

    server = assemble(
        ServerSettings(model=str(checkpoint), threshold=1.0, no_log=True), keys=Keys(), hosts=None, load=load
    )
    server.service.close()
    seen[0].join(LIMIT)
    assert not seen[0].is_alive()
    with pytest.raises(ModelNotFoundError):
        assemble(ServerSettings(model="/nowhere", threshold=1.0, no_log=True), keys=Keys(), hosts=None)


def test_a_server_holds_what_a_whole_batch_leaves_for_its_scores(made: Any, checkpoint: Path) -> None:
    (served,) = made(model=str(checkpoint), threshold=1.0).service.models.values()
    assert served.scheduler.model.memory == MEMORY

    def load(source: ModelSource) -> LanguageModel:
        model = source.load()
        model.memory = FRUGAL
        return model

    settings = ServerSettings(model=str(checkpoint), threshold=1.0, no_log=True)
    server = assemble(settings, keys=Keys(), hosts=None, load=load)
    (chosen,) = server.service.models.values()
    server.service.close()
    assert isinstance(chosen.scheduler, Scheduler)
    assert chosen.scheduler.model.memory == FRUGAL  # its owner's choice is left alone


def test_several_models_have_a_calibration_each(made: Any, checkpoint: Path, tmp_path: Path) -> None:
    own = calibration_file(tmp_path / "c.json", checkpoint, served=False)
    server = made(model=("pocket", str(checkpoint)), mode="annotate", calibration=(f"{checkpoint}={own}",))
    thresholds = {name: model.terms.policy.threshold for name, model in server.service.models.items()}
    assert set(thresholds) == {"pocket", checkpoint.name}
    assert thresholds[checkpoint.name] != thresholds["pocket"] > 0


def test_a_scorer_has_the_calibration_of_what_others_wrote(made: Any, checkpoint: Path, tmp_path: Path) -> None:
    """Whether `model` names the upstream's model or it goes by the scorer's name."""
    of_served = calibration_file(tmp_path / "served.json", checkpoint, served=True)
    behind = {"upstream": ELSEWHERE, "scorer": str(checkpoint)}
    for more, name in (({}, str(checkpoint)), ({"model": "large"}, "large")):
        served = made(**behind, **more, calibration=str(of_served)).service.models[name]
        assert served.terms.policy.calibration is not None
    own = calibration_file(tmp_path / "own.json", checkpoint, served=False)
    with pytest.raises(BindingMismatchError):
        made(**behind, calibration=str(own))
    with pytest.raises(BindingMismatchError):
        made(model=str(checkpoint), calibration=str(of_served))


def test_without_a_threshold_nothing_is_enforced(made: Any, checkpoint: Path) -> None:
    with pytest.raises(InputError, match="--calibration or --threshold"):
        made(model=str(checkpoint))
    assert made(model=str(checkpoint), mode="annotate").service.models[checkpoint.name].terms.mode == "annotate"
