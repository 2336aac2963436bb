"""The settings of models, answers, estimators and policies: each is declared here, once (a server's own are in
`semgrad_guard.server.server_settings`).

A setting is a field of one of these classes, with its type, bounds and default. The engine, the guard, the server, Ray
and both integrations inherit the field, or take its type and default. Importing this loads neither torch nor
transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from semgrad_guard.declared import Bounds
from semgrad_guard.named import POCKET

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
ABSTAIN_MESSAGE = "I don't know."
"""The default text in the place of a withheld answer."""
CLOSING_LINE = "I am not sure about the rest."
"""The default text behind an answer that ends before a doubtful sentence."""
REPORTED = ("max_probability", "gnll", "top_entropy")
"""The scores that the log-probabilities of another server allow."""

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


# Types that several classes have. A front that has such a setting annotates it by these names.

Name = Annotated[str, Bounds(check=require_name)]
Mode = Literal["enforce", "annotate", "raise"]
"""What to do with an answer that is not let through: withhold it, deliver it with its verdict, or raise an error."""
OnUnscored = Literal["abstain", "answer", "escalate"]
"""The action for an answer without a finite score: "answer" delivers it without a promise."""
OnUnfamiliar = Literal["threshold", "abstain"]
"""For an answer to a prompt unlike those that a policy was calibrated on: its score decides, or nothing is let through.
"""
OnOtherOptions = Literal["refuse", "deliver"]
"""The action for a request with another temperature or form (JSON, tools) than the calibration's answers: "deliver"
lets the threshold decide about its answer, outside the promise."""
OnNoThreshold = Literal["abstain", "reachable"]
"""Where no threshold keeps the promise that was asked for: deliver nothing, or under the promise that the labels
support."""
OnCut = Literal["unscored", "abstain", "score"]
"""For an answer that a limit cut off: one that ends within its first sentence has no score ("unscored"), no such answer
has one ("abstain"), or each is scored like any other ("score", as for calibrations made before these rules)."""
JudgedBy = Literal["answer", "sentence"]
"""The unit that is scored, compared with the threshold and promised."""
OnDoubt = Literal["stop", "drop"]
"""At a sentence that is not let through: the answer ends before it, or leaves it out with those that lean on it."""
OnError = Literal["raise", "abstain"]
"""If the model times out or an upstream server fails: return an error, or abstain."""
KeepDraft = bool
"""Whether metadata may hold withheld answers."""
Alpha = Annotated[float, Bounds(0.0001, 0.9999)]
"""The error rate to promise among the answers let through."""
Delta = Annotated[float, Bounds(0.000001, 0.9999)]
"""How likely the promise may fail."""
MaxTokens = Annotated[int, Bounds(1, 2**63 - 1)]
"""The longest answer, in tokens."""
MaxThinkingTokens = Annotated[int | None, Bounds(1, 2**63 - 1)]
"""The reasoning ends after so many tokens, by the chat template's own mark; they count as tokens of the answer."""
Temperature = Annotated[float, Bounds(0, 100, check=_not_too_cold)]
"""0 always takes the likeliest token; above 0 samples."""
TopP = Annotated[float, Bounds(0, 1, open_below=True)]
"""Samples among tokens of this probability together."""
TopK = Annotated[int, Bounds(0)]
"""Samples among so many likeliest tokens; 0 means all."""
Seed = Annotated[int, Bounds(-(2**63), 2**63 - 1)]
"""Repeats a sampled answer."""
Stop = Annotated[tuple[str, ...], Bounds(check=require_text)]
"""The answer ends before these texts."""
Threshold = Annotated[float | None, Bounds()]
"""Uncertainties at or below this one are let through; it promises nothing."""
MinConfidence = Annotated[float | None, Bounds(0, 1, open_below=True)]
"""Answers whose P(correct) is at least this are let through; it promises nothing."""
Timeout = Annotated[float | None, Bounds(0, 86_400, open_below=True)]
"""Seconds for waiting, answering, scoring and escalating together."""
LogAddress = Annotated[str | None, Bounds(check=require_name)]
"""The decision log: a file (SQLite), or a URL such as postgresql+psycopg://user@host/name."""


def template_options_of(given: Mapping[str, Any] | None, thinking: Thinking) -> dict[str, Any]:
    """The options for a chat template, with the switch for thinking among them."""
    return {**(given or {}), **({} if thinking == "auto" else {"thinking": thinking})}


@dataclass(frozen=True, kw_only=True)
class ModelName:
    """Which model: "pocket", the name of a fetched one, a folder, a GGUF file or a hub id."""

    model: Name = POCKET


@dataclass(frozen=True, kw_only=True)
class LoadingOptions:
    """How its weights are loaded, and its prompts written.

    `device` is "cpu", "cuda", "cuda:1"; `quantization_config` quantizes the weights while they are loaded, as
    transformers takes it; the chat template gets `template_option` with every prompt.
    """

    dtype: DtypeName | None = None
    device: Annotated[str | None, Bounds(check=require_name)] = None
    quantization_config: Annotated[dict[str, Any] | None, Bounds(check=_tells_how)] = None
    template_option: dict[str, Any] | None = None
    thinking: Thinking = "auto"

    @property
    def template_options(self) -> dict[str, Any]:
        """The options for the chat template."""
        return template_options_of(self.template_option, self.thinking)


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """What writes its answers: vLLM with these arguments of `vllm.LLM`; None: transformers."""

    engine: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class ModelOptions(ModelName, LoadingOptions):
    """A model that scores, and answers by transformers."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions(ModelOptions, EngineChoice):
    """A model, and what writes its answers."""


@dataclass(frozen=True, kw_only=True)
class ScoringOptions:
    """The settings of estimators; None leaves one to the calibration, or to the estimator's own default.

    `variant` is the gradients of the paper, or of its published code; a small `tau` leans to SemGrad, a large one to
    ParaGrad; `beta` is the weight of ParaGrad.
    """

    variant: Variant | None = None
    tau: Annotated[float | None, Bounds(0, open_below=True)] = None
    beta: Annotated[float | None, Bounds(0)] = None


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """Which answers are let through. `on_cut` None: as for the calibration's answers; without one "unscored"."""

    threshold: Threshold = None
    on_unscored: OnUnscored = "abstain"
    on_no_threshold: OnNoThreshold = "abstain"
    on_cut: OnCut | None = None


@dataclass(frozen=True, kw_only=True)
class DeliveryOptions:
    """How a decision is carried out."""

    mode: Mode = "enforce"
    on_error: OnError = "raise"


@dataclass(frozen=True, kw_only=True)
class SentenceOptions:
    """Whether answers are judged by sentence, and the action at a doubtful one; None leaves both to the calibration.
    `closing_line` is the text behind an answer that ends early."""

    by: JudgedBy | None = None
    on_doubt: OnDoubt | None = None
    closing_line: str = CLOSING_LINE


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
