"""From a conversation to the prompt a model sees: text, token ids, and the semantic token t* among them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from semgrad_guard.engine.objective import MARK, TokenizedText, find_semantic_token, header_text
from semgrad_guard.engine.prompts.thoughts import TEMPLATE_FAILURES, Marks, Thinking, has_option, marks_of, switch_of
from semgrad_guard.errors import EmptyPromptError, InputError, PromptTooLongError, UnsupportedModelError
from semgrad_guard.records import Conversation, Message, PromptForm, SemanticToken, ToolCall

Turn = dict[str, Any]

_Untyped = Any
"""A `PreTrainedTokenizerBase` behind the boundary: transformers leaves much of its signatures unknown."""

_RESERVED_OPTIONS = frozenset({"conversation", "tokenize", "add_generation_prompt", "continue_final_message"})

_CHARACTERS = 64

PLAIN = "plain"
"""The fingerprint where there is no chat template."""

_BARE = PromptForm(text="", tokens=0, roles=("user",), user_text="")


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt. `text` was tokenised; `ids` are its tokens; `semantic_token` is t* among them.

    `question` is the last text the user wrote (the last text at all if no user spoke), or the bare question of
    its `Message`; `context` is the passage that it names, if it does. `form` is plain data, which a calibration
    compares with its own prompts. `thinking` is how the model writes thoughts after it, None where the template names
    no marks of thoughts.
    """

    text: str
    ids: tuple[int, ...]
    semantic_token: SemanticToken
    question: str = ""
    context: str | None = None
    form: PromptForm = _BARE
    thinking: Thinking | None = None


def render(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    *,
    semantic_token: int | None = None,
    template_options: Mapping[str, Any] | None = None,
    window: int | None = None,
) -> Prompt:
    """Render and tokenise a conversation, and find its semantic token.

    With a chat template, messages are rendered with the generation prompt (a plain string being one user turn) and
    tokenised once, without adding the special tokens that the template already writes. Without one, the contents,
    joined by blank lines (and one behind them, after earlier answers), are tokenised as ordinary text and t* is the
    last token. Where a template has no system turn, the system's text is in a turn of the user.
    `semantic_token` overrides t*, counting from the prompt's end (-1 is its last token); `template_options` go to the
    template; among them, `thinking` is "on", "off" or "auto", whatever the template calls its switch.
    `window` is how many tokens the model can attend over, None if it states no limit.

    Raises:
        EmptyPromptError, InputError: the conversation cannot be rendered.
        PromptTooLongError: it has so many characters that it is not even tokenised (see `require_bounded`).
        UnsupportedModelError: the chat template leaves out the question.
    """
    turns = _checked(conversation)
    if not any(turn["content"].strip() for turn in turns):
        raise EmptyPromptError("The prompt is empty or nothing but white space; ask something.")
    options = _told(tokenizer, template_options)
    template = chat_template(tokenizer, options)
    text = _joined(turns) if template is None else _apply_template(tokenizer, turns, options)
    require_bounded(text, window, name="prompt")
    prompt, thinking = tokenize(tokenizer, text, add_special_tokens=template is None), None
    ids = (_before_a_word(tokenizer, text) if template is None else None) or prompt.ids
    place = None if semantic_token is None else _override(semantic_token, len(ids))
    if template is not None:
        marks, found, header = _marks(tokenizer, template), *_answer_of(tokenizer, turns, options, prompt)
        if found is None and place is None:
            raise UnsupportedModelError(
                "The chat template leaves out the text that asks, so the model would answer something else. Mend the "
                "tokenizer's chat_template, or use another model."
            )
        place, added = place or found, cast("_Untyped", tokenizer).get_added_vocab()
        thinking = None if marks is None else Thinking.behind(header, marks, added)
    asking = _asked(turns)
    message = conversation if isinstance(conversation, str) else conversation[asking]
    question, context = turns[asking]["content"], None
    if isinstance(message, Message) and message.question is not None:
        question, context = message.question, message.context
    return Prompt(
        text,
        ids,
        place or SemanticToken(-1, "last_token"),
        question=question,
        context=context,
        form=PromptForm(
            text=text,
            tokens=len(ids),
            roles=tuple(turn["role"] for turn in turns),
            user_text=turns[asking]["content"],
            tools=_fingerprint(options["tools"]) if options.get("tools") else None,
            control=control_tokens(tokenizer, [*turns, options.get("documents")]),
        ),
        thinking=thinking,
    )


