"""The options of models, answers, estimators and policies: each is declared here, once (a server's own are in
`semgrad_guard.server.settings`).

An option is a field of one of these classes, with its type, bounds, default and description. The engine, the guard, the
command line, the server, Ray and both integrations derive theirs: they inherit the field, or take its type and default.
An option with a panel is one of the command line, too. Importing this loads neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from semgrad_guard.declared import Bounds, Option
from semgrad_guard.named import POCKET

MODEL, UNCERTAINTY, DECISION, ANSWERS = "Model", "Uncertainty", "Decision", "Answers"
SERVER, OTHERS, LOG = "Server", "Other servers", "Decision log"
"""The groups in which help lists options."""

MODEL_HELP = (
    '"pocket" (the embedded model), "smollm2" (SmolLM2-135M-Instruct in four bits, once fetched), a folder with '
    "safetensors, a GGUF file, or a Hugging Face hub id"
)
API_KEY, UPSTREAM_KEY, TARGET_KEY = (
    "SEMGRAD_GUARD_API_KEY",
    "SEMGRAD_GUARD_UPSTREAM_API_KEY",
    "SEMGRAD_GUARD_ESCALATION_API_KEY",
)
"""The environment variables with keys: for clients, for the upstream, for the server that is escalated to."""
LOG_VARIABLE = "SEMGRAD_GUARD_LOG"
ONE_THRESHOLD = "give --calibration or --threshold, not both: a calibration has its own threshold"
DRAIN_SECONDS = 30
"""How long running requests have to finish once a server is to end."""

Overridable = Literal["mode", "threshold", "timeout"]
DtypeName = Literal["float32", "bfloat16", "float16"]
Variant = Literal["paper", "official"]
Thinking = Literal["on", "off", "auto"]
"""Whether a model reasons before its answers; auto leaves that to its chat template."""


def require_name(name: str) -> None:
    """Raise a ValueError for a name that no model, file or server can have."""
    if not name.strip() or "\0" in name:
        raise ValueError("it holds a null character, which no name can" if name.strip() else "the name is empty")


def require_text(text: str) -> None:
    """Raise a ValueError for an empty text."""
    if not text:
        raise ValueError("the text is empty; leave it out, or write one")


def _tells_how(config: dict[str, Any]) -> None:
    if not isinstance(config.get("quant_method"), str):
        raise ValueError(
            'it does not say how to quantize; give an object with a quant_method: {"quant_method": "bitsandbytes", …}'
        )


def _not_too_cold(temperature: float) -> None:
    if 0 < temperature < 1e-6:  # logits would leave float32
        raise ValueError(f"it must be 0 (greedy) or 1e-06 or more, not {temperature}")


# Options that several classes have. A front that has one annotates it by these names.

Mode = Annotated[
    Literal["enforce", "annotate", "raise"],
    Option(
        "enforce: withhold what is not let through; annotate or observe: deliver it with its verdict; raise: "
        "answer with an error.",
        panel=DECISION,
        metavar="MODE",
    ),
]
"""How a decision is carried out: enforced; written on the answer; only reported; or raised as an error."""
OnUnscored = Annotated[
    Literal["abstain", "answer", "escalate"],
    Option(
        "What to do with an answer that cannot be scored: abstain, escalate (abstain where there is no target), or "
        "deliver it without a promise.",
        panel=DECISION,
        metavar="ACTION",
    ),
]
"""The action for an answer without a finite score."""
OnUnfamiliar = Annotated[
    Literal["threshold", "abstain", "escalate", "raise"], Option("What to do with an answer to an unfamiliar prompt.")
]
"""The action for an answer to a prompt unlike those that a policy was calibrated on."""
OnOtherOptions = Annotated[
    Literal["refuse", "deliver"],
    Option(
        "A request with another temperature or form (JSON, tools) than the calibration's answers: refuse it, or let "
        "the threshold decide about its answer, outside the promise.",
        panel=DECISION,
        metavar="ACTION",
    ),
]
"""The action for a request whose options are not those that a policy was calibrated on."""
OnNoThreshold = Annotated[
    Literal["abstain", "reachable"],
    Option(
        "Where no threshold keeps the promise that was asked for: deliver nothing (abstain), or under the promise that "
        "the labels support (reachable).",
        panel=DECISION,
        metavar="ACTION",
    ),
]
"""The action where a calibration has no threshold."""
JudgedBy = Annotated[
    Literal["answer", "sentence"],
    Option("Judge the whole answer, or every sentence of it by itself.", panel=DECISION, metavar="UNIT"),
]
"""The unit that is scored, compared with the threshold and promised."""
OnDoubt = Annotated[
    Literal["stop", "drop", "mark", "escalate"],
    Option(
        "By sentence, at one that is not let through: end the answer before it; drop it, with those that lean on it; "
        "mark it in the verdict and deliver it outside the promise; or escalate from there.",
        panel=DECISION,
        metavar="ACTION",
    ),
]
"""The action at a sentence that is not let through."""
OnError = Annotated[
    Literal["raise", "abstain"],
    Option("If the model times out or an upstream server fails: return an error, or abstain.", DECISION, "ACTION"),
]
KeepDraft = Annotated[bool, Option("Whether metadata may hold withheld answers.")]
ALPHA = Bounds(0.0001, 0.9999)
Alpha = Annotated[float, Option("The error rate to promise among the answers let through.", DECISION, "X", ALPHA)]
Delta = Annotated[float, Option("How likely the promise may fail.", DECISION, "X", Bounds(0.000001, 0.9999))]

MaxTokens = Annotated[int, Option("The longest answer, in tokens.", ANSWERS, "N", Bounds(1, 2**63 - 1))]
MaxThinkingTokens = Annotated[
    int | None,
    Option(
        "End the reasoning after so many tokens, by the chat template's own mark; they count as tokens of the answer.",
        panel=ANSWERS,
        metavar="N",
        bounds=Bounds(1, 2**63 - 1),
        shown="no limit of its own",
    ),
]
Temperature = Annotated[
    float,
    Option("0 always takes the likeliest token; above 0 samples.", ANSWERS, "X", Bounds(0, 100), check=_not_too_cold),
]
TopP = Annotated[float, Option("Samples among tokens of this probability together.", bounds=Bounds(0, 1, True))]
TopK = Annotated[int, Option("Samples among so many likeliest tokens; 0 means all.", bounds=Bounds(0))]
Seed = Annotated[int, Option("Repeats a sampled answer.", ANSWERS, "N", Bounds(-(2**63), 2**63 - 1))]
Stop = Annotated[
    tuple[str, ...],
    Option(
        "Stop the answer before this text. Repeat the option for several texts.",
        panel=ANSWERS,
        metavar="TEXT",
        reads="some_text",
        several=True,
        check=require_text,
    ),
]
Threshold = Annotated[
    float | None, Option("Let through uncertainties at or below this one; promises nothing.", DECISION, "X")
]
Timeout = Annotated[
    float | None,
    Option("For waiting, answering, scoring and escalating together.", SERVER, "SECONDS", Bounds(0, 86_400, True)),
]
LogAddress = Annotated[
    str | None,
    Option(
        "The decision log: a file (SQLite), or a URL such as postgresql+psycopg://user@host/name; also as "
        f"{LOG_VARIABLE} in the environment.",
        panel=LOG,
        metavar="FILE",
        shown="semgrad-guard/decisions.db in your state folder",
        variable=LOG_VARIABLE,
        check=require_name,
    ),
]


def template_options_of(given: Mapping[str, Any] | None, thinking: Thinking) -> dict[str, Any]:
    """The options for a chat template, with the switch for thinking among them."""
    return {**(given or {}), **({} if thinking == "auto" else {"thinking": thinking})}


@dataclass(frozen=True, kw_only=True)
class ModelName:
    """Which model."""

    model: Annotated[str, Option(f"{MODEL_HELP}.", MODEL, check=require_name)] = POCKET


REPORTED = ("max_probability", "gnll", "top_entropy")
"""The scores that the log-probabilities of another server allow."""


@dataclass(frozen=True, kw_only=True)
class LoadingOptions:
    """How its weights are loaded, and its prompts written."""

    dtype: Annotated[
        DtypeName | None, Option("float32, bfloat16 or float16, if not the checkpoint's own. Scores follow it.", MODEL)
    ] = None
    device: Annotated[str | None, Option("Where the model goes: cpu, cuda, cuda:1.", MODEL, check=require_name)] = None
    quantization_config: Annotated[
        dict[str, Any] | None,
        Option(
            'Quantize the weights while they are loaded, as transformers takes it: {"quant_method": "bitsandbytes", '
            '"load_in_4bit": true}; @FILE reads it from a file.',
            panel=MODEL,
            metavar="JSON",
            reads="quantization",
            check=_tells_how,
        ),
    ] = None
    template_option: Annotated[
        dict[str, Any] | None,
        Option(
            "Told to the chat template with every prompt, the value in JSON. Repeat the option for several.",
            panel=MODEL,
            metavar="NAME=VALUE",
            reads="template_option",
            several=True,
        ),
    ] = None
    thinking: Annotated[
        Thinking,
        Option("Whether the model reasons before its answers, where its chat template has a switch for that.", MODEL),
    ] = "auto"

    @property
    def template_options(self) -> dict[str, Any]:
        """The options for the chat template."""
        return template_options_of(self.template_option, self.thinking)


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """Who writes its answers."""

    engine: Annotated[
        dict[str, Any] | None,
        Option(
            'Have vLLM write the answers (docs/vllm.md); with arguments of vllm.LLM: vllm={"max_model_len": 4096}.',
            panel=MODEL,
            metavar="vllm[=JSON]",
            reads="engine",
            shown="transformers",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ModelOptions(ModelName, LoadingOptions):
    """A model that scores, and answers by transformers."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions(ModelOptions, EngineChoice):
    """A model, and who writes its answers."""


