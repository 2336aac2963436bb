"""Calls of models in the words of OpenAI and of frameworks: options, the form of an answer, and a message's contents.

An answer's form is tools that it may or must call, or JSON that it must be. A verdict has one spelling in a message's
metadata, which is written and read back here; reasoning is recognised by the names that servers and frameworks use.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast
from uuid import uuid4

from pydantic import ValidationError

from semgrad_guard.calibration.binding import CALL_FIELDS, call_options
from semgrad_guard.engine.answers.answer import Evidence, Generation
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.engine.prompts.forms import FORM_FIELDS, Tool, ToolAnswer, call_rule, json_rule, one_of
from semgrad_guard.errors import InputError
from semgrad_guard.estimators import Estimator
from semgrad_guard.guard.parts import Structure
from semgrad_guard.guard.verdicts import unscored
from semgrad_guard.records import METADATA_KEY, SCHEMA, Message, ToolCall, Verdict, digest_of

FORM_OPTIONS = frozenset(FORM_FIELDS)
"""The options of a call for its answer's form."""


@dataclass(frozen=True)
class AnswerForm:
    """The form of one answer. It must call one of the `forced` tools, and its JSON must follow `schema`.

    With tools and a schema, an answer is either a call or JSON. `switches` are the chat template's options about the
    reasoning before it.
    """

    tools: tuple[Tool, ...] = ()
    forced: tuple[Tool, ...] = ()
    schema: Mapping[str, Any] | None = None
    instruction: str = ""
    switches: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> AnswerForm:
        """The form in a call's options.

        Raises:
            InputError: a `tool_choice` that names no tool at hand, or a `response_format` of an unknown type.
        """
        tools = tuple(cast("Sequence[Tool]", options.get("tools") or ()))
        choice, forced = options.get("tool_choice"), tuple[Tool, ...]()
        if choice in ("none", False):
            tools = ()
        elif choice not in (None, "auto"):
            if isinstance(choice, Mapping):
                choice = cast("Mapping[str, Any]", choice).get("function", {}).get("name")
            any_of_them = choice in ("any", "required", True)
            forced = tuple(tool for tool in tools if any_of_them or tool["function"]["name"] == choice)
            if not forced:
                names = ", ".join(tool["function"]["name"] for tool in tools) or "there are no tools"
                raise InputError(
                    f"tool_choice={choice!r} is neither 'auto', 'required' ('any') or 'none' nor the name of a tool "
                    f"({names})"
                ).about("tool_choice")
        schema, instruction = _response_schema(options.get("response_format"))
        return cls(tools, forced, schema, instruction)

    @property
    def is_owed(self) -> bool:
        """Whether the answer has to be a call of a tool, or JSON."""
        return self.schema is not None or bool(self.forced)

    @property
    def structure(self) -> Structure | None:
        """The JSON that the answer owes; None where it is free."""
        if not self.is_owed:
            return None
        return Structure(
            self.schema, {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.forced}
        )

    @property
    def template_options(self) -> dict[str, Any]:
        """The options for the chat template."""
        return {**({"tools": list(self.tools)} if self.tools else {}), **self.switches}

    def taken_apart(self, model: LanguageModel, generation: Generation) -> ToolAnswer:
        """An answer in this form: its text, its calls, and calls that cannot be read."""
        return model.tool_answer(generation, self.tools) if self.tools else ToolAnswer(generation.text)

    def instructed(self, conversation: tuple[Message, ...]) -> tuple[Message, ...]:
        """The conversation with the schema after the user's last message (not every template has a system message)."""
        if not self.instruction or not conversation:
            return conversation
        users = [i for i, message in enumerate(conversation) if message.role == "user"]
        target = users[-1] if users else len(conversation) - 1
        message = replace(conversation[target], content=f"{conversation[target].content}\n\n{self.instruction}")
        return (*conversation[:target], message, *conversation[target + 1 :])

    def grammar(self, model: LanguageModel) -> str | None:
        """The grammar of the answer; None where it is free, free to call a tool included.

        Raises:
            UnsupportedToolsError: the model's chat template has no tools.
        """
        if self.tools:
            _ = model.tool_format
        if not self.is_owed:
            return None
        calls = self.forced or self.tools
        rules = [call_rule(model.tool_format, calls, model.special_tokens)] if calls else []
        if self.schema is not None and not self.forced:
            rules.append(json_rule(self.schema))
        return one_of(rules)


