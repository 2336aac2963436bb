"""The playground and the decisions, as people use them: by mouse, by keyboard, small and large, dark and light."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from conftest import SIZES, Open
from playwright.sync_api import Page, expect

expect.set_options(timeout=300_000)  # a server's first answer loads libraries, and takes as long as the machine is busy
SENTENCES = "The capital of Japan is Tokyo. It lies on a bay! Nobody knows how many rivers it has."
KNOWN, UNKNOWN, DRAFT = "What is the capital of Japan?", "What is the capital of Mongolia?", "Vienna"
PASSAGE = "The library in Halden has two floors. Its roof was painted green in 1998. It opens at nine."


def ask(page: Page, question: str, passage: str = "") -> None:
    page.get_by_label("Question").fill(question)
    if passage:
        page.get_by_text("Answer from a passage").click()
        page.get_by_label("Passage", exact=True).fill(passage)
    page.get_by_role("button", name="Ask").click()
    expect(page.locator("guard-answer dl")).to_be_visible()
    expect(page.locator("#status")).to_be_empty()


def violations(page: Page, axe: str) -> list[Any]:
    """The serious findings of axe-core. The script is evaluated from outside, past the page's own policy."""
    page.evaluate(axe)
    found = page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
    return [
        (violation["id"], [node["html"][:120] for node in violation["nodes"]])
        for violation in found["violations"]
        if violation["impact"] in ("serious", "critical")
    ]


