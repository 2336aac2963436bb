"""`ReportedScorer`: scores of another server's answers, from the log-probabilities that it reports with them.

No copy of the model is needed. A number is computed only where the reported tokens spell the answer and every one of
them has a log-probability: else the answer is unscored, with the reason. The scores are those of the tokens that were
written, as the server computes them: `max_probability` and `gnll` are likelihoods, and `top_entropy` is the mean
entropy of the `top` likeliest tokens and of all others as one outcome, a lower bound of the model's own entropy.

A calibration is bound to the server's name for the model, to the number of reported alternatives, and to the options of
the calls. The server's weights are not known here: a server that changes them under one name is not noticed.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any, Self, cast

from semgrad_guard.calibration import Binding, Calibration
from semgrad_guard.calibration.binding import Unit
from semgrad_guard.engine.prompts.thoughts import doubted_from
from semgrad_guard.engine.text_units import Span, decided, leanings, sentences
from semgrad_guard.errors import BindingMismatchError, InputError
from semgrad_guard.guard.decision import binding_of, unscored
from semgrad_guard.guard.flow import Draft, EarlySentences, SentencePiece
from semgrad_guard.guard.parts import WITHOUT_END, Structure, most_doubtful, scored_parts
from semgrad_guard.guard.policy import Terms
from semgrad_guard.guard.question import current_recorder
from semgrad_guard.records import Message, PromptForm, SentenceVerdict, ToolCall, Verdict, digest_of, is_blank
from semgrad_guard.settings import REPORTED, OnDoubt

TOP = 5
"""The alternatives to each token that are requested; OpenAI's servers report up to 20."""
_NOT_KNOWN = -9000.0
"""Servers write -9999 for a token whose log-probability they do not know."""
_ROUNDING = 1e-3
_WORD = re.compile(r"\w+|[^\w\s]")
_CONTROL = re.compile(r"<\|[\w.-]+\|>|</?s>|<(?:start|end)_of_turn>|\[/?INST\]")
"""The control tokens of well-known models: which of them this one has is not known here."""

_SILENT = "every reported log-probability is 0, as where a server does not compute them"
_OTHER_TEXT = "the reported tokens do not spell the answer"
_GIVEN_UP = "its server gives no reason why the answer ended, and may have given it up"
_THOUGHT = "the answer holds its reasoning; have its server give the reasoning apart"
Placed = tuple[int, Mapping[str, Any]]
"""A reported token, behind the place in the text's bytes where it ends."""


class _NoScore(Exception):  # noqa: N818 - no error: the reason why an answer has no score
    pass


