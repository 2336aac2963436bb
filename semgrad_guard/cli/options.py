"""The options that several commands share."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from semgrad_guard.cli import values
from semgrad_guard.estimators import KINDS, NEEDS_LABELS
from semgrad_guard.guard.modes import OnUnscored as OnUnscoredAction

# The groups in which `--help` lists options.
MODEL = "Model"
CLUSTER = "Cluster"
DATA = "Data and files"
UNCERTAINTY = "Uncertainty"
DECISION = "Decision"
GRADING = "Grading"
ANSWERS = "Answers"
OUTPUT = "What is shown"
LOG = "Decision log"

ESTIMATOR_NAMES = tuple(name for name in KINDS if name not in NEEDS_LABELS)
METHOD_NAMES = (*ESTIMATOR_NAMES, *sorted(NEEDS_LABELS))
LEARNED_NAMES = (*METHOD_NAMES, "auto")
DtypeName = Literal["float32", "bfloat16", "float16"]
GraderName = Literal["contains", "exact-match", "token-f1", "rouge-l"]

DEFAULT_GRADER = "contains; exact-match without a chat template"
MODEL_HELP = (
    '"pocket" (the embedded model), "smollm2" (SmolLM2-135M-Instruct in four bits, once fetched), a folder with '
    "safetensors, a GGUF file, or a Hugging Face hub id"
)

Model = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        parser=values.source,
        help=f"{MODEL_HELP}.",
        rich_help_panel=MODEL,
    ),
]
Dtype = Annotated[
    DtypeName | None,
    typer.Option(
        metavar="NAME",
        help="float32, bfloat16 or float16, if not the checkpoint's own. Scores follow it.",
        rich_help_panel=MODEL,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        parser=values.source,
        help="Where the model goes: cpu, cuda, cuda:1.",
        rich_help_panel=MODEL,
    ),
]
QuantizationConfig = Annotated[
    dict[str, Any] | None,
    typer.Option(
        metavar="JSON",
        parser=values.quantization,
        help='Quantize the weights while they are loaded, as transformers takes it: {"quant_method": "bitsandbytes", '
        '"load_in_4bit": true}; @FILE reads it from a file.',
        rich_help_panel=MODEL,
    ),
]
Engine = Annotated[
    dict[str, Any] | None,
    typer.Option(
        metavar="vllm[=JSON]",
        parser=values.engine,
        help='Have vLLM write the answers (docs/vllm.md); with arguments of vllm.LLM: vllm={"max_model_len": 4096}.',
        show_default="transformers",
        rich_help_panel=MODEL,
    ),
]
TemplateOption = Annotated[
    list[Any] | None,
    typer.Option(
        metavar="NAME=VALUE",
        parser=values.template_option,
        help="Told to the chat template with every prompt, the value in JSON: enable_thinking=false turns thinking "
        "off where the template has that switch. Repeat the option for several.",
        rich_help_panel=MODEL,
    ),
]
ProbeFile = Annotated[
    Path | None,
    typer.Option(
        "--probe",
        metavar="FILE",
        parser=values.path,
        help="Made by `probe`: the token it recommends is used.",
        rich_help_panel=MODEL,
    ),
]
_NAMES = ", ".join(ESTIMATOR_NAMES)
EstimatorOption = Annotated[
    str | None,
    typer.Option(
        "--estimator",
        parser=values.one_of(ESTIMATOR_NAMES),
        autocompletion=values.completing(ESTIMATOR_NAMES),
        metavar="NAME",
        help=f"How uncertainty is measured: {_NAMES}.",
        show_default="the calibration's, or hybridgrad",
        rich_help_panel=UNCERTAINTY,
    ),
]
LearnedEstimatorOption = Annotated[
    str,
    typer.Option(
        "--estimator",
        parser=values.one_of(LEARNED_NAMES),
        autocompletion=values.completing(LEARNED_NAMES),
        metavar="NAME",
        help=f"How uncertainty is measured: {_NAMES}; states or fused, which are fitted on a part of the answers "
        "(states needs no gradients); or auto, the best of eight of these on that part.",
        rich_help_panel=UNCERTAINTY,
    ),
]
Variant = Annotated[
    Literal["paper", "official"] | None,
    typer.Option(
        metavar="NAME",
        help="The gradients of hybridgrad, semgrad, paragrad, exgrad or fused: the paper's, or its published code's.",
        show_default="the calibration's, or paper",
        rich_help_panel=UNCERTAINTY,
    ),
]
Tau = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        parser=values.number(0, math.inf, open_below=True),
        help="hybridgrad's: a small one leans to SemGrad, a large one to ParaGrad.",
        show_default="the calibration's, or 1",
        rich_help_panel=UNCERTAINTY,
    ),
]
Beta = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        parser=values.number(0, math.inf),
        help="hybridgrad's: the weight of ParaGrad.",
        show_default="the calibration's, or 1",
        rich_help_panel=UNCERTAINTY,
    ),
]
SampledRows = Annotated[
    int | None,
    typer.Option(
        parser=values.whole(2, 10_000_000),
        metavar="N",
        help="Estimate ParaGrad from N rows of the output head (2,000 to 4,000): a little faster, with an error bar.",
        show_default="the calibration's, or all",
        rich_help_panel=UNCERTAINTY,
    ),
]
By = Annotated[
    Literal["sentence", "clause"] | None,
    typer.Option(
        metavar="UNIT",
        help="Score every sentence or clause of a text by itself, and mark the doubtful ones.",
        rich_help_panel=UNCERTAINTY,
    ),
]
CalibrationFile = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        parser=values.path,
        help="Made by `calibrate`: gives confidence, a threshold and its promise.",
        rich_help_panel=DECISION,
    ),
]
Threshold = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        parser=values.number(-math.inf, math.inf),
        help="Let through uncertainties at or below this one; promises nothing.",
        rich_help_panel=DECISION,
    ),
]
OnUnscored = Annotated[
    OnUnscoredAction,
    typer.Option(
        metavar="ACTION",
        help="What to do with an answer that cannot be scored: abstain, escalate (abstain where there is no target), "
        "or deliver it without a promise.",
        rich_help_panel=DECISION,
    ),
]
MaxTokens = Annotated[
    int,
    typer.Option(
        "--max-tokens",
        parser=values.whole(1, 1_000_000),
        metavar="N",
        help="The longest answer, in tokens.",
        rich_help_panel=ANSWERS,
    ),
]
Temperature = Annotated[
    float,
    typer.Option(
        metavar="X",
        parser=values.number(0, 100),
        help="0 always takes the likeliest token; above 0 samples.",
        rich_help_panel=ANSWERS,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        parser=values.whole(0, 2**31 - 1), metavar="N", help="Repeats a sampled answer.", rich_help_panel=ANSWERS
    ),
]
System = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        parser=values.text,
        help="A system message before the question; @FILE reads it from a file.",
        rich_help_panel=ANSWERS,
    ),
]
Prompt = Annotated[
    str,
    typer.Option(
        metavar="TEXT",
        parser=values.wording,
        autocompletion=values.completing(("plain", "paper")),
        help="plain, paper (answer in few words), or the user's turn as your program words it, with {question} and "
        "perhaps {context} in it, and other braces doubled; @FILE reads it from a file.",
        rich_help_panel=ANSWERS,
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT",
        parser=values.some_text,
        help="Stop the answer before this text. Repeat the option for several texts.",
        rich_help_panel=ANSWERS,
    ),
]
FewShot = Annotated[
    Path | None,
    typer.Option(
        "--few-shot",
        metavar="FILE",
        parser=values.path,
        help="Examples that go before every question, as turns: questions and answers as in --data.",
        rich_help_panel=ANSWERS,
    ),
]
Shots = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=values.whole(1, 1000),
        help="How many of the examples, from the first on.",
        show_default="all",
        rich_help_panel=ANSWERS,
    ),
]
Labels = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        parser=values.stream,
        help="A sheet of labels, filled in by people: it decides then. It is begun, or extended by the answers that it "
        "lacks, and never overwritten.",
        rich_help_panel=GRADING,
    ),
]
QuestionField = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        parser=values.text,
        help="The column with the question, if its name is not a usual one (question, query, user_input, ...).",
        rich_help_panel=DATA,
    ),
]
AnswersField = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        parser=values.text,
        help="The column with the references, if its name is not a usual one (answers, ground_truth, reference, ...).",
        rich_help_panel=DATA,
    ),
]
ContextField = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        parser=values.passage_field,
        help="The column with the passage to answer from, if its name is not a usual one (context, contexts, ...).",
        rich_help_panel=DATA,
    ),
]
BatchSize = Annotated[
    int,
    typer.Option(
        parser=values.whole(1, 1_000_000), metavar="N", help="Questions answered at once.", rich_help_panel=ANSWERS
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="[ADDRESS]",
        parser=values.source,
        help="Spread the work over a Ray cluster: auto, HOST:PORT or ray://HOST:PORT. Without an address, one starts "
        "in this process.",
        rich_help_panel=CLUSTER,
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        parser=values.whole(1, 1_000_000),
        metavar="N",
        help="With --ray: how many processes load the model. They share the CPUs, or the GPUs.",
        show_default="one a GPU, or one a machine without",
        rich_help_panel=CLUSTER,
    ),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Stop at the first broken line of the data file.", rich_help_panel=DATA)
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout and nothing else there.", rich_help_panel=OUTPUT)]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="On stderr errors and warnings only.", rich_help_panel=OUTPUT)
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        help="On stderr also what libraries say, times, and where an error began.",
        rich_help_panel=OUTPUT,
    ),
]
LogAddress = Annotated[
    str | None,
    typer.Option(
        "--log",
        metavar="FILE",
        parser=values.source,
        envvar="SEMGRAD_GUARD_LOG",
        help="The decision log: a file (SQLite), or a URL such as postgresql+psycopg://user@host/name; also as "
        "SEMGRAD_GUARD_LOG in the environment.",
        show_default="semgrad-guard/decisions.db in your state folder",
        rich_help_panel=LOG,
    ),
]
