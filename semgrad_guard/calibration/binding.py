"""The conditions of a calibration: its threshold means nothing for another model, estimator, template or grader.

A `Unit` is what scores and their promise are about. `EstimatorChoice` tells how its estimator was chosen or fitted,
from other answers.

An answer of another server is scored by its text. Its decoding is not in the text, but in the call: a calibration of
served answers is about calls with the options that its own answers were made with. Where a calibration does not state
them, it is about greedy answers, and every option must be neutral. An unknown option is not neutral.

A temperature that a call leaves out is the server's own default. That is not known to be greedy, but it is the same
for all calls that leave it out: it fits a calibration whose calls left it out as well, and one that states no options,
whose user vouches for the server. It does not fit one whose calls set it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, cast

from pydantic import BaseModel, Field

from semgrad_guard.errors import BindingMismatchError, CalibrationError
from semgrad_guard.records import OWN_CODE, FusedWeights
from semgrad_guard.settings import OnCut, OnDoubt

SettingScalar = str | int | float | bool | None
Setting = SettingScalar | list[SettingScalar] | dict[str, SettingScalar]

_OF_A_REQUEST = frozenset({"temperature", "top_p", "top_k", "grammar"})
"""The settings that come from the options of a request."""

_OF_ESTIMATORS = frozenset({"estimator", "settings"})

GRADER_VERSIONS = {"contains": 3}
"""Our graders whose rules have changed, with the version of their rules; it belongs to their names (`contains@3`)."""

_NOT_COMPARED = frozenset({"max_tokens", "stop", "on_cut", "options"})
"""Where answers could be cut off is compared with the answers that were (`Binding.cut_elsewhere`), and `options` with
those of each call (`unlike_calls`). A policy takes `on_cut` from here."""


class Binding(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()):
    """The model, estimator and conditions that a calibration was made with. None means "not stated".

    `revision` names the model's version, `fingerprint` its weights and everything switched, patched or hooked in it;
    `settings` are the estimator's (JSON scalars, lists and tables of them); `prompt_template` is a name or hash;
    `grader` graded the answers. `upstream` is the id of the calibration of the stage before, when this one was made on
    the questions that that stage did not let through. `max_tokens` and `stop` are where answers were cut off: after so
    many tokens (0: none was), at these strings; `on_cut` is which of the former had a score (None: all). `options` are
    those of the calls to another server, where it wrote the answers (see `call_options`).
    """

    model: str
    estimator: str
    revision: str | None = None
    fingerprint: str | None = None
    settings: dict[str, Setting] | None = None
    prompt_template: str | None = None
    grader: str | None = None
    upstream: str | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    on_cut: OnCut | None = None
    options: dict[str, Setting] | None = None

    @property
    def outdated_grader(self) -> str | None:
        """In words, that the grader judges by other rules now than it did for this calibration; None where not."""
        name, _, version = re.split(r"[(>+]", self.grader or "")[0].partition("@")
        if version == str(GRADER_VERSIONS.get(name, version)):
            return None
        return (
            f"the calibration's answers were graded by {self.grader}, whose rules have changed since (it is "
            f"{name}@{GRADER_VERSIONS[name]} now); make it anew with `semgrad-guard calibrate`"
        )

    def differences(self, other: Binding) -> dict[str, tuple[Any, Any]]:
        """Field -> (mine, other's), for every field that both sides state and that differs.

        `other` is usually an answer's own record, whose grader and upstream are None: these are then not compared.
        Of two fingerprints with a mark for code that cannot be compared, the marks are not: nothing is promised then.
        """
        pairs = {
            name: (getattr(self, name), getattr(other, name))
            for name in Binding.model_fields
            if name not in _NOT_COMPARED
        }
        ours, theirs = pairs["fingerprint"]
        if ours and theirs and ours.partition(OWN_CODE)[:2] == theirs.partition(OWN_CODE)[:2]:
            del pairs["fingerprint"]
        return {name: (a, b) for name, (a, b) in pairs.items() if a is not None and b is not None and a != b}

    def cut_elsewhere(self, cut: int | str | None, *, tokens: int = 0, text: str = "") -> str | None:
        """In words, how the answer's cut-off differs from the calibration's; None where it does not.

        An answer of one token is another one than that of two hundred, and an answer that ended by itself is the same
        with any limit that it keeps. `tokens` and `text` are the answer's, where known.
        """
        if self.max_tokens is None:
            return None
        if 0 < self.max_tokens < tokens:
            return f"the answer has {tokens} tokens; those of the calibration were cut off after {self.max_tokens}"
        if (stop := next((end for end in self.stop if end in text), None)) is not None:
            return f"the answer continues behind {stop!r}, where those of the calibration were cut off"
        if cut is None or cut == self.max_tokens or cut in self.stop:
            return None
        where = f"after {cut} tokens" if isinstance(cut, int) else f"at {cut!r}"
        known = f"after {self.max_tokens} tokens" if self.max_tokens else "not"
        return f"the answer was cut off {where}, and those of the calibration {known}"

    def without_prompt_name(self) -> Self:
        """The binding whose `prompt_template` is the chat template's fingerprint alone, without the prompts' name."""
        name, at, fingerprint = (self.prompt_template or "").rpartition("@")
        return self.model_copy(update={"prompt_template": fingerprint}) if at and name else self

    def with_options_of(self, other: Binding) -> Self:
        """The same conditions for answers with the decoding, the form and the tools of the other's."""
        if self.settings is None or other.settings is None:
            settings = self.settings
        else:
            settings = {name: value for name, value in self.settings.items() if name not in _OF_A_REQUEST}
            settings |= {name: value for name, value in other.settings.items() if name in _OF_A_REQUEST}
        return self.model_copy(update={"settings": settings, "prompt_template": other.prompt_template})

    def in_words(self, other: Binding) -> tuple[str, ...]:
        """The differences from another binding, in words."""
        return tuple(_named(field, mine, theirs) for field, (mine, theirs) in self.differences(other).items())

    def require(self, other: Binding) -> None:
        """Raise `BindingMismatchError`, naming each difference, unless this binding was made for `other`."""
        fields = self.differences(other)
        if not fields:
            return
        differences = dict(zip(fields, self.in_words(other), strict=True))
        if "model" in fields and self.fingerprint is not None and self.fingerprint == other.fingerprint:
            differences["model"] += " (the weights are the same: a folder has moved; give it its name again)"
        named = "; ".join(differences.values())
        error = BindingMismatchError(
            f"The calibration was made for something else: {named}. "
            "Calibrate again with what answers now, or answer with what was calibrated"
            + (
                " (semgrad_guard.estimator_of(calibration) scores as it did)."
                if _OF_ESTIMATORS & fields.keys()
                else "."
            )
        )
        error.differences, error.changes = named, {}
        for field, (mine, theirs) in fields.items():  # now and then; of settings by setting, None where it was not set
            if field != "settings":
                error.changes[field] = theirs, mine
                continue
            names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
            error.changes |= {name: (theirs.get(name), mine.get(name)) for name in names}
        raise error


def _named(field: str, mine: Any, theirs: Any) -> str:
    """One difference in words; of settings, only those that differ."""
    if field == "settings":
        keys = [key for key in {**mine, **theirs} if mine.get(key, ...) != theirs.get(key, ...)]
        mine = {key: mine[key] for key in keys if key in mine}
        theirs = {key: theirs[key] for key in keys if key in theirs}
    follows = " (it follows the weights and what is switched, patched or hooked in the model)"
    now, then = (repr(value) if value != {} else "not set" for value in (theirs, mine))
    return f"{field} is {now} and was {then} at calibration{follows if field == 'fingerprint' else ''}"


def shared_by(bindings: Sequence[Binding], *, of: str) -> Binding:
    """The binding of scores that are calibrated together, compared as those of later answers are.

    Raises:
        CalibrationError: they were made in different ways.
    """
    for other in bindings:
        if words := bindings[0].in_words(other):
            raise CalibrationError(f"The {of} were scored in different ways: {'; '.join(words)}.")
    return bindings[0]


@dataclass(frozen=True)
class Unit:
    """What a score and its promise are about, other than a whole answer: the settings by which they are bound to it."""

    settings: Mapping[str, str]

    @classmethod
    def sentences(cls, on_doubt: OnDoubt) -> Self:
        """Each sentence of an answer."""
        return cls({"by": "sentence", "on_doubt": on_doubt})

    def among(self, settings: Mapping[str, Any] | None) -> dict[str, Any]:
        """These settings, and this unit."""
        return {**(settings or {}), **self.settings}

    def is_of(self, binding: Binding | None) -> bool:
        """Whether scores that are bound so are about this unit."""
        return binding is not None and self.settings.items() <= (binding.settings or {}).items()


QUESTIONS = Unit({"unit": "question"})
"""A whole question, which may take several answers: its score is that of the most doubtful one."""
FIELDS = Unit({"unit": "field", "on_doubt": "drop"})
"""Each value of a structured answer."""
CALLS = Unit({"by": "call"})
"""Each call of a tool."""


EstimatorName = Literal["states", "auto"]


class EstimatorChoice(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """The requested estimator, the chosen one, and why.

    `asked` is the learned one, or the best ("auto"); `estimator` the name of the one that the threshold belongs to, and
    `reason` why it is that one. `weights` are the numbers of a fitted one. `aurocs` compares the candidates on
    the answers that were learned from (a fitted one on those that it was not fitted on). `questions` names these
    answers' questions: the threshold must be chosen on others.
    """

    asked: EstimatorName  # a field of files
    estimator: str
    reason: str
    weights: FusedWeights | None = None
    aurocs: dict[str, float | None] = Field(default_factory=dict)
    questions: tuple[str, ...] = ()
    split_seed: int = 0

    def require_others(self, questions: Iterable[str]) -> None:
        """Raise unless these questions, on which a threshold is to be chosen, were not learned from.

        An estimator looks better on the answers that it was fitted on than on any others, so a threshold chosen there
        lets through more than it promises.
        """
        seen = set(self.questions) & set(questions)
        if seen:
            raise CalibrationError(
                f"{len(seen)} of the questions were used to choose or fit the estimator ({self.estimator}). The "
                "threshold must be chosen on others, or its promise does not hold: split them, or label new ones."
            )


# The options of a call to another server.

HARMLESS = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
        *("safety_identifier", "parallel_tool_calls"),
    )
)
"""Fields of OpenAI's that change no answer."""