def _answer_of(
    tokenizer: _Untyped, turns: Sequence[Turn], options: Mapping[str, Any], prompt: TokenizedText
) -> tuple[SemanticToken | None, str]:
    """t* of a template's prompt, and the header that opens the answer; no t* where the text that asks is left out."""
    asking = _asked(turns)
    with_mark = {**turns[asking], "content": turns[asking]["content"].rstrip() + MARK}
    marked = _apply_template(tokenizer, [*turns[:asking], with_mark, *turns[asking + 1 :]], options)
    unprompted = _apply_template(tokenizer, turns, options, add_generation_prompt=False)
    special = [token.content for token in tokenizer.added_tokens_decoder.values()]
    header = header_text(prompt.text, unprompted, marked, special_tokens=special)
    if marked == prompt.text:
        return None, header
    return find_semantic_token(prompt, unprompted=unprompted, marked=marked, special_tokens=special), header


def require_bounded(text: str, window: int | None, *, name: str) -> None:
    """Refuse a text that cannot fit by far: tokenising many megabytes, only to find that out, would take minutes.

    A token covers some four characters of ordinary text, and never `_CHARACTERS` in a real question.

    Raises:
        PromptTooLongError: the text has more characters than that for every token of the context window.
    """
    if window is not None and len(text) > _CHARACTERS * window:
        raise PromptTooLongError(
            f"the {name} has {len(text):,} characters, far more than fit into this model's context window of {window} "
            "tokens; shorten it"
        )


def count_tokens(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    *,
    template_options: Mapping[str, Any] | None = None,
) -> int:
    """Tokens of the prompt that `render` gives, without looking for t*; turns without any text count as they are.

    Raises:
        InputError: the chat template refuses the conversation.
    """
    turns, options = _checked(conversation), _told(tokenizer, template_options)
    if not turns:
        return 0
    plain = chat_template(tokenizer, options) is None
    text = _joined(turns) if plain else _apply_template(tokenizer, turns, options)
    encoding: Any = tokenizer(text, add_special_tokens=plain)
    return len(encoding["input_ids"])


def calls_tools(conversation: Conversation) -> bool:
    """Whether a conversation holds calls of tools."""
    turns: Any = conversation if isinstance(conversation, Sequence) and not isinstance(conversation, str) else ()
    return any(
        turn.tool_calls if isinstance(turn, Message) else isinstance(turn, Mapping) and turn.get("tool_calls")
        for turn in turns
    )


def template_fingerprint(tokenizer: PreTrainedTokenizerBase, template_options: Mapping[str, Any] | None = None) -> str:
    """Twelve hex digits that change with the chat template or its options; "plain" where there is no template.

    Calibrations are bound to it: another template poses another question, whose scores mean something else.
    """
    options = _told(tokenizer, template_options)
    template = chat_template(tokenizer, options)
    if template is None:
        return PLAIN
    return _fingerprint([template, options])


def _fingerprint(record: object) -> str:
    """Twelve hex digits that change with a record of plain values and functions, which count by name (no address)."""
    text = json.dumps(record, sort_keys=True, default=lambda one: getattr(one, "__qualname__", None) or str(one))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def _checked(conversation: object) -> list[Turn]:
    """The conversation as fresh dictionaries, checked: callers without a type checker pass anything."""
    if isinstance(conversation, str):
        conversation = [Message("user", conversation)]
    if isinstance(conversation, bytes | Mapping) or not isinstance(conversation, Sequence):
        raise InputError("A conversation is a string or a list of messages; wrap a single message in a list.")
    messages = cast("Sequence[object]", conversation)
    return [_turn(message, number) for number, message in enumerate(messages, start=1)]


def _turn(message: object, number: int) -> Turn:
    if isinstance(message, Message):
        # In transformers' form; unset fields stay away, as templates test `is defined`.
        calls = [_as_call(call) for call in message.tool_calls]
        named = {"tool_calls": calls or None, "tool_call_id": message.tool_call_id, "name": message.name}
        set_fields = {key: value for key, value in named.items() if value is not None}
        turn: Turn = {"role": message.role, "content": message.content, **set_fields}
    elif isinstance(message, Mapping):
        turn = dict(cast("Mapping[str, Any]", message))  # keys are checked just below
    else:
        raise InputError(f"Message {number} is a {type(message).__name__}; use Message or a role/content mapping.")
    for key in ("role", "content"):
        if not isinstance(turn.get(key), str):
            raise InputError(f"Message {number} needs a string {key!r}, but has {turn.get(key)!r}.")
    require_text(f"Message {number}", turn["content"])
    return turn


