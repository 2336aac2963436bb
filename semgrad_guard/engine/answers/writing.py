"""One answer as it is written, token by token, whichever engine runs the model's passes; and its text.

The visible part of an answer is its text behind reasoning, up to a stop string, and the tokens that carry it. While an
answer is written, `CertainText` shows its text as far as later tokens can no longer change it.
"""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from transformers import LogitsProcessorList
from transformers.cache_utils import Cache

from semgrad_guard.engine.answers.options import GenerationOptions, ThoughtLimit, sampling_processors
from semgrad_guard.engine.answers.writing_model import WritingModel
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.engine.prompts.thoughts import (
    Codec,
    Decode,
    Reasoning,
    Span,
    Thinking,
    held,
    joined,
    may_open,
    opening,
    read,
    reasoning_of,
)
from semgrad_guard.engine.scores.tape import KeysValues, Recorder, Tape
from semgrad_guard.records import is_blank

_CONTEXT = 8
"""Tokens that are decoded again before new ones, whose text may depend on them."""


@dataclass(frozen=True)
class Visible:
    """The delivered part of the tokens that were produced.

    `ids` carry `text` and nothing beyond it. `cut`: the stop string that ended the text; `retokenized`: it did so
    inside a token, so that `ids` are not the first tokens produced but the delivered text's own. `preceding` are the
    tokens produced before them: a thought and its marks. `reasoning` is that thought, None where it is empty.
    """

    text: str
    ids: tuple[int, ...]
    cut: str | None = None
    retokenized: bool = False
    preceding: tuple[int, ...] = ()
    reasoning: Reasoning | None = None

    @property
    def scored_ids(self) -> tuple[int, ...]:
        """The tokens that are scored; none where the reasoning rules a score out."""
        return () if self.reasoning and self.reasoning.why_unscored else self.ids


def answered(
    ids: Sequence[int], stop: Sequence[str], codec: Codec, thinking: Thinking | None, *, cut: bool = False
) -> Visible:
    """The answer among the tokens produced, up to the first stop string, and the reasoning before it (`cut`: a limit
    ended them)."""
    whole = codec.decode(ids, special=True)
    seen = whole if thinking is None else thinking.seen(ids, whole, codec.decode)
    by, parts = read(seen, thinking, cut=cut)
    reasoning = reasoning_of(whole, seen, parts, (thinking, by), cut=cut)
    if parts.answer == (0, len(whole)):
        return replace(visible(ids, stop, codec), reasoning=reasoning)
    tokens = answer_tokens(ids, whole, parts.answer or (len(whole), len(whole)), codec.decode)
    before = tuple(ids[: tokens.begin])
    if reasoning is not None:
        ends = [place for span in parts.thoughts if whole[slice(*span)].strip() for place in span] or [0, 0]
        begin, end = (up_to(place, before, codec.decode) for place in (ends[0], ends[-1]))
        reasoning = replace(reasoning, ids=before, span=(begin, end))
    if parts.answer is None:
        return Visible("", (), preceding=before, reasoning=reasoning)
    found = visible(ids[tokens.begin : tokens.end], stop, codec, tokens.clean)
    return replace(found, preceding=before, reasoning=reasoning)


def visible(ids: Sequence[int], stop: Sequence[str], codec: Codec, clean: Callable[[str], str] = str) -> Visible:
    """The text before the first stop string, and the tokens that carry it; none where the text is blank.

    `clean` leaves out of it what a thought's closing mark, and the white space behind it, have in the first token.
    """
    text = codec.decode(ids)
    shown = clean(text)
    ends = [(place, string) for string in stop if (place := shown.find(string)) >= 0]
    end, cut = min(ends, default=(len(shown), None))
    if is_blank(shown[:end]):
        return Visible(shown[:end], (), cut=cut)
    if cut is None:
        return Visible(shown, tuple(ids))
    delivered = text[: len(text) - len(shown) + end]
    count = next(n for n in range(len(ids) + 1) if codec.decode(ids[:n]).startswith(delivered))
    kept = codec.decode(ids[:count])
    if kept == delivered:
        return Visible(shown[:end], tuple(ids[:count]), cut=cut)
    raw = codec.decode(ids[:count], special=True)  # marks of tool calls must not get lost
    own = codec.encode(raw[: len(raw) - (len(kept) - len(delivered))])
    return Visible(shown[:end], own, cut=cut, retokenized=True)


@dataclass(frozen=True)
class AnswerTokens:
    """The tokens [begin, end) that carry an answer. The first of them may begin with `glued`, the end of a mark."""

    begin: int
    end: int
    glued: str = ""

    def clean(self, text: str) -> str:
        """The text of these tokens without the white space, and the piece of a mark, before it."""
        return text.lstrip().removeprefix(self.glued).lstrip()