@dataclass(frozen=True)
class ReportedScorer:
    """Scores the answers of the model that its server calls `model`.

    Raises:
        InputError: log-probabilities do not allow this score.
    """

    model: str
    estimator: str = REPORTED[0]
    top: int = TOP
    by_sentence: OnDoubt | None = None
    """What happens at a doubtful sentence, which scores are bound to; None: the whole answer has one score."""

    def __post_init__(self) -> None:
        if self.estimator not in REPORTED:
            raise InputError(
                f"{self.estimator} needs the model itself; a server's log-probabilities allow {', '.join(REPORTED)}. "
                "Choose one of these, or give a local copy of the weights as scorer"
            )

    @classmethod
    def of(
        cls,
        model: str,
        calibration: Calibration | None,
        estimator: str | None = None,
        by_sentence: OnDoubt | None = None,
    ) -> Self:
        """The scorer for a calibration of this server's answers; without one, by default `max_probability`.

        Raises:
            BindingMismatchError: the calibration is not about a server's log-probabilities.
        """
        bound = None if calibration is None else calibration.binding
        if bound is None:
            return cls(model, estimator or REPORTED[0], by_sentence=by_sentence)
        if not (bound.settings or {}).get("reported"):
            raise BindingMismatchError(
                f"The calibration was made for scores of a local model ({bound.estimator}), and this server's answers "
                "are scored by the log-probabilities that it reports. Make one with `semgrad-guard calibrate --engine "
                "URL`, or score with a local copy of the weights (scorer)"
            )
        top: Any = (bound.settings or {}).get("top_logprobs", TOP)
        return cls(model, estimator or bound.estimator, int(top), by_sentence)

    @property
    def request(self) -> dict[str, Any]:
        """The fields of a request for an answer that can be scored."""
        return {"logprobs": True, "top_logprobs": self.top}

    @property
    def settings(self) -> dict[str, Any]:
        """The part of a binding that tells these scores from a local model's."""
        settings = {"reported": True, "top_logprobs": self.top}
        return settings if self.by_sentence is None else Unit.sentences(self.by_sentence).among(settings)

    @property
    def binding(self) -> Binding:
        """The binding of an answer, without the options of its call."""
        return binding_of(self.unscored("", ""))

    def unscored(self, text: str, reason: str, **facts: Any) -> Verdict:
        """The verdict on an answer that cannot be scored."""
        known = {"model": self.model, "estimator": self.estimator, "settings": self.settings}
        return unscored(text, reason=reason, **known, **facts)

    def verdict(
        self,
        text: str,
        entries: Any,
        *,
        options: Mapping[str, Any],
        prompt: PromptForm | None = None,
        cut: bool | None = False,
        reasoning: str | None = None,
        ended: Sequence[Span] | None = None,
        is_part: bool = False,
    ) -> Verdict:
        """The undecided verdict on an answer; `entries` are its log-probabilities in OpenAI's form.

        `options` are those of its call (`call_options`), `cut` tells whether a limit stopped it (None: its server gives
        no reason, so that it may have been given up), and `reasoning` is the text that was written before it. By
        sentence, `ended` are the sentences that have ended in a text that is still being written, and the verdict is on
        these. `is_part`: the text was ended behind a sentence, and a token that reaches beyond is none of that one's.
        """
        facts: dict[str, Any] = {
            "options": dict(options),
            "reasoning": reasoning or None,
            "prompt": None if prompt is None else digest_of(prompt.text),
        }
        tokens, reason = _tokens_of(text, entries, is_part=is_part)
        reason = _GIVEN_UP if cut is None else reason
        shown, scores, uncertainty = text, dict[str, float](), None
        if self.by_sentence is not None and not is_blank(text):
            spans = sentences(text) if ended is None else ended
            shown = text[: spans[-1][1]]
            end = spans[-1][0 if cut is None else 1]  # the last sentence may have been given up in its middle
            tokens = tokens[: _count_until(tokens, _bytes_until(text, end))]
            facts["sentences"] = found = self._sentences(text, spans, tokens, reason)
            uncertainty, reason = most_doubtful(found)
            facts |= {"cut": len(tokens) if cut else None, "scored_tokens": len(tokens)}
        try:
            if reason is not None:
                raise _NoScore(reason)
            own, scores = self._scored([token for _, token in tokens])
            if not scores["gnll"]:
                raise _NoScore(_SILENT)
        except _NoScore as why:
            return self.unscored(shown, str(why), **facts)
        known = {"status": "scored", "reason": None, "uncertainty": own if uncertainty is None else uncertainty}
        facts |= {"cut": len(tokens) if cut else None, "scored_tokens": len(tokens)}
        return self.unscored(shown, "", **facts, **scores).revised(**known)

    def parts(self, entries: Any, calls: Sequence[ToolCall], structure: Structure | None) -> dict[str, Any]:
        """A verdict's fields about the calls of an answer and, where it owes a structure, its values.

        A server that reports no tokens of a call leaves it unscored.
        """
        tokens: Sequence[Any] = cast("Sequence[Any]", entries) if isinstance(entries, Sequence) else ()
        own = [bytes_of(token) for token in tokens]
        if not (calls or structure) or None in own:
            return scored_parts("", calls, None, lambda _: ())
        written = cast("list[bytes]", own)
        ends = list(accumulate(map(len, written)))
        text = b"".join(written).decode("utf-8", "replace")

        def scored(spans: Sequence[Span]) -> list[float | None]:
            reached, found = 0, list[float | None]()
            for start, end in spans:
                begin = max(reached, bisect_right(ends, _bytes_until(text, start)))
                reached = max(reached, min(bisect_right(ends, _bytes_until(text, end)) + 1, len(ends)))
                try:
                    found.append(self._scored(tokens[begin:reached])[0] if begin < reached else None)
                except _NoScore:
                    found.append(None)
            return found

        return scored_parts(text, calls, structure, scored)

    def _scored(self, tokens: Sequence[Mapping[str, Any]]) -> tuple[float, dict[str, float]]:
        """The uncertainty of some tokens, and their likelihoods."""
        nll = -math.fsum(map(_log_prob, tokens))
        scores = {"gnll": nll, "max_probability": -math.expm1(-nll / len(tokens))}
        if self.estimator in scores:
            return scores[self.estimator], scores
        return math.fsum(_entropy(token, self.top) for token in tokens) / len(tokens), scores

    def _sentences(
        self, text: str, spans: Sequence[Span], tokens: Sequence[Placed], reason: str | None
    ) -> tuple[SentenceVerdict, ...]:
        """The undecided sentences; a token belongs to that of its last character.

        `reason` is why the tokens do not spell the text to its end: a sentence that they do not spell has no score, and
        those before it have theirs.
        """
        spelled, begin, silent = tokens[-1][0] if tokens else 0, 0, True
        found: list[SentenceVerdict] = []
        for (start, end), before in zip(spans, leanings(text, spans), strict=True):
            until = _count_until(tokens, _bytes_until(text, end))
            part, begin = [token for _, token in tokens[begin:until]], until
            silent = silent and not any(token.get("logprob") for token in part)
            own: dict[str, Any] = {}
            try:
                if reason is not None and spelled < len(text[:end].rstrip().encode("utf-8", "replace")):
                    raise _NoScore(reason)
                if not part:
                    raise _NoScore(WITHOUT_END)
                own = dict(zip(("uncertainty", "scores"), self._scored(part), strict=True))
                if silent:
                    raise _NoScore(_SILENT)
            except _NoScore as why:
                own = {"reason": str(why)}
            found.append(SentenceVerdict(start=start, end=end, tokens=len(part), leans_on=before, **own))
        return tuple(found)