@dataclass(frozen=True, kw_only=True)
class ScoringOptions:
    """The settings of estimators; None leaves one to the calibration, or to the estimator's own default."""

    variant: Annotated[
        Variant | None,
        Option(
            "The gradients of hybridgrad, semgrad, paragrad, exgrad or fused: the paper's, or its published code's.",
            UNCERTAINTY,
            shown="the calibration's, or paper",
        ),
    ] = None
    tau: Annotated[
        float | None,
        Option(
            "hybridgrad's: a small one leans to SemGrad, a large one to ParaGrad.",
            panel=UNCERTAINTY,
            metavar="X",
            bounds=Bounds(0, open_below=True),
            shown="the calibration's, or 1",
        ),
    ] = None
    beta: Annotated[
        float | None,
        Option("hybridgrad's: the weight of ParaGrad.", UNCERTAINTY, "X", Bounds(0), shown="the calibration's, or 1"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """Which answers are let through."""

    threshold: Threshold = None
    on_unscored: OnUnscored = "abstain"
    on_no_threshold: OnNoThreshold = "abstain"


@dataclass(frozen=True, kw_only=True)
class DeliveryOptions:
    """How a decision is carried out."""

    mode: Mode = "enforce"
    on_error: OnError = "raise"


ABSTAIN_MESSAGE = "I don't know."
"""The default text in the place of a withheld answer."""
CLOSING_LINE = "I am not sure about the rest."
"""The default text behind an answer that ends before a doubtful sentence."""


@dataclass(frozen=True, kw_only=True)
class SentenceForm:
    """Whether answers are judged by sentence, and the action at a doubtful one; None leaves both to the calibration."""

    by: JudgedBy | None = None
    on_doubt: OnDoubt | None = None


@dataclass(frozen=True, kw_only=True)
class SentenceOptions(SentenceForm):
    """The same, with the text behind an answer that ends early."""

    closing_line: Annotated[
        str,
        Option("Behind an answer that ends before a doubtful sentence.", DECISION, "TEXT", reads="some_text"),
    ] = CLOSING_LINE


@dataclass(frozen=True, kw_only=True)
class AnswerLimit:
    """How long an answer may be."""

    max_tokens: MaxTokens = 256
    max_thinking_tokens: MaxThinkingTokens = None


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(AnswerLimit):
    """How an answer is written."""

    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    seed: Seed | None = None
    stop: Stop = ()