def answer_tokens(ids: Sequence[int], text: str, answer: Span, decode: Decode) -> AnswerTokens:
    """The tokens of an answer; `text` is that of all `ids`, special tokens shown."""
    begin = up_to(answer[0], ids, decode)
    end = len(ids) if answer[1] >= len(text) else max(begin, up_to(answer[1], ids, decode))
    return AnswerTokens(begin, end, text[len(decode(ids[:begin], special=True)) : answer[0]].strip())


def up_to(place: int, ids: Sequence[int], decode: Decode) -> int:
    """The largest number of tokens whose text ends at a place or before it."""
    return bisect_right(range(1, len(ids) + 1), place, key=lambda count: len(decode(ids[:count], special=True)))


class StopStrings:
    """Whether the text of an answer holds one of these strings, whatever its thought holds.

    The newest tokens' text is looked through first, for it costs little; where it holds one, the whole answer is read.
    """

    def __init__(self, strings: Sequence[str], *, codec: Codec, thinking: Thinking | None) -> None:
        self._strings, self._codec, self._thinking = strings, codec, thinking
        self._reach = _CONTEXT + 4 * max(map(len, strings), default=0)  # a character has up to four tokens

    def end(self, ids: Sequence[int]) -> bool:
        """Whether an answer ends with these tokens."""
        newest = self._codec.decode(ids[-self._reach :]) if self._strings else ""
        if not any(string in newest for string in self._strings):
            return False
        return answered(ids, self._strings, self._codec, self._thinking, cut=True).cut is not None


@dataclass(frozen=True)
class ThoughtPiece:
    """A piece of the reasoning before an answer that is being written."""

    text: str


Piece = str | ThoughtPiece
"""A part of an answer that is being written: of its text, or of the thought before it."""


class CertainText:
    """An answer's text and its thought as the tokens come, as far as later tokens can no longer change them."""

    def __init__(self, decode: Decode, options: GenerationOptions, thinking: Thinking | None) -> None:
        self._decode, self._stop = decode, options.stop
        self._thinking = None if options.grammar else thinking
        self._ids: list[int] = []
        self._whole, self._at, self._end = "", 0, ""
        self._answer: AnswerTokens | None = None
        self._sent, self._thought = 0, ""

    def add(self, token: int) -> list[Piece]:
        """The pieces that have become certain with one more token."""
        self._ids.append(token)
        thought = self._begun() if self._answer is None else ""
        if self._answer is None:
            return self._pieces(thought, "", 0)
        own = self._ids[self._answer.begin :]
        if self._end:  # a mark that may hold control tokens, which the text does not show
            shown = self._decode(own, special=True)
            end = safe_length(shown, (self._end,))
            own = own if end == len(shown) else own[: up_to(end, own, self._decode)]
        text = self._decode(own)
        text = self._answer.clean(text) if self._answer.begin else text
        return self._pieces(thought, text, safe_length(text, self._stop))

    def rest(self, text: str, reasoning: Reasoning | None = None) -> list[Piece]:
        """The rest of the whole text, and of the thought before it."""
        return self._pieces("" if reasoning is None else reasoning.text, text, len(text))

    def _begun(self) -> str:
        """The thought as far as it is certain; the answer's tokens are known once it has certainly begun."""
        begin = max(0, self._at - _CONTEXT)  # only the last tokens are decoded again
        known = self._decode(self._ids[begin : self._at], special=True)
        whole = self._whole + self._decode(self._ids[begin:], special=True)[len(known) :]
        if not whole.endswith("\ufffd"):
            self._whole, self._at = whole, len(self._ids)
        if self._thinking is None and may_open(whole):
            return ""
        if self._thinking is None and (marks := opening(whole)):
            self._thinking = Thinking(marks)
        if (thinking := self._thinking) is None:
            self._answer = AnswerTokens(0, 0)
            return ""
        seen = thinking.seen(self._ids, whole, self._decode)
        seen = seen[: held(seen, thinking.marks.every)]
        thoughts, answer = (parts := thinking.parts(seen)).thoughts, parts.answer or (0, 0)
        if seen[slice(*answer)].strip() and (answer[0] or thinking.settled):  # else a closing mark may still come
            self._answer = answer_tokens(self._ids, whole, (answer[0], len(whole)), self._decode)
            self._end = parts.end
        return joined(whole[begin:end] for begin, end in thoughts)

    def _pieces(self, thought: str, text: str, end: int) -> list[Piece]:
        pieces: list[Piece] = []
        if len(thought) > len(self._thought) and thought.startswith(self._thought):
            pieces.append(ThoughtPiece(thought[len(self._thought) :]))
            self._thought = thought
        if end > self._sent:
            pieces.append(text[self._sent : end])
            self._sent = end
        return pieces


def safe_length(text: str, stops: Sequence[str]) -> int:
    """How much of `text` later tokens can no longer change."""
    places = (place for stop in stops if (place := text.find(stop)) >= 0)
    return min(len(text.rstrip("\ufffd")), held(text, stops), *places)