def test_an_answer_is_let_through_and_coloured_by_token(open_page: Open) -> None:
    page = open_page("/")
    ask(page, KNOWN)
    answer = page.locator("guard-answer")
    expect(answer.locator(".verdict")).to_have_text("Let through")
    expect(answer.locator(".text")).to_contain_text("Tokyo")
    expect(answer.get_by_role("button", name="By token")).to_have_attribute("aria-pressed", "true")
    answer.locator(".text span").first.hover()
    expect(answer.get_by_role("status")).to_contain_text("had")
    expect(answer.get_by_role("status")).to_contain_text("instead:")
    answer.get_by_role("button", name="Text").click()
    expect(answer.locator(".text span")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_an_answer_is_coloured_by_sentence(open_page: Open, axe: str, pictures: Path, size: str, scheme: str) -> None:
    page = open_page("/", of="SENTENCES", size=size, scheme=scheme)
    ask(page, KNOWN)
    answer = page.locator("guard-answer")
    expect(answer.get_by_role("button", name="By token")).to_have_count(0)
    answer.get_by_role("button", name="By sentence").click()
    expect(answer.get_by_role("button", name="By sentence")).to_have_attribute("aria-pressed", "true")
    expect(answer.locator(".text")).to_have_text(SENTENCES)
    spans = answer.locator(".text span")
    sentences = {
        text.strip(): spans.nth(number) for number, text in enumerate(spans.all_text_contents()) if text.strip()
    }
    assert [*sentences] == re.findall(r"\S.*?[.!]", SENTENCES)
    values = list[float]()
    for span in sentences.values():
        span.hover()
        status = answer.get_by_role("status")
        expect(status).to_contain_text("Uncertainty of this sentence:")
        values.append(float(status.inner_text().rpartition(" ")[2]))
    shades = [span.get_attribute("class") or "" for span in sentences.values()]
    assert shades[values.index(max(values))] == "heat-4"
    assert shades[values.index(min(values))] == ""
    colours = [span.evaluate("each => getComputedStyle(each).backgroundColor") for span in sentences.values()]
    assert len(set(colours)) > 1
    spans.first.focus()
    for _ in range(spans.count() - 1):
        page.keyboard.press("ArrowRight")
    expect(spans.last).to_be_focused()
    page.screenshot(path=pictures / f"sentences-{size}-{scheme}.png", full_page=True)
    assert violations(page, axe) == []
    answer.get_by_role("button", name="Text").click()
    expect(spans).to_have_count(0)


def statuses(page: Page) -> list[str]:
    """The details of each span of the answer, as a mouse finds them."""
    found, spans = list[str](), page.locator("guard-answer .text span")
    for number in range(spans.count()):
        spans.nth(number).hover()
        found.append(page.locator("guard-answer").get_by_role("status").inner_text().strip())
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_sentences_are_shown_with_the_decisions_about_them(
    open_page: Open, axe: str, pictures: Path, scheme: str
) -> None:
    page = open_page("/", of="DROPPING", scheme=scheme)
    ask(page, KNOWN)
    answer = page.locator("guard-answer")
    expect(answer.get_by_role("button", name="By sentence")).to_have_attribute("aria-pressed", "true")
    expect(answer.locator(".text")).to_have_text(re.compile(r"^The capital of Japan is Tokyo\. .*\[…\]"))
    found = statuses(page)
    assert re.fullmatch(r"Uncertainty of this sentence: \S+\. Let through\.", found[0])
    assert "Doubtful: left out." in found
    page.screenshot(path=pictures / f"dropped-{scheme}.png", full_page=True)
    assert violations(page, axe) == []


def test_a_conversation_with_a_system_message(open_page: Open, axe: str, pictures: Path) -> None:
    page = open_page("/", size="phone")
    bodies: list[Any] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.post_data else None)
    expect(page.get_by_label("Follow up")).to_be_hidden()
    page.get_by_text("System message").click()
    page.get_by_label("Instructions before the conversation").fill("Be short.")
    ask(page, KNOWN)
    page.get_by_label("Follow up").check()
    ask(page, "And of France?")
    expect(page.get_by_label("Question")).to_have_value("")
    ask(page, "And of Italy?")
    turns = bodies[-1]["messages"]
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert [turns[0]["content"], turns[1]["content"], turns[5]["content"]] == ["Be short.", KNOWN, "And of Italy?"]
    shown = page.locator("guard-answer .turn")
    expect(shown).to_have_count(5)
    expect(shown.nth(1)).to_contain_text(turns[2]["content"])
    page.screenshot(path=pictures / "conversation-phone-light.png", full_page=True)
    assert violations(page, axe) == []
    page.locator("#history li button").last.click()
    expect(shown).to_have_count(1)
    ask(page, UNKNOWN)
    assert [turn["content"] for turn in bodies[-1]["messages"]][-1] == UNKNOWN
    assert len(bodies[-1]["messages"]) == 4
    page.get_by_label("Follow up").uncheck()
    ask(page, UNKNOWN)
    assert [turn["role"] for turn in bodies[-1]["messages"]] == ["system", "user"]


def test_reasoning_is_folded(open_page: Open, axe: str) -> None:
    page = open_page("/", of="LIVE")
    ask(page, "What do you think?")
    reasoning = page.locator("guard-answer details")
    expect(reasoning).not_to_have_attribute("open", "")
    reasoning.get_by_text("Reasoning").click()
    expect(reasoning).to_contain_text("Japan's capital is a city on a bay.")
    assert violations(page, axe) == []


def test_a_withheld_draft_is_nowhere(open_page: Open) -> None:
    page = open_page("/", of="STRICT")
    bodies: list[str] = []
    page.on("response", lambda response: bodies.append(response.text() if "/v1/" in response.url else ""))
    ask(page, UNKNOWN)
    expect(page.locator("guard-answer .verdict")).to_have_text("Withheld")
    expect(page.locator("guard-answer .text")).to_have_text("I don't know.")
    expect(page.locator("guard-answer")).to_contain_text("The model's text is not shown.")
    assert DRAFT not in page.content()
    assert not any(DRAFT in body for body in bodies)


