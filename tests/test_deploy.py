"""The operators' files: the container's steps run as commands, the unit is verified, the page's names are real."""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from semgrad_guard.cli import app
from semgrad_guard.decision_log.database import Database
from semgrad_guard.server.server_settings import ServerSettings
from tests.ports import free_port
from tests.steps import LIMIT

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
PAGE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
SERVE: Any = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
KEY = "a-key-of-sixteen-letters"
STATE = "/var/lib/semgrad-guard"


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, one after the other."""
    lines = [line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(line.partition(" ")[0], " ".join(line.split()[1:])) for line in whole if line.strip()]


def instruction(name: str) -> str:
    return next(text for found, text in reversed(instructions()) if found == name)


def unit() -> list[tuple[str, str]]:
    lines = (DEPLOY / "semgrad-guard.service").read_text().splitlines()
    return [(name, value) for name, found, value in (line.partition("=") for line in lines) if found and name[0] != "#"]


def accepted(arguments: list[str]) -> dict[str, Any]:
    """The settings that the command reads from arguments; it refuses unknown ones."""
    return SERVE.make_context("serve", arguments).params


def test_the_container_runs_as_nobody_in_particular_on_a_cpu() -> None:
    names = [name for name, _ in instructions()]
    assert instruction("USER") == "10001"
    assert names.index("USER") > max(index for index, name in enumerate(names) if name == "RUN")
    assert names.index("USER") < names.index("ENTRYPOINT")
    torch = next(text for name, text in instructions() if name == "RUN" and "torch" in text)
    (pin,) = re.findall(r"^torch==.+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert "--index-url https://download.pytorch.org/whl/cpu" in torch
    assert torch.endswith(pin)
    assert instruction("VOLUME") == instruction("WORKDIR") == STATE
    assert instruction("STOPSIGNAL") == "SIGTERM"
    homes = dict(pair.split("=", 1) for pair in instruction("ENV").split())
    assert {homes[name].startswith(STATE) for name in ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME")} == {True}
    assert not [name for name in names if name == "ADD"]
    assert "KEY" not in str([text for name, text in instructions() if name in ("ENV", "ARG")])


def copied_to(source: Path) -> None:
    """Do the image's COPY steps."""
    source.mkdir(exist_ok=True)
    for text in (text for name, text in instructions() if name == "COPY"):
        *origins, target = text.split()
        for origin in origins:
            if (ROOT / origin).is_dir():
                shutil.copytree(ROOT / origin, source / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                (source / target).parent.mkdir(exist_ok=True)
                shutil.copy(ROOT / origin, source / target)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of the image's COPY and RUN steps, without dependencies, which the index would bring."""
    source, built, site = (tmp_path_factory.mktemp(name) for name in ("src", "built", "site"))
    copied_to(source)
    step = next(text for name, text in instructions() if name == "RUN" and "pip install -c" in text)
    (extras,) = re.findall(r"\.\[([a-z,-]+)\]", step)
    known = re.findall(r"^(\S+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert set(extras.split(",")) <= set(known)
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(built), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    return site


@pytest.fixture
def container(installed: Path, tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], int]]]:
    """The image's command in its environment, on a free port of this machine."""
    begun: list[subprocess.Popen[str]] = []

    def start(*more: str, key: str | None = KEY) -> tuple[subprocess.Popen[str], int]:
        port = free_port()
        entry = [part.replace("8000", str(port)) for part in json.loads(instruction("ENTRYPOINT"))]
        assert entry[0] == "semgrad-guard"
        command = [sys.executable, "-m", "semgrad_guard.cli", *entry[1:], *json.loads(instruction("CMD")), *more]
        settings = dict(pair.split("=", 1) for pair in instruction("ENV").split())
        homes = {name: value.replace(STATE, str(tmp_path)) for name, value in settings.items()}
        environment = {**os.environ, **homes, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
        environment.pop("SEMGRAD_GUARD_API_KEY", None)
        if key is not None:
            environment["SEMGRAD_GUARD_API_KEY"] = key
        process = subprocess.Popen(
            command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        begun.append(process)
        return process, port

    yield start
    for process in begun:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="containers of Linux")
def test_the_container_answers_is_healthy_and_drains(container: Any, tmp_path: Path) -> None:
    process, port = container()
    assert "Serving pocket" in process.stdout.readline()
    check = json.loads(instruction("HEALTHCHECK").partition("CMD ")[2])
    assert check[0] == "python"
    healthy = [sys.executable, *[part.replace("8000", str(port)) for part in check[1:]]]
    assert subprocess.run(healthy, check=False).returncode == 0
    assert reply_of(port, None)[0] == 401
    status, answer = reply_of(port, KEY)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "Tokyo")
    late = http.client.HTTPConnection("127.0.0.1", port)
    body = question()
    late.putrequest("POST", "/v1/chat/completions")
    for name, value in {**headers(KEY), "content-length": str(len(body))}.items():
        late.putheader(name, value)
    late.endheaders(body[:10])
    assert reply_of(port, KEY)[0] == 200  # so that the first one has begun
    process.terminate()
    while subprocess.run(healthy, check=False, capture_output=True).returncode == 0:
        time.sleep(0.05)
    late.send(body[10:])
    response = late.getresponse()
    assert (response.status, b"Tokyo" in response.read()) == (200, True), "what had begun is finished"
    assert process.wait(LIMIT) == 0
    with closing(Database(tmp_path / "state" / "semgrad-guard" / "decisions.db")) as database:
        assert len(database.decisions()) == 3, "the volume holds every answer"