def _response_schema(response_format: Any) -> tuple[Mapping[str, Any] | None, str]:
    """The schema an answer must follow, and the instruction to the model."""
    if response_format is None:
        return None, ""
    given = cast("Mapping[str, Any]", response_format if isinstance(response_format, Mapping) else {})
    if given.get("type") == "text":
        return None, ""
    if given.get("type") == "json_object":
        return {"type": "object"}, ""
    described = cast("Mapping[str, Any]", given.get("json_schema") or {})
    schema: Any = described.get("schema")
    if given.get("type") != "json_schema" or not isinstance(schema, Mapping):
        raise InputError(
            f"response_format={str(cast('object', response_format))[:200]} is not known; use "
            '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}, {"type": "json_object"} or '
            '{"type": "text"}'
        ).about("response_format")
    found = cast("Mapping[str, Any]", schema)
    return found, f"Answer with JSON that follows this schema, and with nothing else:\n{json.dumps(found)}"


UNREAD_CALLS = "the answer calls tools, and how its server wrote the calls is not known"
"""Why such an answer has no score."""
_MODEL_NAMES = ("model", "model_name", "model_id")


def served_options(client: Any, call: Mapping[str, Any]) -> dict[str, Any]:
    """The options that may change an answer (`call_options`). A name of another model than the client's is one.

    `client` may be a chat model around another client of its own (`llm`), which then holds options as well.
    """
    own = [getattr(client, name, None) for name in _MODEL_NAMES]
    given = {name: value for name, value in call.items() if name not in _MODEL_NAMES or value not in own}
    return call_options(_held(getattr(client, "llm", None)), _held(client), given)


def _held(client: Any) -> dict[str, Any]:
    held = ((name, getattr(client, name, None)) for name in CALL_FIELDS)
    return {name: value for name, value in held if value is not None and not callable(value)}


def verdict_of_record(record: Any, text: str, calls: Sequence[ToolCall] = (), *, whole: bool = True) -> Verdict:
    """The verdict that `Verdict.metadata()` was made from; `text` is the delivered text, which the record leaves out.

    A record that was made for another text does not count: the answer is then unscored. One that was made for other
    `calls` promises nothing. Where `whole` is False, they are those of a piece of a stream, whose last one carries the
    record of all of it.

    Raises:
        InputError: it is of another schema, or damaged.
    """
    try:
        verdict = Verdict.model_validate(_with_text(record, text))
    except (ValidationError, TypeError, ValueError, KeyError) as error:
        raise InputError(
            f"the {METADATA_KEY!r} metadata cannot be read ({error}); was it written by another version?"
        ) from error
    if not whole:
        return verdict
    if record.get("digest", digest_of(text)) == digest_of(text):
        own = sorted(call.digest for call in verdict.delivered.calls)
        return verdict if own == sorted(call.digest for call in calls) else verdict.revised(promised=False)
    return unscored(text, reason="the record that came with it was made for another text", model=verdict.details.model)


def _with_text(record: Mapping[str, Any], text: str) -> dict[str, Any]:
    """A record with the text that `Verdict.metadata()` left out."""
    fields = dict(record)
    if fields["schema"] != SCHEMA:
        raise ValueError(f"it has the schema {fields['schema']!r}, and this version reads {SCHEMA}")
    if fields.get("escalated") is not None:
        fields["escalated"] = _with_text(fields["escalated"], text)
    return {**fields, "text": text}


BLOCKS = frozenset({"thinking", "redacted_thinking", "reasoning", "reasoning_content"})
"""Types of content blocks that hold reasoning."""

_NAMES = (
    *("reasoning_content", "reasoning", "thinking", "thinking_blocks", "reasoning_details", "thinking_content"),
    *("thought", "thoughts", "thought_summary", "reasoning_text", "reasoning_summary", "reasoning_blocks"),
)
_COUNTS = (
    *("reasoning_tokens", "reasoning", "thoughts_token_count", "thinking_tokens", "thought_tokens", "thoughts_tokens"),
    *("reasoning_token_count", "reasoningTokens"),
)
_USAGE = (
    "usage",
    "token_usage",
    "usage_metadata",
    "completion_tokens_details",
    "output_token_details",
    "output_tokens_details",
    "completionTokensDetails",
    "details",
    "provider_specific_fields",
    "additional_kwargs",
)