class ReportedSentences:
    """Finds the sentences of one answer that these terms let through, as their log-probabilities arrive.

    `options` are those of the call, and `prompt` is the form of its prompt. `text` is the answer so far; once it
    `is_over`, the rest is not delivered, and the text ends behind the sentence that is not let through.
    """

    def __init__(
        self, scorer: ReportedScorer, terms: Terms, *, options: Mapping[str, Any], prompt: PromptForm | None
    ) -> None:
        self._scored, self._prompt = partial(scorer.verdict, options=options, prompt=prompt), prompt
        self._new = list[SentencePiece]()
        self._early = EarlySentences(terms, self._new.append)
        self._ends: list[int] = [0]
        self._entries = list[Any]()
        self._written, self._is_late = b"", False
        self.text, self.is_over = "", False

    @classmethod
    def of(
        cls,
        scorer: ReportedScorer | None,
        terms: Terms | None,
        *,
        options: Mapping[str, Any],
        prompt: PromptForm | None,
    ) -> ReportedSentences | None:
        """None where only the end of the answer decides."""
        if scorer is None or scorer.by_sentence is None or terms is None or current_recorder() is not None:
            return None
        if not terms.delivers_early:
            return None
        return cls(scorer, terms, options=options, prompt=prompt)

    def add(self, text: str, entries: Any) -> list[SentencePiece]:
        """The sentences that may leave now; `text` is the newest piece, and `entries` came with it."""
        if self.is_over:
            return []
        new = list[Any](entries or ())
        self.text += text
        self._entries += new
        self._written += b"".join(bytes_of(entry) or b"" for entry in new)
        self._is_late = self._is_late or len(self._written.strip()) < len(self.text.strip().encode("utf-8", "replace"))
        if self._is_late or not text:
            return []
        self._new.clear()
        if ends := decided(self.text, self._ends[-1]):
            self._ends += ends
            verdict = self._scored(self.text, self._entries, ended=list(pairwise(self._ends)))
            self.is_over = not self._early.add(Draft(verdict, None, self._prompt))
        if self.is_over:
            self.text = self.text[: self._ends[-1]]
        return list(self._new)


def prompt_of(conversation: Sequence[Message], tools: Sequence[Any] = ()) -> PromptForm | None:
    """The form of a prompt whose template and tokens only its server knows: its messages, and words for tokens."""
    if not conversation:
        return None
    bodies = [
        message.content + "".join(f"\n{call.name}({json.dumps(dict(call.arguments))})" for call in message.tool_calls)
        for message in conversation
    ]
    text = "".join(f"[{turn.role}]\n{body}\n" for turn, body in zip(conversation, bodies, strict=True))
    users = [message.content for message in conversation if message.role == "user"]
    return PromptForm(
        text=text,
        tokens=len(_WORD.findall(text)),
        roles=tuple(message.role for message in conversation),
        user_text=(users or bodies)[-1],
        tools=digest_of(json.dumps(list(tools), sort_keys=True, default=repr)) if tools else None,
        control=tuple(sorted({mark for body in bodies for mark in _CONTROL.findall(body)})),
    )