def question() -> bytes:
    turns = [{"role": "user", "content": "What is the capital of Japan?"}]
    return json.dumps({"model": "pocket", "messages": turns}).encode()


def headers(key: str | None) -> dict[str, str]:
    return {"content-type": "application/json", **({} if key is None else {"authorization": f"Bearer {key}"})}


def reply_of(port: int, key: str | None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/chat/completions", question(), headers(key))
    response = connection.getresponse()
    found = response.status, json.load(response)
    connection.close()
    return found


@pytest.mark.slow
def test_the_container_wants_a_key(container: Any) -> None:
    process, _ = container(key=None)
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "SEMGRAD_GUARD_API_KEY" in output


def test_the_units_command_is_one_that_is_accepted() -> None:
    found = dict(unit())
    program, name, *arguments = shlex.split(found["ExecStart"].replace("%d", "/run/credentials"))
    assert (Path(program).name, name) == ("semgrad-guard", "serve")
    given = accepted(arguments)
    assert given["host"] == "127.0.0.1"
    assert given["api_key_file"] == Path("/run/credentials/api-keys")
    assert found["LoadCredential"].startswith("api-keys:")
    assert int(found["TimeoutStopSec"]) > 30
    homes = " ".join(value for name, value in unit() if name == "Environment")
    assert f"XDG_STATE_HOME=/var/lib/{found['StateDirectory']}/" in homes


def test_systemd_verifies_the_unit(tmp_path: Path) -> None:
    systemd = shutil.which("systemd-analyze")
    if systemd is None:
        pytest.skip("systemd-analyze is not installed")
    text = (DEPLOY / "semgrad-guard.service").read_text().replace("/opt/semgrad-guard/bin/semgrad-guard", "/bin/true")
    made = tmp_path / "semgrad-guard.service"
    made.write_text(text)
    found = subprocess.run([systemd, "verify", made], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")
    threshold = ["security", "--offline=true", "--threshold=20", made]  # tenths: 2.0 of 10 is "OK"
    found = subprocess.run([systemd, *threshold], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-300:]


def test_the_pages_options_metrics_and_variables_exist() -> None:
    from semgrad_guard.server.service import Metrics

    options = {option for parameter in SERVE.params for option in parameter.opts}
    others = {"--name", "--read-only", "--tmpfs", "--cap-drop", "--security-opt", "--stop-timeout", "--now"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE)) - others <= options
    metrics = Metrics([], None)
    names = {line.split()[2] for line in metrics.text().decode().splitlines() if line.startswith("# TYPE")}
    assert set(re.findall(r"semgrad_guard_[a-z_]+", PAGE)) <= names
    code = "".join(path.read_text() for path in (ROOT / "semgrad_guard").rglob("*.py"))
    assert not [name for name in re.findall(r"SEMGRAD_GUARD_[A-Z_]+", PAGE) if f'"{name}"' not in code]


def test_the_pages_limits_are_the_defaults() -> None:
    given, defaults = accepted([]), ServerSettings()
    rows = dict(re.findall(r"^\| `(?:--)?([a-z_-]+)` \| ([^|]+) \|", PAGE, re.MULTILINE))
    assert defaults.max_body == 2_000_000
    assert rows["max_body"] == "2 MB"
    assert str(given["max_tokens"]) == rows["max-tokens"]
    for name in ("queue", "connections"):
        assert str(getattr(defaults, name)) == rows[name]
    assert defaults.timeout is defaults.max_prompt_tokens is None


def test_the_pages_samples_are_yaml_and_every_alarm_can_be_raised() -> None:
    samples = [yaml.safe_load(code) for code in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)]
    rules = [rule for sample in samples for group in sample.get("groups", []) for rule in group["rules"]]
    assert len(rules) > 5
    for rule in rules:
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert rule["annotations"]["summary"]
    from semgrad_guard.server.gate import _CODES

    codes = {code for _, _, code, _ in _CODES} | {"internal_error", "upstream_failed"}
    named = {
        code for rule in rules for codes in re.findall(r'code=~"([^"]+)"', rule["expr"]) for code in codes.split("|")
    }
    assert named <= codes