def require_text(name: str, text: object) -> None:
    """Refuse what is no text, or no valid one.

    Raises:
        InputError: it is.
    """
    if not isinstance(text, str):
        raise InputError(f"{name} must be a text, not {text!r:.60}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{name} holds a lone surrogate and is no valid Unicode text: {error}.") from error


def _as_call(call: ToolCall) -> Turn:
    function = {"name": call.name, "arguments": dict(call.arguments)}
    return {"type": "function", "function": function, **({} if call.id is None else {"id": call.id})}


def _asked(turns: Sequence[Turn]) -> int:
    """Which turn holds the last text the user wrote (the last text at all if no user spoke)."""
    written = [i for i, turn in enumerate(turns) if turn["content"].strip()]
    return max((i for i in written if turns[i]["role"] == "user"), default=written[-1])


def chat_template(tokenizer: _Untyped, options: Mapping[str, Any]) -> str | None:
    """The Jinja text that will render, or None: `chat_template` among the options goes before the tokenizer's own."""
    chosen = options.get("chat_template")
    if tokenizer.chat_template is None and chosen is None:
        return None
    try:
        return tokenizer.get_chat_template(chosen, options.get("tools"))
    except ValueError as error:  # several named templates and none called "default"
        advice = "name one with template_options={'chat_template': ...}"
        raise InputError(str(error).rstrip(".")).about("tools", advice=advice) from error