def test_a_passage_and_the_history(open_page: Open) -> None:
    page = open_page("/")
    ask(page, "What colour is the roof?", PASSAGE)
    expect(page.locator("guard-answer .text")).not_to_be_empty()
    page.get_by_label("Passage", exact=True).fill("")
    ask(page, KNOWN)
    entries = page.locator("#history li button")
    expect(entries).to_have_count(2)
    entries.nth(1).click()
    expect(page.locator("guard-answer .verdict")).to_be_focused()
    page.reload()
    expect(page.locator("#history")).to_be_hidden()


def test_by_keyboard_alone(open_page: Open) -> None:
    page = open_page("/")
    page.get_by_label("Question").focus()
    page.keyboard.type(KNOWN)
    page.keyboard.press("Enter")
    expect(page.locator("guard-answer .verdict")).to_be_focused()
    page.keyboard.press("Tab")
    first = page.locator("guard-answer .text span").first
    expect(first).to_be_focused()
    if page.locator("guard-answer .text span").count() > 1:
        page.keyboard.press("ArrowRight")
        expect(page.locator("guard-answer .text span").nth(1)).to_be_focused()
        page.keyboard.press("ArrowLeft")
    expect(first).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.locator("guard-answer [data-view]").first).to_be_focused()


def test_markup_in_a_question_stays_text(open_page: Open) -> None:
    page = open_page("/")
    ask(page, "<img src=x onerror=\"document.title='taken'\"> What is <b>this</b>?")
    assert page.title() == "Playground · semgrad-guard"
    expect(page.locator("#history img, guard-answer img, guard-answer b")).to_have_count(0)


def test_the_server_asks_for_its_key(open_page: Open, key: str) -> None:
    page = open_page("/", of="KEYED", expected="401")
    page.get_by_label("This server takes an API key").fill("wrong-wrong-wrong-wrong")
    page.get_by_role("button", name="Use this key").click()
    page.get_by_label("This server takes an API key").fill(key)
    page.get_by_role("button", name="Use this key").click()
    expect(page.get_by_label("Model")).to_have_value("pocket")
    ask(page, KNOWN)
    assert page.evaluate("() => localStorage.length + sessionStorage.length") == 0
    assert page.context.cookies() == []


def test_decisions_are_listed_and_graded(open_page: Open) -> None:
    page = open_page("/")
    ask(page, KNOWN)
    page.get_by_role("link", name="Decisions").click()
    row = page.locator("#list tbody tr").first
    expect(row).to_contain_text("Let through")
    row.get_by_role("button", name="Right").click()
    expect(row.get_by_role("button")).to_have_count(0)
    expect(page.locator("#status")).to_contain_text("the log has not drawn it at random")
    expect(page.locator("#promises")).to_contain_text("No answer that was drawn at random is graded yet")
    page.get_by_label("Action").select_option("abstain")
    page.get_by_role("button", name="Show", exact=True).click()
    expect(page.locator("#list tbody tr").filter(has_text="Let through")).to_have_count(0)


def test_a_withheld_decision_has_no_text_and_cannot_be_graded(open_page: Open) -> None:
    page = open_page("/", of="STRICT")
    ask(page, UNKNOWN)
    page.get_by_role("link", name="Decisions").click()
    row = page.locator("#list tbody tr").first
    expect(row).to_contain_text("Withheld")
    expect(row.get_by_role("button")).to_have_count(0)
    assert DRAFT not in page.content()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("path", ["/", "/decisions"])
def test_it_is_readable(open_page: Open, axe: str, pictures: Path, path: str, size: str, scheme: str) -> None:
    page = open_page("/", size=size, scheme=scheme)
    ask(page, KNOWN)
    ask(page, UNKNOWN)
    ask(page, KNOWN)
    if path != "/":
        page.get_by_role("link", name="Decisions").click()
        expect(page.locator("#list tbody tr").first).to_be_visible()
    name = "playground" if path == "/" else "decisions"
    page.screenshot(path=pictures / f"{name}-{size}-{scheme}.png", full_page=True)
    assert violations(page, axe) == []
    wider = page.evaluate("() => document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wider <= 0