_AROUND = HARMLESS | frozenset(
    (
        *("messages", "tools", "semgrad_guard", "stream", "stream_options", "stream_usage", "n", "seed"),
        *("logprobs", "top_logprobs", "timeout", "request_timeout", "max_retries", "request_id", "cache_salt"),
        *("priority", "strict", "keep_alive"),
    )
)
"""A call's other fields: the conversation (with its tools, which are part of the prompt), how it is sent, how many
answers are drawn, and by which random numbers."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "best_of": (1,),
}
"""OpenAI's fields that change nothing if they have one of these values."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "typical_p": (1,),
    "tfs_z": (1,),
    "mirostat": (0,),
    "do_sample": (False,),
    "num_beams": (1,),
    "use_beam_search": (False,),
    "repetition_penalty": (1,),
    "repeat_penalty": (1,),
    "length_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "min_tokens": (0,),
    "min_length": (0,),
    "ignore_eos": (False,),
    "echo": (False,),
    "response_format": ({"type": "text"},),
    "format": ("",),
    "tool_choice": ("auto", "none"),
    "function_call": ("auto", "none"),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "skip_special_tokens": (True,),
}
_DIGEST = "sha256:"
_SHOWN = 64
"""Characters of a name or value that is shown; longer ones are cut off, or named by a digest."""
LIMITS = ("max_tokens", "max_completion_tokens", "max_new_tokens", "max_output_tokens", "num_predict", "n_predict")
STOPS = ("stop", "stop_sequences", "stop_words")
_NESTED = (
    *("model_kwargs", "extra_body", "generation_kwargs", "pipeline_kwargs", "options", "parameters"),
    *("sampling_params", "generation_config", "nvext"),
)
_EMPTY = frozenset(
    (
        *(*STOPS, *_NESTED, "stop_token_ids", "logit_bias", "bad_words", "allowed_token_ids", "functions", "documents"),
        *("chat_template_kwargs", "mm_processor_kwargs", "vllm_xargs", "extra_headers", "extra_query"),
    )
)
"""Fields that change nothing where they are empty. Others do: an empty `web_search_options` searches, every JSON
meets an empty schema, an empty list of adapters turns all of them off."""
_CUTTING = re.compile(
    r"stop|eos_token|max_\w*token|max_(\w+_)?(len|length|time)$|predict$|predict_ms|n_indent|repetition_detection",
    re.IGNORECASE,
)
_NO_CUT = frozenset({"include_stop_str_in_output", "no_stop_trim", "early_stopping", "ban_eos_token"})
_STEERING = (
    *("temperature", "reasoning_effort", "reasoning", "thinking", "verbosity", "grammar", "guided_choice"),
    *("guided_regex", "guided_json", "guided_grammar", "structured_outputs", "chat_template", "chat_template_kwargs"),
    *("documents", "bad_words", "stop_token_ids", "allowed_token_ids", "functions", "prediction", "extra_headers"),
)

