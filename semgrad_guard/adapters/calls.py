"""Calls, of models and of tools, in the words of OpenAI and of frameworks.

Of models: their options, and the form of an answer, which is tools that it may or must call, or JSON that it must be.
Reasoning is recognised by the names that servers and frameworks use. Of tools: a gate lets single calls run, by the
uncertainty of the tokens in which they were written.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any, cast
from uuid import uuid4

from semgrad_guard.calibration import Binding, Calibration, calibrate_runs
from semgrad_guard.calibration.binding import CALL_FIELDS, CALLS, call_options, shared_by
from semgrad_guard.decision_log.entries import DecisionSink
from semgrad_guard.declared import names_in, plain
from semgrad_guard.declared import pairs_in as pairs_in
from semgrad_guard.engine.answers.answer import Evidence, Generation
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.engine.prompts.forms import FORM_FIELDS, Tool, ToolAnswer, call_rule, json_rule, one_of
from semgrad_guard.errors import InputError
from semgrad_guard.estimators import Estimator
from semgrad_guard.guard.decision import binding_of, doubt_of
from semgrad_guard.guard.parts import Structure, judged
from semgrad_guard.guard.policy import require_listener
from semgrad_guard.guard.steps import Steps, Work
from semgrad_guard.records import CallVerdict, Message, ToolCall, Verdict

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
        tools = tuple(cast("Sequence[Tool]", plain("tools", options.get("tools") or (), tuple[Any, ...])))
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
    given = cast("Mapping[str, Any]", response_format if isinstance(response_format, Mapping) else {})
    if response_format is None or given.get("type") == "text":
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

    def held(holder: Any) -> dict[str, Any]:
        fields = ((name, getattr(holder, name, None)) for name in CALL_FIELDS)
        return {name: value for name, value in fields if value is not None and not callable(value)}

    own = [getattr(client, name, None) for name in _MODEL_NAMES]
    given = {name: value for name, value in call.items() if name not in _MODEL_NAMES or value not in own}
    return call_options(held(getattr(client, "llm", None)), held(client), given)


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


# A gate of single calls of tools.

BLOCKED_WORDS = "Not run: it is not sure enough that this call of {tool} is right. Ask the user."
"""In the place of a blocked call's result. It tells no score."""

RunCalls = Iterable[tuple[Verdict | None, Sequence[ToolCall]]]
"""The calls of a recorded run, by message, with the verdicts on the messages."""


@dataclass(eq=False)
class Written:
    """A call that a model wrote in a turn, in the message of this number; whether it passes, once it is judged.

    `again` is the last message in which it was written so.
    """

    call: CallVerdict
    message: int
    verdict: Verdict
    again: int = 0
    passes: bool | None = None


class Turn:
    """What happens while an agent, and the agents that it calls, work on one message of a person's.

    `closed` holds the tools of which a call was blocked, with the number of that call's message.
    """

    def __init__(self) -> None:
        self.closed = dict[str, int]()
        self._messages = 0
        self._written = list[Written]()
        self._lock = Lock()

    def note(self, verdict: Verdict) -> None:
        """A model has written a message."""
        with self._lock:
            self._messages += 1
            self._written += [Written(call, self._messages, verdict) for call in verdict.calls]

    def take(self, call: ToolCall) -> Written | None:
        """The least certain of the calls that were written so and have not run; None: nobody wrote it."""
        with self._lock:
            found = [one for one in self._written if one.call.digest == call.digest]
            if not found:
                return None
            taken = max(found, key=lambda one: doubt_of(one.call))
            taken.again = max(one.message for one in found)
            self._written.remove(taken)
            return taken

    def put_back(self, own: Written | None) -> None:
        """The call has no result, and may run again."""
        if own is not None:
            with self._lock:
                self._written.append(own)

    def is_closed(self, tool: str, own: Written | None) -> bool:
        """Whether a call of the tool was blocked before this one was written."""
        return tool in self.closed and (own is None or self.closed[tool] < own.again)

    def close(self, tool: str, own: Written | None) -> None:
        """A call of the tool is blocked."""
        message = self._messages if own is None else own.message
        self.closed[tool] = min(message, self.closed.get(tool, message))


TURN: ContextVar[Turn | None] = ContextVar("semgrad_guard_turn", default=None)
"""The turn in which this happens; None outside of one."""