class WrittenAnswer:
    """An answer to a prompt that is being written. `error` is the error that ended it, where it cannot be written.

    `listener` gets every piece of text and thought, as soon as it is certain. `processors` choose its tokens in the
    place of the options' sampling.

    `passes` are the recorders that hold it, with its row; `begin` is the position of the first state that they keep.
    `keys` are those of its positions, once it is done. Or else `cut` is the cache of all positions before `begin`.
    """

    def __init__(
        self,
        model: WritingModel,
        prompt: Prompt,
        options: GenerationOptions,
        *,
        listener: Callable[[Piece], None] | None = None,
        processors: LogitsProcessorList | None = None,
    ) -> None:
        self.prompt, self.options, self._listener = prompt, options, listener
        self.replayed = False  # whether its tape is incomplete, so that its text is read again for its score
        self.ids: list[int] = []
        self.ended, self.done = False, False
        self.passes: list[tuple[Recorder, int]] = []
        self.begin = 0
        self.keys: Sequence[KeysValues] = ()
        self.cut: Cache | None = None
        self.epoch: object = None
        self.error: BaseException | None = None
        thinking, limit = thinking_of(prompt, options), options.max_thinking_tokens
        self._certain = CertainText(model.decode, options, prompt.thinking)
        self._processors = _processors(model, prompt, options) if processors is None else processors
        self._limit = None if limit is None else ThoughtLimit(limit, thinking, model)
        self._stop = StopStrings(options.stop, codec=model, thinking=thinking)
        self._codec, self._end_tokens = model, model.end_tokens

    @property
    def reads(self) -> tuple[Hashable, ...]:
        """Answers that are equal in this read the same prompt."""
        return tuple(self.prompt.ids), self.prompt.semantic_token.offset

    def write(self, logits: torch.Tensor, likeliest: int) -> None:
        """Write one more token, chosen from the head's output [V]; an answer that cannot continue is done (`take`)."""
        self._or_fail(lambda: self._take(self._choice(logits, likeliest)))

    def take(self, token: int) -> None:
        """One more token, however it was chosen. An answer that cannot continue is done, with its error."""
        self._or_fail(lambda: self._take(token))

    def finish(self, text: str, reasoning: Reasoning | None) -> None:
        """Send the rest of the whole text to the listener; where that fails, this answer alone has an error."""
        self._or_fail(lambda: self._show(self._certain.rest(text, reasoning)))

    def _or_fail(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the caller that waits for this answer gets it
            self.fail(error)

    def visible(self) -> Visible:
        """The answer among the tokens produced."""
        thinking = thinking_of(self.prompt, self.options)
        return answered(self.ids, self.options.stop, self._codec, thinking, cut=not self.ended)

    def fail(self, error: BaseException) -> None:
        """The answer ends here, with an error."""
        self.error, self.done = error, True

    def end(self, tokens: int) -> None:
        """The answer ends here, with so many of its tokens."""
        del self.ids[tokens:]
        self.ended = self.done = True

    def tape(self, keys: Sequence[KeysValues] | None = None) -> Tape | None:
        """What writing it left, with its own keys or these; None where nothing was kept."""
        if self.replayed or not (self.passes or self.cut):
            return None
        return Tape(tuple(self.passes), self.begin, len(self.prompt.ids) - 1, keys or self.keys, self.epoch, self.cut)

    def _choice(self, logits: torch.Tensor, likeliest: int) -> int:
        """The next token, from the head's output [V] and its likeliest token."""
        if self._limit is not None and (forced := self._limit.forced(self.ids)) is not None:
            return forced
        if not self._processors:
            return likeliest
        ids = torch.tensor([[*self.prompt.ids, *self.ids]], device=logits.device)
        scores: Any = self._processors(cast(Any, ids), cast(Any, logits[None].to(torch.float32, copy=True)))
        return int(scores.argmax())

    def _take(self, token: int) -> None:
        if token in self._end_tokens:
            self.ended = self.done = True
            return
        self.ids.append(token)
        if self._listener is not None:
            self._show(self._certain.add(token))
        self.done = len(self.ids) >= self.options.max_tokens or self._stop.end(self.ids)

    def _show(self, pieces: Sequence[Piece]) -> None:
        if self._listener is not None and self.error is None:
            for piece in pieces:
                self._listener(piece)


def thinking_of(prompt: Prompt, options: GenerationOptions) -> Thinking | None:
    """How an answer to this prompt thinks. Under a grammar there are no thoughts."""
    return None if options.grammar else prompt.thinking


def _processors(model: WritingModel, prompt: Prompt, options: GenerationOptions) -> LogitsProcessorList:
    """Those that make the likeliest token the options' choice, none where it is greedy.

    A grammar goes first, so that sampling chooses among the tokens that it allows.
    """
    found = LogitsProcessorList()
    if options.temperature > 0:
        seed = secrets.randbits(31) if options.seed is None else options.seed
        found = sampling_processors(seed, temperature=options.temperature, top_p=options.top_p, top_k=options.top_k)
    if options.grammar is not None:
        found.insert(0, model.grammars.processor(options.grammar, width=len(prompt.ids)))
    return found
