"""The end of the help pages, below the options: examples, and the meaning of the exit codes."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """How a command ended."""

    OK = 0
    ERROR = 1
    USAGE = 2
    ABSTAINED = 3
    NO_THRESHOLD = 4
    BROKEN_LINES = 5
    UNSCORED = 6
    GATE = 7
    INTERRUPTED = 130


def code_of_run(*, unscored: object = False, broken: object, otherwise: ExitCode = ExitCode.OK) -> ExitCode:
    """How a run over a file ends: a fault of the model comes before one of the file, and that before any other."""
    return ExitCode.UNSCORED if unscored else ExitCode.BROKEN_LINES if broken else otherwise


def flowing(doc: str | None) -> str:
    """A docstring whose paragraphs are one line each: the terminal decides where they break."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in (doc or "").split("\n\n")).strip()


PROGRAM = flowing("""
Measure how sure a local language model is of each answer, and withhold the ones above a calibrated threshold.

Start with [bold]semgrad-guard ask "What is the capital of France?"[/] on the embedded model, or see the whole idea at
work with [bold]semgrad-guard demo[/].
""")

EXIT_CODES = """
[bold]Exit codes[/]
0  done; for ask: answered
1  an error, with a message on stderr that tells how to fix it
2  wrong usage
3  ask: abstained, the answer was too uncertain
4  calibrate: no threshold keeps the promise (it is saved all the same)
5  some data lines were skipped (takes precedence over 4)
6  ask, score: an answer has no score; calibrate, evaluate: none has one
7  gate: coverage or error has left the recorded band
130  interrupted by Ctrl-C (143, 129: ended by SIGTERM, SIGHUP); run again: calibrate, evaluate, probe and score --ray
     resume where they stopped, and the others begin anew
""".strip()