class CallGate:
    """A rule for single calls of tools; a front knows which calls are made, and which tools are closed.

    Raises:
        InputError: the rule is not about the tokens of calls, and the calls are not `scored_elsewhere`; or an option is
            of another kind.
    """

    def __init__(
        self,
        rule: Calibration,
        *,
        trusted: Collection[str] = (),
        words: str = BLOCKED_WORDS,
        log: DecisionSink | None = None,
        scored_elsewhere: bool = False,
    ) -> None:
        if not isinstance(cast("object", rule), Calibration) or not (scored_elsewhere or CALLS.is_of(rule.binding)):
            raise InputError(
                "this rule is not about tokens of tool calls: make one by calibrate_tool_calls, or give the score that "
                "it is about"
            )
        require_listener("log", log)
        self.rule, self.words, self.log = rule.require_intact(), plain("words", words, str), log
        self.trusted = names_in(trusted, "trusted")

    @contextmanager
    def turn(self) -> Generator[None]:
        """The time in which an agent works on one message of a person's. A turn within a turn is a part of it."""
        token = TURN.set(TURN.get() or Turn())
        try:
            yield
        finally:
            TURN.reset(token)

    def judged(self, call: ToolCall, uncertainty: float | None, bound: Binding | None = None) -> Steps[bool]:
        """Whether a call may run; a row of the log, where there is one.

        Raises:
            BindingMismatchError: it was scored in another way than the calls of the calibration.
        """
        if bound is not None and self.rule.binding is not None:
            self.rule.binding.require(bound)
        text = json.dumps({"name": call.name, "args": dict(call.arguments)}, default=repr)
        judging = partial(judged, self.rule, uncertainty, text=text, log=self.log)
        return judging() if self.log is None else (yield Work(judging))

    def words_for(self, tool: str) -> str:
        """What the model reads in the place of a blocked call's result."""
        return self.words.replace("{tool}", tool)


def scores_of(verdict: Verdict | None, calls: Sequence[ToolCall]) -> list[tuple[float | None, Binding | None]]:
    """The uncertainty of each call of a message as it is now, and what that is bound to.

    None for both where it was not written so, or not so often.
    """
    if verdict is None:
        return [(None, None)] * len(calls)
    written, now = Counter(one.digest for one in verdict.calls), Counter(call.digest for call in calls)
    return [
        score_of(verdict, digest) if now[digest] <= written[digest] else (None, None)
        for digest in (call.digest for call in calls)
    ]


def score_of(verdict: Verdict, digest: str) -> tuple[float | None, Binding | None]:
    """The uncertainty of a call that was written, the greatest where it was written more than once, and its binding."""
    worst = max((one for one in verdict.calls if one.digest == digest), key=doubt_of)
    if worst.uncertainty is None:
        return None, None
    own = binding_of(verdict)
    return worst.uncertainty, own.model_copy(update={"settings": CALLS.among(own.settings)})


def calibrate_calls(
    runs: object, calls_of: Callable[[Iterable[Any]], RunCalls], *, form: str, trusted: Collection[str], **how: Any
) -> Calibration:
    """The rule of a gate from recorded runs, given as pairs of what was recorded (its `form` in words) and the labels.

    Raises:
        InputError: there is something else than such pairs; a call has no label, or shares its id with another one of
            its run; or no run has a call.
        CalibrationError: the calls were scored in different ways.
    """
    left_out = names_in(trusted, "trusted")
    numbers, scores, right, bindings = list[int](), list[float | None](), list[bool](), list[Binding]()
    for number, (recorded, labels) in enumerate(pairs_in(runs, "runs", f"({form}, labels by call id)")):
        if not isinstance(labels, Mapping) or not isinstance(recorded, Iterable) or isinstance(recorded, str | Mapping):
            raise InputError(
                f"run {number + 1}: give a list of {form}, and a dict from the ids of its calls to True or False; "
                f"not {recorded!r:.40} and {labels!r:.40}"
            )
        known, labelled = set[str | None](), cast("Mapping[str | None, bool]", labels)
        scored = [
            (call, *found)
            for verdict, calls in calls_of(cast("Iterable[Any]", recorded))
            for call, found in zip(calls, scores_of(verdict, calls), strict=True)
        ]
        for call, uncertainty, bound in scored:
            if call.name in left_out:
                continue
            if call.id in known:
                raise InputError(f"run {number + 1}: two calls have the id {call.id!r}; give each call its own")
            known.add(call.id)
            if (label := labelled.get(call.id)) is None:
                raise InputError(f"run {number + 1}: the call {call.id!r} of {call.name} has no label")
            bindings += [] if bound is None else [bound]
            numbers.append(number)
            scores.append(uncertainty)
            right.append(label)
    if not bindings:
        raise InputError("no call of these runs has a score: record them with a model of semgrad-guard's")
    return calibrate_runs(numbers, scores, right, binding=shared_by(bindings, of="calls"), **how)
