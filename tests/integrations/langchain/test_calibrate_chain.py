"""A chain calibrated on its real prompts: the scores that count, the record, and the prompts that are promised."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnableParallel, RunnablePassthrough

from langchain_semgrad_guard import ChatSemGrad, GuardedChatModel, acalibrate_chain, calibrate_chain, get_verdict
from semgrad_guard import LanguageModel, Policy
from semgrad_guard.errors import CalibrationError, InputError
from semgrad_guard.evaluation.graders.by_name import TokenF1
from semgrad_guard.guard import decide, recording
from semgrad_guard.records import Verdict

from .support import metadata_of

Example = tuple[dict[str, str], list[str]]

PROMPT = ChatPromptTemplate.from_template("Question: {question}\nContext: {context}")
EXAMPLES = [(f"Who is number {number}?", "nobody") for number in range(8)]
RATES = {"alpha": 0.3, "delta": 0.2, "progress": False}


def wrong(text: str, answers: Sequence[str]) -> bool:
    """A grader by function: everything is wrong."""
    return False


def plain(chat: ChatSemGrad) -> Runnable[Any, str]:
    """The simplest chain."""
    return ChatPromptTemplate.from_template("{input}") | chat | StrOutputParser()


def two_calls(chat: ChatSemGrad) -> Runnable[Any, str]:
    """A chain that writes the question anew, by one model, before it answers, by the same."""
    rewrite = ChatPromptTemplate.from_template("rewrite {input}") | chat.with_config(tags=["rewriting"])
    answer = ChatPromptTemplate.from_template("answer {text}") | chat.with_config(run_name="answering")
    return rewrite | RunnableLambda(lambda reply: {"text": reply.text[:20]}) | answer | StrOutputParser()


def invented(rng: random.Random) -> Example:
    """A question about an invented passage."""
    name = rng.choice(["Ada", "Bela", "Cyrus", "Dora", "Emil", "Fatima", "Goran", "Hanna", "Igor", "Jana", "Karl"])
    home, town = rng.sample(["Ulm", "Graz", "Oslo", "Riga", "Lyon", "Bern", "Turin", "Porto", "Cadiz", "Gdansk"], 2)
    thing, year = rng.choice(["bridge", "tower", "school", "library", "station", "harbour"]), rng.randint(1810, 1999)
    context = f"The {thing} of {town} was built by {name} in {year}. {name} was born in {home}."
    question, answer = rng.choice(
        [
            (f"Who built the {thing} of {town}?", name),
            (f"When was the {thing} of {town} built?", str(year)),
            (f"Where was {name} born?", home),
        ]
    )
    return {"question": question, "context": context}, [answer]


def decisions(chain: Runnable[Any, Any], inputs: Sequence[Any], policy: Policy) -> list[Verdict]:
    """A policy's verdicts on every draft of a chain's runs, in an order of their prompts: runs end in any order."""
    with recording() as recorder:
        chain.batch(list(inputs), {"max_concurrency": 16})
    drafts = sorted(recorder.drafts, key=lambda draft: draft.verdict.prompt or "")
    return [decide(draft.verdict, policy, can_escalate=False, prompt=draft.prompt) for draft in drafts]


def doubtful(rng: random.Random) -> Example:
    """Such a question; three passages in ten do not tell."""
    given, answers = invented(rng)
    if rng.random() < 0.3:
        given["context"] = "Nobody remembers who built it, and no book tells of those years any more."
    return given, answers


def test_the_chain_keeps_its_promise_and_other_prompts_have_none() -> None:
    chat, rng, alpha = ChatSemGrad(model="pocket", max_tokens=16), random.Random(1), 0.1
    chain = PROMPT | chat | StrOutputParser()
    calibration = calibrate_chain(
        chain,
        [doubtful(rng) for _ in range(150)],
        "token-f1",
        alpha=alpha,
        delta=0.1,
        max_concurrency=16,
        progress=False,
    )
    assert calibration.threshold is not None
    assert calibration.binding is not None
    assert calibration.binding.grader == "token-f1>=0.5"
    assert calibration.binding.fingerprint == chat.language_model.identity.fingerprint
    policy, held_out = Policy.from_calibration(calibration), [doubtful(rng) for _ in range(100)]
    later = [given for given, _ in held_out]
    guarded = PROMPT | GuardedChatModel(chat, policy, keep_draft=True)
    verdicts = [get_verdict(message) for message in guarded.batch(later, {"max_concurrency": 16})]
    notified = [
        (verdict, answers) for verdict, (_, answers) in zip(verdicts, held_out, strict=True) if verdict is not None
    ]
    assert len(notified) == 100
    answered = [(verdict, answers) for verdict, answers in notified if verdict.action == "answer"]
    is_right = TokenF1()
    assert sum(verdict.promised for verdict, _ in answered) >= 0.99 * len(answered) > 50
    assert sum(not is_right(verdict.text, answers) for verdict, answers in answered) <= alpha * len(answered)
    unguarded = sum(not is_right(verdict.draft or verdict.text, answers) for verdict, answers in notified)
    assert unguarded > 2 * alpha * len(notified), "without a guard the promise would be broken"
    system = ChatPromptTemplate.from_messages([("system", "Be brief."), *PROMPT.messages]) | chat
    closed_book = ChatPromptTemplate.from_template("{question}") | chat
    for other in (system, closed_book):
        assert not any(verdict.promised for verdict in decisions(other, later[:8], policy))
    renamed = decisions(PROMPT | chat.model_copy(update={"prompt_template": "other"}), later[:8], policy)
    own = decisions(chain, later[:8], policy)
    assert [verdict.promised for verdict in renamed] == [verdict.promised for verdict in own], "a name is a name"
    assert any(verdict.promised for verdict in own)


@pytest.mark.parametrize("at_once", [1, 3])
def test_scores_are_those_of_the_chains_own_prompts(chat: ChatSemGrad, at_once: int, tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    calibrate_chain(plain(chat), EXAMPLES, wrong, record=record, max_concurrency=at_once, **RATES)
    for (given, _), line in zip(EXAMPLES, record.read_text().splitlines()[1:], strict=True):
        answered = json.loads(line)
        assert answered["text"] == chat.invoke(given).text
        assert answered["prompt"]["text"] == chat.language_model.render(given).text
        assert answered["uncertainty"] == pytest.approx(metadata_of([chat.invoke(given)])[0]["uncertainty"], rel=1e-3)


def test_the_asynchronous_twin_finds_the_same(chat: ChatSemGrad) -> None:
    chain = plain(chat)
    one = calibrate_chain(chain, EXAMPLES, wrong, **RATES)
    other = asyncio.run(acalibrate_chain(chain, EXAMPLES, wrong, **RATES))
    assert one == other
    assert one.n == one.n_wrong == len(EXAMPLES)
    assert one.shape is not None
    assert one.shape.n == len(EXAMPLES)


@pytest.mark.parametrize("at_once", [1, 4])
def test_an_example_with_several_calls_needs_a_choice(chat: ChatSemGrad, at_once: int) -> None:
    chain, how = two_calls(chat), {**RATES, "max_concurrency": at_once}
    with pytest.raises(CalibrationError, match=r"2 scored calls.*answering.*rewriting") as raised:
        calibrate_chain(chain, EXAMPLES, wrong, **how)
    assert "example 1 of 8" in str(raised.value.__notes__)
    with pytest.raises(CalibrationError, match="has the label 'elsewhere'"):
        calibrate_chain(chain, EXAMPLES, wrong, answering="elsewhere", **how)
    answering = calibrate_chain(chain, EXAMPLES, wrong, answering="answering", **how)
    rewriting = calibrate_chain(chain, EXAMPLES, wrong, answering="rewriting", **how)
    worst = calibrate_chain(chain, EXAMPLES, wrong, aggregate="max", **how)
    assert answering.scores != rewriting.scores
    close = pytest.approx(max(*answering.scores, *rewriting.scores), rel=2e-5)  # of batches of other rows
    assert max(worst.scores) == close
    assert min(worst.scores) >= min(*answering.scores, *rewriting.scores) * (1 - 2e-5)


def test_calls_side_by_side_are_told_apart(chat: ChatSemGrad) -> None:
    first = ChatPromptTemplate.from_template("first {input}") | chat.with_config(tags=["first"])
    second = ChatPromptTemplate.from_template("second {input}") | chat.with_config(tags=["second"])
    chain = RunnableParallel(a=first, b=second) | itemgetter("a")
    found = calibrate_chain(chain, EXAMPLES, wrong, answering="first", max_concurrency=4, **RATES)
    alone = calibrate_chain(first, EXAMPLES, wrong, **RATES)
    assert found.scores == pytest.approx(alone.scores, rel=1e-3)


def test_a_chain_that_scores_nothing_says_so(chat: ChatSemGrad, cache: InMemoryCache) -> None:
    alone = calibrate_chain(plain(chat), EXAMPLES, wrong, **RATES)
    with pytest.raises(CalibrationError, match="Example 1 made no scored call"):
        calibrate_chain(RunnableLambda(lambda given: f"{given}!"), EXAMPLES, wrong, **RATES)
    again = calibrate_chain(plain(chat), EXAMPLES, wrong, **RATES)
    assert again.scores == alone.scores, "an answer from the cache carries its score"


def test_an_interrupted_run_goes_on_from_its_record(chat: ChatSemGrad, tmp_path: Path) -> None:
    record, given, broken = tmp_path / "record.jsonl", list[str](), {EXAMPLES[5][0]}

    def watched(question: str) -> str:
        given.append(question)
        if question in broken:
            raise ConnectionError("the retriever is away")
        return question

    chain = RunnableLambda(watched) | plain(chat)
    whole = calibrate_chain(plain(chat), EXAMPLES, wrong, max_concurrency=2, **RATES)
    with pytest.raises(ConnectionError) as raised:
        calibrate_chain(chain, EXAMPLES, wrong, record=record, max_concurrency=2, **RATES)
    assert "example 6 of 8" in str(raised.value.__notes__)
    assert len(record.read_text().splitlines()) == 1 + 5
    assert os.name != "posix" or not record.stat().st_mode & 0o077, "answers are their owner's alone"
    record.write_bytes(record.read_bytes()[:-9])  # a kill cut the last line short
    given.clear()
    broken.clear()
    notified: list[tuple[int, int]] = []
    progress = lambda done, total: notified.append((done, total))  # noqa: E731
    again = calibrate_chain(chain, EXAMPLES, wrong, record=record, max_concurrency=2, **{**RATES, "progress": progress})
    recorded, rest = given[:3], given[3:]
    assert (recorded[0], recorded[2]) == (EXAMPLES[0][0], EXAMPLES[3][0]), "some recorded inputs are tried again"
    assert sorted(rest) == [question for question, _ in EXAMPLES[4:]]
    assert (again.n_recorded, whole.n_recorded) == (4, 0)
    assert notified == [(4, 8), (6, 8), (8, 8)]
    assert again.scores == pytest.approx(whole.scores, rel=1e-3)


def test_calibrations_on_one_record_share_delta(chat: ChatSemGrad, tmp_path: Path) -> None:
    chain, record = plain(chat), tmp_path / "record.jsonl"
    alphas = (0.2, 0.2, 0.3)
    made = [calibrate_chain(chain, EXAMPLES, wrong, record=record, **{**RATES, "alpha": alpha}) for alpha in alphas]
    assert [one.tries for one in made] == [1, 1, 2], "one that is repeated as it was is no further try"
    turned = calibrate_chain(chain, EXAMPLES[::-1], wrong, record=record, **{**RATES, "alpha": 0.2})
    assert turned.tries == 3, "another order splits otherwise between learning and threshold"
    own = calibrate_chain(chain, EXAMPLES, wrong, record=record, tries=7, copies="keep", **RATES)
    assert (own.tries, own.copies) == (7, "keep")


def test_each_kind_of_example_has_a_promise_of_its_own(chat: ChatSemGrad) -> None:
    kinds = ["law"] * 6 + ["rare"] * 2
    found = calibrate_chain(plain(chat), EXAMPLES, lambda text, answers: True, kind=kinds, **RATES)
    assert {kind: (one.n, one.threshold is None) for kind, one in found.kinds.items()} == {
        "law": (6, False),
        "rare": (2, True),
    }
    with pytest.raises(InputError, match="8 texts, not 2"):
        calibrate_chain(plain(chat), EXAMPLES, wrong, kind=["a", "b"], **RATES)


def test_a_record_of_something_else_is_refused(chat: ChatSemGrad, larger: LanguageModel, tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    calibrate_chain(plain(chat), EXAMPLES[:3], wrong, record=record, **RATES)
    kept = record.read_bytes()
    other_prompt = ChatPromptTemplate.from_template("Please: {input}") | chat | StrOutputParser()
    with pytest.raises(InputError, match="not a record of"):
        calibrate_chain(other_prompt, EXAMPLES[:3], wrong, record=record, **RATES)
    with pytest.raises(InputError, match="not a record of"):
        calibrate_chain(plain(chat), EXAMPLES[:3], wrong, record=record, aggregate="max", **RATES)
    with pytest.raises(InputError, match="answers an input that is not among the examples"):
        calibrate_chain(plain(chat), EXAMPLES[1:], wrong, record=record, **RATES)
    for changed in (
        RunnableLambda(str.upper) | plain(chat),
        RunnableLambda[str, str](lambda given: given[:-1]) | plain(chat),
    ):
        with pytest.raises(InputError, match="not a record of"):
            calibrate_chain(changed, EXAMPLES[:3], wrong, record=record, **RATES)
    other_model = ChatSemGrad.from_model(larger, max_tokens=12)
    with pytest.raises(InputError, match="not a record of"):
        calibrate_chain(plain(other_model), EXAMPLES, wrong, record=record, **RATES)
    assert record.read_bytes() == kept
    (tmp_path / "notes.txt").write_text("my notes\n")
    with pytest.raises(InputError, match="not a record of"):
        calibrate_chain(plain(chat), EXAMPLES, wrong, record=tmp_path / "notes.txt", **RATES)


def test_repeated_inputs_are_asked_and_counted_once(chat: ChatSemGrad) -> None:
    found = calibrate_chain(plain(chat), [*EXAMPLES, EXAMPLES[0]], wrong, **RATES)
    assert (found.n, found.n_duplicates) == (8, 1)


def test_forms_of_examples_graders_and_outputs(chat: ChatSemGrad) -> None:
    texts = [{"input": given, "answers": [chat.invoke(given).text, "or this"]} for given, _ in EXAMPLES]
    by_name = calibrate_chain(chat, texts, "exact-match", **RATES)
    assert (by_name.n, by_name.n_wrong) == (8, 0)
    by_function = calibrate_chain(chat, texts, lambda text, answers: text in answers, **RATES)
    assert by_function.n_wrong == 0
    assert by_function.binding is not None
    assert str(by_function.binding.grader).endswith("<lambda>")
    state = chat | RunnableLambda(lambda reply: {"messages": ["asked", reply]})
    assert calibrate_chain(state, texts, "exact-match", **RATES).n_wrong == 0
    answer = chat | RunnableLambda(lambda reply: {"answer": reply.text, "context": []})
    assert calibrate_chain(answer, texts, "exact-match", **RATES).n_wrong == 0
    hidden = chat | RunnableLambda(lambda reply: [reply])
    with pytest.raises(InputError, match="output="):
        calibrate_chain(hidden, texts, "exact-match", **RATES)
    assert calibrate_chain(hidden, texts, "exact-match", output=lambda reply: reply[0].text, **RATES).n_wrong == 0


@pytest.mark.parametrize("nowhere", [[], None, "I don't know"])
@pytest.mark.parametrize("grader", ["contains", lambda text, answers: answers[0] in text])
def test_where_no_answer_is_right_an_abstention_is(chat: ChatSemGrad, grader: Any, nowhere: object) -> None:
    reply = iter(["The documents do not say.", "Narnia Airways", "I'm sorry, but I don't have that information."])
    examples = [("Which airline?", nowhere), ("And now?", nowhere), ("Who?", "Jane Austen")]
    made = calibrate_chain(chat, examples, grader, output=lambda _: next(reply), **RATES)
    assert (made.n, made.n_wrong) == (3, 2)


@pytest.mark.parametrize(
    ("examples", "changes", "says"),
    [
        ([], {}, "no examples"),
        ([("asked",)], {}, "example 1 is neither"),
        ([{"input": "asked"}], {}, 'needs the keys "input" and "answers"'),
        ([("asked", "")], {}, "None or \\[\\] where no answer is right"),
        ([("asked", [3])], {}, "needs a right answer"),
        (EXAMPLES, {"reps": 3}, "takes no reps; it takes confidence"),
        (EXAMPLES, {"max_concurrency": 0}, "at least 1"),
        (EXAMPLES, {"aggregate": "mean"}, "aggregate must be"),
        (EXAMPLES, {"record": "no/such/folder/record.jsonl"}, "Cannot write"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    chat: ChatSemGrad, examples: list[Any], changes: dict[str, Any], says: str
) -> None:
    def never(_: Any) -> str:
        raise AssertionError("nothing may run")

    with pytest.raises(InputError, match=says):
        calibrate_chain(RunnableLambda(never) | chat, examples, "exact-match", **{**RATES, **changes})
    with pytest.raises(InputError, match="no grader 'bleu'"):
        calibrate_chain(RunnableLambda(never) | chat, EXAMPLES, "bleu", **RATES)
    with pytest.raises(CalibrationError, match="alpha"):
        calibrate_chain(RunnableLambda(never) | chat, EXAMPLES, "exact-match", **{**RATES, "alpha": 1.0})


def test_progress_on_stderr(chat: ChatSemGrad, capsys: pytest.CaptureFixture[str]) -> None:
    calibrate_chain(plain(chat), EXAMPLES, wrong, alpha=0.3, delta=0.2)
    shown = capsys.readouterr().err
    assert shown.startswith("\rAnswering: 0 of 8")
    assert "8 of 8" in shown
    assert " a second, " in shown


class Library(BaseRetriever):
    """A retriever: its passages are in a table, their number in a field."""

    texts: dict[str, str]
    k: int = 1

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return [Document(self.texts.get(query, "nothing"))] * self.k


def looked_up(chat: ChatSemGrad, texts: dict[str, str], k: int = 1) -> Runnable[Any, str]:
    """A chain that retrieves before it answers."""
    found = Library(texts=texts, k=k) | RunnableLambda[Any, str](lambda found: "\n".join(map(str, found)))
    prompt = ChatPromptTemplate.from_template("{context} {input}")
    return RunnableParallel(context=found, input=RunnablePassthrough()) | prompt | chat | StrOutputParser()


CHANGED: dict[str, Callable[[ChatSemGrad, dict[str, str]], tuple[Runnable[Any, str], dict[str, Any]]]] = {
    "documents": lambda chat, texts: (looked_up(chat, dict.fromkeys(texts, "other")), {}),
    "k": lambda chat, texts: (looked_up(chat, texts, 2), {}),
    "max_tokens": lambda chat, texts: (looked_up(chat.model_copy(update={"max_tokens": 1}), texts), {}),
    "output": lambda chat, texts: (looked_up(chat, texts), {"output": lambda reply: reply[:1]}),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_record_belongs_to_the_whole_chain(chat: ChatSemGrad, tmp_path: Path, name: str) -> None:
    record, texts = tmp_path / "record.jsonl", {question: f"Text {i}." for i, (question, _) in enumerate(EXAMPLES)}
    first = calibrate_chain(looked_up(chat, texts), EXAMPLES, wrong, record=record, **RATES)
    same = calibrate_chain(looked_up(chat, texts), EXAMPLES, wrong, record=record, **RATES)
    assert (first.n_recorded, same.n_recorded) == (0, len(EXAMPLES))
    chain, more = CHANGED[name](chat, texts)
    with pytest.raises(InputError, match="not a record of"):
        calibrate_chain(chain, EXAMPLES, wrong, record=record, **RATES, **more)