EPILOGS: dict[str, str] = {
    "ask": """
[bold]Examples[/]
semgrad-guard ask "What is the capital of France?"
semgrad-guard ask "Who wrote Emma?" --model ./my-model --threshold 0.002
echo "Who wrote Emma?" | semgrad-guard ask - --json

[bold]Exit codes[/]
0 answered, 3 abstained, 6 withheld, as it could not be scored, 1 error, 2 wrong usage
""",
    "score": """
[bold]Examples[/]
semgrad-guard score --question "Who wrote Emma?" --response "Jane Austen"
semgrad-guard score --data answers.jsonl --output scores.jsonl
semgrad-guard score --data answers.jsonl --calibration calibration.json
semgrad-guard score --data answers.jsonl --by sentence
cat answers.jsonl | semgrad-guard score --data - --json

[bold]A line of the file[/]
{"question": "Who wrote Emma?", "response": "Jane Austen"}

[bold]Exit codes[/]
0 done, 5 some texts were left out, 6 some have no score, 1 error, 2 wrong usage, 130 interrupted (kept with --ray)
""",
    "calibrate": """
[bold]Examples[/]
semgrad-guard calibrate --data questions.jsonl --output calibration.json
semgrad-guard calibrate --data questions.jsonl --output calibration.json --alpha 0.05 --plot risk.png

[bold]A line of the file[/] (and "context": "...", to answer from a passage)
{"question": "Who wrote Emma?", "answers": ["Jane Austen", "Austen"]}

With alpha = delta = 0.1 you need at least 23 questions; [bold]semgrad-guard plan[/] tells how many are enough. Every answer is kept as it comes: after Ctrl-C, run the same command again.

[bold]Exit codes[/]
0 done, 4 no threshold keeps the promise, 5 some lines were broken, 6 no answer could be scored, 1 error, 2 wrong usage, 130 interrupted
""",  # noqa: E501  # a paragraph must be one line: the terminal breaks it
    "evaluate": """
[bold]Examples[/]
semgrad-guard evaluate --data questions.jsonl --output results
semgrad-guard evaluate --data questions.csv --output results --methods hybridgrad --methods gnll
semgrad-guard evaluate --output results --regrade --grader rouge-l --grader judge=openai:gpt-4.1
semgrad-guard evaluate --output results --regrade --labels results/labels.csv

[bold]A line of the file[/] (and "kind": "...", to tell sorts of questions apart)
{"question": "Who wrote Emma?", "answers": ["Jane Austen", "Austen"]}

Every answer is kept as it comes: after Ctrl-C, run the same command again. People grade in results/labels.csv, which is never overwritten.

[bold]Exit codes[/]
0 done, 5 some lines were broken, 6 no answer could be scored, 1 error, 2 wrong usage, 130 interrupted
""",  # noqa: E501  # a paragraph must be one line: the terminal breaks it
    "gate": """
[bold]Examples[/]
semgrad-guard gate --calibration calibration.json --data questions.jsonl --band band.json --record
semgrad-guard gate --calibration calibration.json --data questions.jsonl --band band.json

Give the model, prompt and options of the calibration. Other questions than those that it was made from tell more.

[bold]Exit codes[/]
0 inside the band, or recorded, 7 outside, 1 an error (the calibration does not fit, a broken line, other questions), 2 wrong usage, 130 interrupted
""",  # noqa: E501  # a paragraph must be one line: the terminal breaks it
    "probe": """
[bold]Examples[/]
semgrad-guard probe --data questions.jsonl --output probe.json
semgrad-guard probe --data questions.jsonl --output probe.json --model ./my-model --no-answers

[bold]A line of the file[/]
{"question": "Who wrote Emma?", "paraphrases": ["Emma was written by whom?"], "answers": ["Jane Austen"]}

The token that the chat template itself points to is kept unless graded answers speak against it; fifty right and fifty wrong ones can. After Ctrl-C, run the same command again.

[bold]Exit codes[/]
0 done, 5 some lines were broken, 1 error, 2 wrong usage, 130 interrupted
""",  # noqa: E501  # a paragraph must be one line: the terminal breaks it
    "serve": """
[bold]Examples[/]
semgrad-guard serve
semgrad-guard serve --model ./my-model --calibration calibration.json
semgrad-guard serve --upstream http://localhost:8080/v1 --scorer ./my-model --threshold 0.002
semgrad-guard serve --escalate-to https://other.example/v1#large

[bold]Exit codes[/]
0 ended by a signal, requests that had begun are finished; 1 error, 2 wrong usage
""",
    "decisions": """
[bold]Examples[/]
semgrad-guard decisions
semgrad-guard decisions --since 24h --json
semgrad-guard decisions --since 30d --csv > decisions.csv

[bold]Exit codes[/]
0 done, 1 error, 2 wrong usage
""",
    "sample": """
[bold]Examples[/]
semgrad-guard sample --output sheet.csv
semgrad-guard sample --size 100 --since 30d --output sheet.csv

[bold]Exit codes[/]
0 done, 1 error, 2 wrong usage
""",
    "recalibrate": """
[bold]Examples[/]
semgrad-guard recalibrate --calibration calibration.json --output proposed.json
semgrad-guard recalibrate --calibration calibration.json --since 2026-11-01 --output proposed.json

[bold]Exit codes[/]
0 done, 4 no threshold keeps the promise (it is saved all the same), 1 error, 2 wrong usage
""",
    "feedback": """
[bold]Examples[/]
semgrad-guard feedback sheet.csv
semgrad-guard feedback complaints.csv --sampling user

[bold]Exit codes[/]
0 done, 1 error, 2 wrong usage, 5 some rows could not be taken
""",
    "plan": """
[bold]Examples[/]
semgrad-guard plan --error 0.2 --auroc 0.8
semgrad-guard plan --error 0.3 --auroc 0.75 --alpha 0.2 --labels 150 --json

[bold]Exit codes[/]
0 done, 2 wrong usage
""",
    "fetch": """
[bold]Examples[/]
semgrad-guard fetch smollm2
semgrad-guard ask "Who wrote Emma?" --model smollm2

[bold]Exit codes[/]
0 done, or there already, 1 error, 2 wrong usage, 130 interrupted (nothing is kept)
""",
    "demo": """
[bold]Examples[/]
semgrad-guard demo
semgrad-guard demo --output ./demo
semgrad-guard fetch smollm2; semgrad-guard demo --model smollm2

[bold]Exit codes[/]
0 done, 1 error, 130 interrupted
""",
}
"""The end of the help page of each command."""
