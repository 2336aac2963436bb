"""Every example and the demo run offline, from start to end, on the embedded model, and on a fetched one."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableLambda
from rich.console import Console

from langchain_semgrad_guard import demo
from langchain_semgrad_guard.demo import Demo, outcome, run
from langchain_semgrad_guard.demo.library import SHOWN, questions
from semgrad_guard import METADATA_KEY, Verdict, calibrate
from semgrad_guard.grading import Contains

from .fetched import require_smollm2
from .warm_python import WarmPython

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))
PRINTED = {
    "01_guarded_rag.py": {"answer: Paris", "escalate: Ulaanbaatar", "escalate: I don't know."},
    "02_score_and_logprobs.py": {"from elsewhere: Paris", "from elsewhere: Berlin"},
    "03_lcel_router.py": {"What is the capital of France?", "As an error"},
    "04_agent_middleware.py": {"from memory:", "after searching:"},
    "05_human_review.py": {"waiting:", "delivered: Ulaanbaatar (escalate)", "delivered: Nobody knows."},
    "06_traces.py": {"│ ChatSemGrad"},
    "07_tool_gate.py": {"rent: It is paid.   (paid: Ann)", "garage: Whom shall I pay for the garage?   (paid: nobody)"},
    "20_query_engine.py": {"What is the capital of France?", "What is the capital of Mongolia?"},
    "21_chat_engine.py": {"answer: ", "abstain: I don't know.", "remembered: ", "streamed: ", "advice: abstain"},
    "22_workflow.py": {"What is the capital of France? ", "waiting for a person: What is the capital of Mongolia?"},
    "23_function_agent.py": {
        "rent: It is paid.   (paid: Ann)",
        "garage: Whom shall I pay for the garage?   (paid: nobody)",
    },
}
"""Beginnings of lines that each example prints."""


def printed(python: WarmPython, example: Path, folder: Path, *options: str) -> list[str]:
    """The output of an example, line by line."""
    found = python.run([str(example), *options], folder=folder)
    assert found.returncode == 0, found.stderr
    return [line.strip() for line in found.stdout.splitlines()]


@pytest.mark.heavy
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_on_smollm2(warm_python: WarmPython, example: Path, tmp_path: Path) -> None:
    require_smollm2()
    assert printed(warm_python, example, tmp_path, "--model", "smollm2")


@pytest.mark.heavy
def test_the_demo_runs_on_smollm2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require_smollm2()
    assert run(tmp_path, model="smollm2") == 0
    out = " ".join(capsys.readouterr().out.split())
    delivered = re.search(r"(\d+) delivered .*?, (\d+) wrong", out)
    assert delivered is not None
    assert int(delivered[1]) >= 21  # of 42: a useful share
    assert int(delivered[2]) <= 0.14 * int(delivered[1])  # promised: .07, with probability .9
    withheld = re.search(r"withheld: (\d+) of (\d+) wrong answers", out)
    assert withheld is not None
    assert int(withheld[1]) > int(withheld[2]) / 2
    assert (tmp_path / "risk_coverage.png").stat().st_size > 10_000


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(warm_python: WarmPython, example: Path, tmp_path: Path) -> None:
    lines = printed(warm_python, example, tmp_path)
    assert lines
    assert all(any(line.startswith(start) for line in lines) for start in PRINTED.get(example.name, set())), lines


@pytest.mark.parametrize(
    ("example", "package", "extra"),
    [
        ("01_guarded_rag.py", "bm25s", "demo"),
        ("04_agent_middleware.py", "langchain", "agents"),
        pytest.param("04_agent_middleware.py", "bm25s", "demo", marks=pytest.mark.heavy),
        pytest.param("05_human_review.py", "langchain", "agents", marks=pytest.mark.heavy),
        ("06_traces.py", "opentelemetry", "tracing"),
    ],
)
def test_an_example_says_at_once_what_to_install(
    warm_python: WarmPython, example: str, package: str, extra: str, tmp_path: Path
) -> None:
    code = "import runpy, sys; sys.modules[sys.argv[1]] = None; runpy.run_path(sys.argv[2])"
    found = warm_python.run(["-c", code, package, str(ROOT / "examples" / example)], folder=tmp_path)
    assert found.returncode == 1
    assert f"pip install 'semgrad-guard[{extra}]'" in found.stderr.splitlines()[-1]


@pytest.mark.parametrize(("most", "alpha"), [(260, 0.4), pytest.param(10_000, 0.2, marks=pytest.mark.heavy)])
def test_the_demo_answers_escalates_and_abstains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, most: int, alpha: float
) -> None:
    """On a part of its questions, with a larger alpha, and in `make check-heavy` as it is."""
    pool = questions()
    part = [*(row for row in pool if row.question in SHOWN), *[row for row in pool if row.question not in SHOWN][:most]]
    monkeypatch.setattr(demo, "questions", lambda: part)
    for name in ("N_FIRST", "N_SECOND"):
        monkeypatch.setattr(demo, name, min(getattr(demo, name), most * 2 // 5))
    monkeypatch.setattr(demo, "ALPHA_LIBRARY", alpha)
    monkeypatch.setenv("COLUMNS", "160")
    assert run(tmp_path / "new folder") == 0
    printed = capsys.readouterr().out
    rows = {line[:44].strip(): line for line in printed.splitlines() if "memory" in line or "escalate" in line}
    assert "Au" in rows["Tell me the chemical symbol of gold."]
    assert "uranium.md" in rows["What atomic number does uranium have?"]
    assert "I don't know." in rows["Which city is Atlantis's capital?"]
    assert "held-out questions" in printed
    assert "semgrad-guard fetch smollm2" in printed.splitlines()[-1]
    assert (tmp_path / "new folder" / "risk_coverage.png").stat().st_size > 10_000


def test_the_demo_grades_answers_by_their_questions() -> None:
    """One that declines is neither right nor wrong."""
    (question,) = (row for row in questions() if row.question == "Do you know the capital of Mongolia?")
    record = Verdict.of(
        status="scored",
        action="answer",
        text="The capital of Mongolia is Ulaanbaatar.",
        estimator="hybridgrad",
        model="smollm2",
        uncertainty=0.1,
        promised=True,
    )
    declined = record.model_copy(update={"text": "I do not know that."})
    messages = [
        AIMessage(content=one.text, response_metadata={METADATA_KEY: one.metadata()}) for one in (record, declined)
    ]
    written = io.StringIO()
    console = Console(width=200, file=written)
    chain, calibration = RunnableLambda(lambda _: messages[0]), calibrate([0.1], [True], alpha=0.1, delta=0.1)
    shown = Demo(chain, calibration, [question] * 2, Contains(), stages=1, alpha=0.1, delta=0.1)
    outcome(console, shown, messages)
    assert "2 delivered (0 of them from the library), 0 wrong" in written.getvalue()
    assert "error 0.0% without the guard" in written.getvalue()
