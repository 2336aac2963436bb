"""A real browser and real servers; `scripts/check_browser.py` starts the servers and names them in the environment."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright
from required import pytest_addoption as pytest_addoption
from required import pytest_runtest_makereport as pytest_runtest_makereport

HERE = Path(__file__).parent
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
SIZES = {"phone": {"width": 390, "height": 844}, "desktop": {"width": 1440, "height": 900}}
Open = Callable[..., Page]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The system's Chromium."""
    found = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
    if found is None:
        pytest.skip("there is no Chromium here (Debian: apt-get install chromium)")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, headless=True, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """`open_page("/", of="OPEN", size="phone", scheme="dark")`: a page of a server, in a profile of its own.

    After the test: no request went to another host, and the browser had nothing to complain about.
    """
    contexts: list[BrowserContext] = []
    complaints: list[str] = []

    def start(path: str, *, of: str = "OPEN", size: str = "desktop", scheme: str = "light", expected: str = "") -> Page:
        base = os.environ[f"SEMGRAD_GUARD_TEST_{of}"].removesuffix("/v1")
        context = browser.new_context(
            viewport=SIZES[size], color_scheme=scheme, reduced_motion="reduce", bypass_csp=False
        )
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: None if request.url.startswith(base) else complaints.append(request.url))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console",
            lambda message: (
                complaints.append(message.text)
                if message.type == "error" and not (expected and expected in message.text)
                else None
            ),
        )
        page.goto(base + path)
        return page

    yield start
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture
def key() -> str:
    """Opens the server SEMGRAD_GUARD_TEST_KEYED."""
    return os.environ["SEMGRAD_GUARD_TEST_KEY"]


@pytest.fixture(scope="session")
def pictures() -> Path:
    """Where screenshots are put."""
    folder = Path(os.environ["SEMGRAD_GUARD_TEST_PICTURES"])
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def axe() -> str:
    """axe-core's script."""
    path = HERE / "node_modules" / "axe-core" / "axe.min.js"
    if not path.is_file():
        pytest.skip("axe-core is not installed (npm install in scripts/browser_pages)")
    return path.read_text(encoding="utf-8")