CALL_FIELDS = (*_STEERING, *_NEUTRAL, *LIMITS, *STOPS, *_NESTED)
"""The names by which a client holds options that it sends with every call."""


def call_options(*layers: Mapping[str, Any]) -> dict[str, Setting]:
    """The options of a call that may change its answers, by name; later layers replace earlier ones.

    `max_tokens` is the smallest limit, `stop` a list of strings. Values that are not scalars are named by a digest.
    """
    given: dict[str, Any] = {}
    for layer in layers:
        given |= _spread(layer)
    found: dict[str, Setting] = {}
    limits = [given[name] for name in LIMITS if _is_a_limit(given.get(name))]
    if limits:
        found["max_tokens"] = min(limits)
    if stops := [stop for name in STOPS for stop in _strings(given.get(name))]:
        found["stop"] = [*dict.fromkeys(stops)]
    for name in sorted(given.keys() - _AROUND):
        value = given[name]
        if _changes_nothing(name, value) or value in _NEUTRAL.get(name, ()) or name.startswith("ls_"):
            continue
        if (name in LIMITS and _is_a_limit(value)) or (name in STOPS and _are_strings(value)):
            continue
        malformed = name in LIMITS or name in STOPS
        found[name[:_SHOWN] + (" (not as usual)" if malformed else "")] = _scalar(value)
    return found