def _told(tokenizer: _Untyped, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options for the chat template, with the switch for thinking in the template's own words."""
    options = dict(given or {})
    thinking = options.pop("thinking") if options.get("thinking") in ("on", "off", "auto") else "auto"
    effort = options.get("reasoning_effort")
    if effort is None and thinking == "auto":
        return options
    template = chat_template(tokenizer, options)

    def probe(**switch: Any) -> str:
        chosen = {"chat_template": template, **switch}
        return "" if template is None else _apply_template(tokenizer, [{"role": "user", "content": "Hi"}], chosen)

    if effort is not None and not has_option(probe, "reasoning_effort", ("low", "high")):
        del options["reasoning_effort"]
        if effort != "none":
            raise InputError(f"this model's chat template has no reasoning_effort, so it cannot be {effort!r}").about(
                "reasoning_effort"
            )
        thinking = "off"
    if thinking == "auto":
        return options
    thinks = _marks(tokenizer, template or "") is not None
    return {**options, **switch_of(template or "", probe, on=thinking == "on", thinks=thinks)}


def _marks(tokenizer: _Untyped, template: str) -> Marks | None:
    """The marks of a model's thoughts, looked up once for each template."""
    return marks_of(template, json.dumps(getattr(tokenizer, "response_template", None), default=str))


def _apply_template(
    tokenizer: _Untyped, turns: Sequence[Turn], options: Mapping[str, Any], *, add_generation_prompt: bool = True
) -> str:
    if reserved := _RESERVED_OPTIONS & options.keys():
        raise InputError(f"template_options cannot set {', '.join(sorted(reserved))}: rendering decides these.")

    rendered, failure = list[str](), None
    for given in (turns, *_foldings(turns)):
        try:
            text = tokenizer.apply_chat_template(
                list(given), tokenize=False, add_generation_prompt=add_generation_prompt, **options
            )
        except TEMPLATE_FAILURES as error:
            failure = failure or error
            continue
        if all(turn["content"].strip() in text for turn in given if turn["role"] == "system"):
            return text
        rendered.append(text)  # it drops such a turn in silence, or reads it in a way of its own
    if rendered:
        return rendered[0]
    roles = ", ".join(turn["role"] for turn in turns)
    raise InputError(
        f"The chat template refused the conversation (roles: {roles}). It said: {str(failure).strip().rstrip('.')}."
    ).about("messages") from failure


def _foldings(turns: Sequence[Turn]) -> Iterator[list[Turn]]:
    """The turns without system turns but the first, then without any; none where there are none.

    LlamaIndex's default prompts, agents' instructions and summaries are system turns, which the templates of Gemma 2
    and of the first Mistral refuse. Other templates leave a late system turn out in silence.
    """
    system = [index for index, turn in enumerate(turns) if turn["role"] == "system"]
    if any(system):
        yield [*turns[:1], *_folded(turns[1:])]
    if system:
        yield _folded(turns)


def _folded(turns: Sequence[Turn]) -> list[Turn]:
    """System turns as the beginning of the next turn of the user; as the end of the last one where none follows."""
    kept, waiting = list[Turn](), list[str]()
    for turn in turns:
        if turn["role"] == "system":
            waiting.append(turn["content"])
        elif turn["role"] == "user":
            kept.append({**turn, "content": _as_one([*waiting, turn["content"]])})
            waiting.clear()
        else:
            kept.append(turn)
    last = max((index for index, turn in enumerate(kept) if turn["role"] == "user"), default=None)
    if last is None:
        return [*kept, {"role": "user", "content": _as_one(waiting)}] if waiting else kept
    kept[last] = {**kept[last], "content": _as_one([kept[last]["content"], *waiting])}
    return kept


def _as_one(texts: Sequence[str]) -> str:
    return "\n\n".join(text for text in texts if text.strip())


def _joined(turns: Sequence[Turn]) -> str:
    """The prompt of a model that has no chat template.

    Where answers have gone before (few-shot examples), the next one begins as they did: otherwise the
    model would write the blank line itself, and a stop string of line breaks would end every answer before it begins.
    """
    contents = [turn["content"] for turn in turns]
    goes_on = turns[-1]["role"] != "assistant" and any(turn["role"] == "assistant" for turn in turns)
    return "\n\n".join([*contents, ""] if goes_on else contents)


def _before_a_word(tokenizer: _Untyped, text: str) -> tuple[int, ...] | None:
    """The tokens of a text that ends in white space, as they are where a word follows; None where nothing shows them.

    Tokenizers like GPT-2's write two line breaks as one token at a text's end and as two before a word. A model that
    has seen the latter before every answer writes another break, or no answer, behind the former.
    """
    if not (tokenizer.is_fast and text[-1:].isspace()):
        return None
    longer = tokenize(tokenizer, f"{text}A", add_special_tokens=True)
    word = longer.first_token_of(len(text))
    straddles = longer.spans is None or longer.spans[word][0] != len(text)  # it holds the white space and the letter
    return None if straddles else longer.ids[:word]


def tokenize(tokenizer: _Untyped, text: str, *, add_special_tokens: bool) -> TokenizedText:
    """A text with its tokens, and where the tokenizer knows it, their places."""

    def encode(piece: str) -> tuple[int, ...]:
        return tuple(tokenizer(piece, add_special_tokens=False)["input_ids"])

    encoding = tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=tokenizer.is_fast)
    ids = tuple(encoding["input_ids"])
    if not ids:
        raise EmptyPromptError("The prompt holds no token; ask something.")
    return TokenizedText(text, ids, tuple(encoding["offset_mapping"]) if tokenizer.is_fast else None, encode)


def _override(offset: int, length: int) -> SemanticToken:
    if not -length <= offset <= -1:
        raise InputError(f"semantic_token counts from the end, -{length} to -1 in this prompt, and is {offset}.")
    return SemanticToken(offset, "override")


_MARK = re.compile(r"[<\[{⟨｜].*[>\]}⟩｜]", re.DOTALL)
"""The form of marks ("<think>", "[TOOL_CALLS]") that a tokenizer knows as one token and does not call special."""


def control_tokens(tokenizer: PreTrainedTokenizerBase, texts: Any) -> tuple[str, ...]:
    """The control tokens that a tokenizer reads in texts: those of users, passages and tool results alike.

    With one of them a text can end its own turn and write another one, as the chat template does. `texts` is any
    structure of texts: messages, passages, arguments of calls.
    """
    added = tokenizer.added_tokens_decoder.items()
    control = {
        id: token.content for id, token in added if token.content and (token.special or _MARK.fullmatch(token.content))
    }
    first = {content[0] for content in control.values()}
    doubtful = [text for text in _strings(texts) if not first.isdisjoint(text)]
    if not doubtful:
        return ()
    read = cast("Any", tokenizer)(doubtful, add_special_tokens=False)["input_ids"]
    return tuple(sorted({control[id] for ids in read for id in ids if id in control}))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings(list(cast("Mapping[Any, Any]", value).values()))
    elif isinstance(value, (list, tuple)):
        for part in cast("list[Any]", value):
            yield from _strings(part)
