"""The pages for people, and the routes that they ask: small, closed to the outside, and without withheld drafts."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from semgrad_guard import Calibration, Policy, calibrate
from semgrad_guard.decision_log.decision_log import DecisionLog
from semgrad_guard.server.app import PATHS
from semgrad_guard.server.gate import Keys
from tests.decision_log.test_feedback import written

from .conftest import NONE, Serve

CONTENT = {path.name: path.read_bytes() for path in Path(str(files("semgrad_guard.server") / "static")).iterdir()}


def made(*, wrong_from: int = 60) -> Calibration:
    return calibrate([i / 100 for i in range(100)], [i < wrong_from for i in range(100)], alpha=0.2, delta=0.1)


class Tags(HTMLParser):
    """Every tag of a page, with its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


async def test_pages_come_without_a_key_and_data_does_not(serve: Serve) -> None:
    async with serve(NONE, app={"keys": Keys(["k" * 16])}) as client:
        for path in PATHS:
            page = await client.get(path)
            assert page.status_code == 200
            policy = page.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert page.headers["x-content-type-options"] == "nosniff"
        for path in ("/v1/decisions", "/v1/promises", "/v1/models", "/static", "/static/../app.py"):
            assert (await client.get(path)).status_code == 401


async def test_pages_below_a_path_name_their_files_there(serve: Serve) -> None:
    async with serve(NONE) as inner:
        outer = Starlette(routes=[Mount("/a/path", inner._transport.app)])
        async with httpx.AsyncClient(transport=httpx.ASGITransport(outer), base_url="http://127.0.0.1") as client:
            for page in ("/", "/decisions"):
                tags = Tags()
                tags.feed((await client.get(f"/a/path{page}")).text)
                named = [attributes.get("href") or attributes.get("src") for _, attributes in tags.found]
                assert {address for address in named if address} <= {f"/a/path{path}" for path in PATHS}
            assert b'"/static' not in b"".join(CONTENT[name] for name in ("playground.js", "decisions.js"))


def test_all_of_them_are_small() -> None:
    assert sum(len(gzip.compress(content)) for content in CONTENT.values()) <= 60_000
    assert len(CONTENT) == len(PATHS)


@pytest.mark.parametrize("name", sorted(CONTENT))
def test_nothing_comes_from_elsewhere_and_nothing_is_written_as_markup(name: str) -> None:
    text = CONTENT[name].decode()
    assert set(re.findall(r"https?://[^\s\"']+", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|localStorage", text
    )
    if name.endswith(".html"):
        tags = Tags()
        tags.feed(text)
        for tag, attributes in tags.found:
            assert not [attribute for attribute in attributes if attribute.startswith("on") or attribute == "style"], (
                tag,
                attributes,
            )
            assert tag != "style"
            assert tag != "script" or attributes["src"] in PATHS
            for attribute in ("src", "href"):
                assert attributes.get(attribute) in {*PATHS, None}


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node on this machine")
@pytest.mark.parametrize("name", sorted(name for name in CONTENT if name.endswith(".js")))
def test_the_scripts_can_be_parsed(name: str, tmp_path: Path) -> None:
    script = tmp_path / f"{name}.mjs"
    script.write_bytes(CONTENT[name])
    found = subprocess.run(["node", "--check", script], capture_output=True, text=True, check=False)  # noqa: S607
    assert found.returncode == 0, found.stderr


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node on this machine")
def test_the_pages_say_partly_withheld_where_it_is_so(tmp_path: Path) -> None:
    """By the verdict's own sentences, or by what the route says of a decision."""
    api = CONTENT["api.js"].decode().replace("extends HTMLElement", "").replace("customElements.define", "String")
    (tmp_path / "api.mjs").write_text(api)
    script = "console.log(JSON.parse(process.argv[2]).map((one) => outcome(one).label).join());"
    (tmp_path / "labels.mjs").write_text(f"import {{ outcome }} from './api.mjs'; {script}")
    base = {"action": "answer", "enforced": True}
    part = [{"action": "deliver"}, {"action": "drop"}]
    verdicts = [
        base,
        {**base, "sentences": part},
        {**base, "sentences": part[:1]},
        {**base, "sentences": part, "enforced": False},
        {**base, "partly_withheld": True},
        {**base, "partly_withheld": False},
    ]
    command = ["node", tmp_path / "labels.mjs", json.dumps(verdicts)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    part_of, whole = "Partly withheld", "Let through"
    assert found.stdout.strip().split(",") == [whole, part_of, whole, whole, part_of, whole]


async def test_a_reader_can_tell_from_the_page_whether_the_promise_holds(serve: Serve, tmp_path: Path) -> None:
    """The words of each state come from the route that the page shows; before the first answer, too."""
    calibration = made()
    log = DecisionLog(tmp_path / "log.db")
    async with serve(
        Policy.from_calibration(calibration), service={"log": log}, app={"keys": Keys(["k" * 16])}
    ) as client:
        assert (await client.get("/v1/promises")).status_code == 401
        headers = {"authorization": f"Bearer {'k' * 16}"}
        (first,) = (await client.get("/v1/promises", headers=headers)).json()["data"]
        assert (first["calibration_id"], first["state"], first["current"]) == (calibration.id, "unknown", True)
        ids = written(log, 30, calibration_id="older")
        log.database.mark_drawn(ids)
        for one in ids:
            given = {"decision_id": one, "right": False}
            found = await client.post("/v1/feedback", json=given, headers=headers)
            assert "calibration older, which decides no longer" in found.json()["note"]
        current, older = (await client.get("/v1/promises", headers=headers)).json()["data"]
        assert current["current"]
        assert (older["state"], older["current"]) == ("broken", False)
        assert older["words"].startswith("Broken: of 30 answers drawn at random 30 were wrong")
        assert log.flush()
        text = (await client.get("/metrics", headers=headers)).text
        assert 'semgrad_guard_promise{calibration="older",state="broken"} 1.0' in text
        assert 'semgrad_guard_promise_grades{calibration="older"} 30.0' in text
    assert all(word in CONTENT["decisions.js"].decode() for word in ("Kept", "Not known yet", "Broken"))