def usual_options(binding: Binding | None) -> dict[str, Any]:
    """The options that calls must have to be like those of a calibration, without where answers end.

    Those that a record holds as a digest cannot be read back.
    """
    options = cast("Mapping[str, Any]", {} if binding is None else binding.options or {})
    return {
        name: value
        for name, value in options.items()
        if name not in ("max_tokens", "stop") and not (isinstance(value, str) and value.startswith(_DIGEST))
    }


def cutting_options(call: Mapping[str, Any]) -> list[str]:
    """The names of a call's options, those in tables of further options too, that can end an answer early."""
    given = {name for name, value in _spread(call).items() if not _changes_nothing(name, value)}
    return sorted(name for name in given - _NO_CUT if _CUTTING.search(name))


def unlike_calls(
    options: Mapping[str, Any] | None, binding: Binding | None, *, tokens: int = 0, text: str = ""
) -> tuple[str, ...]:
    """The differences of a call's options from those that a calibration's answers were made with, in words.

    `options` None: the answer is not another server's. `tokens` and `text` are the answer's, where known: one that
    ended by itself is the same with any limit that it keeps.
    """
    if options is None:
        return ()
    stated = None if binding is None else cast("Mapping[str, Any] | None", binding.options)
    known: Mapping[str, Any] = stated or {}
    if stated is None:  # a temperature of 0 or none, and the calibration's own limits
        known = {"temperature": 0} if options.get("temperature") == 0 else {}
        known |= {} if binding is None or not binding.max_tokens else {"max_tokens": binding.max_tokens}
        known |= {} if binding is None or not binding.stop else {"stop": [*binding.stop]}
    names = sorted((options.keys() | known.keys()) - {"max_tokens", "stop"})
    found = [_difference(name, options, known) for name in names if options.get(name) != known.get(name)]
    limit, known_limit = options.get("max_tokens"), known.get("max_tokens")
    reached = (limit is not None and tokens >= limit) or (known_limit is not None and tokens > known_limit)
    if limit != known_limit and tokens and reached:
        found.append(_difference("max_tokens", options, known))
    stops, ends = options.get("stop", ()), known.get("stop", ())
    if any(stop not in ends for stop in stops) or any(stop not in stops and stop in text for stop in ends):
        found.append(_difference("stop", options, known))
    return tuple(found)


def _difference(name: str, options: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    given = (options.get(name), known.get(name))
    now, then = ("left to the server" if value in (None, []) else repr(value) for value in given)
    return f"the option {name} of the call is {now}, and in calls of the calibration it was {then}"


def _spread(layer: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a layer; those in a table of further options too.

    Servers differ in which of two values they heed: where a table says otherwise than the layer, both are kept.
    """
    tables = [name for name, value in layer.items() if name in _NESTED and isinstance(value, Mapping)]
    found = {name: value for name, value in layer.items() if name not in tables}
    for table in tables:
        for name, value in _spread(layer[table]).items():
            if found.setdefault(name, value) != value:
                found[f"{table}.{name}"] = value
    return found


def _changes_nothing(name: str, value: Any) -> bool:
    return value is None or (name in _EMPTY and value in ([], {}, ()))


def _is_a_limit(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_strings(value: Any) -> bool:
    several = cast("Sequence[Any]", value) if isinstance(value, (list, tuple)) else [value]
    return all(isinstance(text, str) for text in several)


def _strings(value: Any) -> list[str]:
    if not _are_strings(value):
        return []
    return [value] if isinstance(value, str) else list(value)


def _scalar(value: Any) -> str | int | float | bool:
    """A value that can be kept in a record: long and nested ones by a digest, which shows no part of them."""
    if isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, str) and len(value) <= _SHOWN:
        return value
    text = json.dumps(value, sort_keys=True, default=repr)
    return f"{_DIGEST}{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"
