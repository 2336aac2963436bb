"""The options of a call to another server: which of them can change its answers.

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
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from semgrad_guard.calibration.binding import Binding, Setting

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

FIELDS = (*_STEERING, *_NEUTRAL, *LIMITS, *STOPS, *_NESTED)
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