def _tokens_of(text: str, entries: Any, *, is_part: bool = False) -> tuple[list[Placed], str | None]:
    """The reported tokens as far as they spell the answer, and why they do not spell it to its end, if so.

    With each comes the place in the text's bytes where it ends. Those behind the answer are left out: the end token,
    what a stop string cut off, and where the text `is_part` of an answer a token that ends beyond it.
    """
    if is_blank(text):
        return [], "the answer is empty"
    if not isinstance(entries, Sequence) or not entries:
        return [], "the server reports no log-probabilities"
    reason, found, written = None, list[tuple[int, int, Any]](), b""
    for entry in cast("Sequence[Any]", entries):
        if (own := bytes_of(entry)) is None:
            reason = "a reported token cannot be read"
            break
        found.append((len(written), len(written) + len(own), entry))
        written += own
    answer, begin = text.strip().encode("utf-8", "replace"), len(written) - len(written.lstrip())
    pairs = enumerate(zip(written[begin:], answer, strict=False))
    spelled = next((at for at, (own, due) in pairs if own != due), min(len(written) - begin, len(answer)))
    end, shift = begin + spelled, _bytes_until(text, len(text) - len(text.lstrip())) - begin
    if spelled == len(answer) and is_part:
        reason, most = None, _bytes_until(text, len(text)) - shift
        tokens = [(after, entry) for _, after, entry in found if after <= most]
    elif spelled == len(answer):
        reason, tokens = None, [(min(after, end), entry) for place, after, entry in found if place < end]
    else:
        reason, tokens = reason or _OTHER_TEXT, [(after, entry) for _, after, entry in found if after <= end]
    if (doubted := doubted_from(text)) is not None:
        reason, end = _THOUGHT, _bytes_until(text, doubted) - shift
        tokens = [(after, entry) for after, entry in tokens if after <= end]
    return [(after + shift, entry) for after, entry in tokens], reason


def _bytes_until(text: str, place: int) -> int:
    return len(text[:place].encode("utf-8", "replace"))


def _count_until(tokens: Sequence[Placed], place: int) -> int:
    """How many tokens end at a place or before it."""
    return bisect_right(tokens, place, key=itemgetter(0))


def bytes_of(entry: Any) -> bytes | None:
    """The bytes of a reported token; None where it cannot be read."""
    given: Any = cast("Mapping[str, Any]", entry) if isinstance(entry, Mapping) else {}
    token, held = given.get("token"), given.get("bytes")
    try:
        if isinstance(held, list):
            return bytes(cast("list[int]", held))
        return token.encode("utf-8", "replace")
    except (AttributeError, TypeError, ValueError):
        return None


def _log_prob(entry: Mapping[str, Any]) -> float:
    value = entry.get("logprob")
    if isinstance(value, bool) or not isinstance(value, int | float) or not _NOT_KNOWN < value <= _ROUNDING:
        raise _NoScore("a token of the answer has no finite log-probability")
    return min(float(value), 0.0)


def _entropy(entry: Mapping[str, Any], top: int) -> float:
    """The entropy of the `top` likeliest tokens, and of all others as one outcome, in nats."""
    given: Any = entry.get("top_logprobs")
    listed = cast("Sequence[Any]", given) if isinstance(given, Sequence) else ()
    others = [cast("Mapping[str, Any]", other) for other in listed if isinstance(other, Mapping)]
    values: list[Any] = [other.get("logprob") for other in others]
    if len(values) < top or any(not isinstance(value, int | float) or not value <= _ROUNDING for value in values):
        raise _NoScore(f"a token of the answer has no {top} alternatives with log-probabilities")
    likeliest = sorted((math.exp(min(float(value), 0.0)) for value in values), reverse=True)[:top]
    rest = 1 - math.fsum(likeliest)
    if rest < -10 * _ROUNDING:
        raise _NoScore("the reported probabilities of alternatives add up to more than 1")
    return -math.fsum(p * math.log(p) for p in (*likeliest, rest) if p > 0)