def reasoning_of(*records: object) -> str | None:
    """The text of the reasoning that a record holds; "" where only its existence is known, None without a sign."""
    for record in (cast("Mapping[str, Any]", given) for given in records if isinstance(given, Mapping)):
        texts = (record.get(name) for name in ("reasoning_content", "reasoning", "thinking"))
        if text := next((text for text in texts if isinstance(text, str) and text), None):
            return text
    return "" if tells_reasoning(*records) else None


def tells_reasoning(*records: object) -> bool:
    """Whether one of the records (a message's further fields, its metadata, its usage) holds reasoning."""
    for record in (cast("Mapping[str, Any]", given) for given in records if isinstance(given, Mapping)):
        counts = (record.get(name) for name in _COUNTS)
        if (
            any(_holds(record.get(name)) for name in _NAMES)
            or any(isinstance(count, int | float) and count > 0 for count in counts)
            or tells_reasoning(*(record.get(name) for name in _USAGE))
        ):
            return True
    return False


def _holds(value: object) -> bool:
    """Whether a field holds reasoning: text, parts, or an item of OpenAI's; settings of reasoning are not."""
    if isinstance(value, Mapping):
        item = cast("Mapping[str, Any]", value)
        return item.get("type") == "reasoning" or any(item.get(name) for name in ("content", "text"))
    return isinstance(value, str | list) and value not in ("", [])


def short_id(call_id: str | None) -> str | None:
    """An id of nine letters or digits: Mistral's templates refuse any other, to most it is all the same."""
    if call_id is None or re.fullmatch(r"[A-Za-z0-9]{9}", call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def new_id() -> str:
    """An id for a call to which the model gave none."""
    return uuid4().hex[:9]


_WINDOW = 8
"""Tokens decoded together for the text of the last one: decoders treat the first word of a text apart."""


def openai_logprobs(
    model: LanguageModel, estimator: Estimator, evidence: Evidence, *, top: int = 0
) -> dict[str, Any] | None:
    """`{"content": [{"token", "logprob", "bytes", "top_logprobs"}, ...]}` for the tokens of an answer.

    `top_logprobs` holds the `top` likeliest tokens at each place, the likeliest first, which takes another pass over
    prompt and answer; it is empty where `top` is 0.

    Natural logarithms, from the model's raw distribution. A token that ends inside a character has an empty text and
    no bytes; the one that completes the character has them all, so that the bytes together are the answer's. None
    where the logits were not finite.
    """
    timed = evidence.gradients(estimator.objective)
    found: Sequence[float] = () if timed is None else timed.scores.log_probs
    if len(found) != len(evidence.response_ids):
        return None
    tokens = token_texts(model, evidence.response_ids)
    others = evidence.likeliest(top) if top else ((),) * len(tokens)
    return {
        "content": [
            {**_entry(token, logprob), "top_logprobs": [_entry(token_texts(model, [i])[0], p) for i, p in likeliest]}
            for token, logprob, likeliest in zip(tokens, found, others, strict=True)
        ]
    }


def _entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}


def token_texts(model: LanguageModel, ids: Sequence[int], *, special: bool = True) -> list[str]:
    """The part of each token in the text; special tokens have one only where `special` is True."""
    texts: list[str] = []
    start = whole = 0  # tokens from `start` on are decoded together; those before `whole` ended with a whole character
    for end in range(1, len(ids) + 1):
        before, after = (_decode(model, ids[start:stop], special=special) for stop in (whole, end))
        complete = end == len(ids) or not after.endswith("\ufffd")
        texts.append(after[len(before) :] if complete else "")
        if complete:
            whole = end
            start = max(start, whole - _WINDOW)
    return texts


def _decode(model: LanguageModel, ids: Sequence[int], *, special: bool) -> str:
    tokenizer: Any = model.tokenizer
    return tokenizer.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
