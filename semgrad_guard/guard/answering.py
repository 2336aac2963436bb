"""`Answerer`: a model and an estimator. Answers with their scores, and everything that these are bound to.

Nothing is decided about them here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any

from semgrad_guard.calibration import Binding
from semgrad_guard.calibration.binding import Unit
from semgrad_guard.engine.answers.answer import Evidence, Generation
from semgrad_guard.engine.answers.options import GenerationOptions, Sampling
from semgrad_guard.engine.answers.running import Request
from semgrad_guard.engine.answers.sentence_evidence import EndedSentences, parts_of, sentences_of
from semgrad_guard.engine.answers.writing import Piece
from semgrad_guard.engine.interruption import Pieces, Ticket, current_stop, outcomes, waited
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.engine.prompts.forms import ToolAnswer, shown_text
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.engine.scores.tape import OUT_OF_MEMORY, give_back_memory, is_out_of_memory
from semgrad_guard.engine.text_units import Span
from semgrad_guard.errors import InputError, UnsupportedToolsError
from semgrad_guard.estimators import Estimator
from semgrad_guard.estimators.samples import AskingEstimator
from semgrad_guard.guard.decision import unscored
from semgrad_guard.guard.flow import Draft, EarlySentences
from semgrad_guard.guard.parts import OTHER_TOKENS, WITH_CALLS, Structure, calls_in_text, scored_parts, scored_sentences
from semgrad_guard.guard.policy import Terms
from semgrad_guard.guard.question import RecordedScore, current_recorder
from semgrad_guard.guard.steps import R, StreamSteps, Work, ain_time, awaited_all
from semgrad_guard.records import Conversation, Score, SentenceVerdict, Status, ToolCall, Verdict, digest_of
from semgrad_guard.settings import OnDoubt

TemplateOptions = Mapping[str, Any]
Listener = Callable[[Piece], None] | None


@dataclass(frozen=True)
class Answerer:
    """Runs one model with one set of options, and scores its answers.

    `prompt_template` is a name for the form of the prompts; a calibration for another form is refused. `served` answers
    come from another server, whose decoding is unknown: a calibration for the model's own is refused as well.
    """

    model: LanguageModel
    estimator: Estimator
    options: GenerationOptions = field(default_factory=GenerationOptions)
    prompt_template: str = "chat"
    served: bool = False
    by_sentence: OnDoubt | None = None
    """What happens at a doubtful sentence, which scores are bound to; None: the whole answer has one score."""

    def __post_init__(self) -> None:
        kinds: list[tuple[str, Any, type[Any]]] = [
            ("a guard needs a LanguageModel (LanguageModel.from_pretrained)", self.model, LanguageModel),
            ("options are GenerationOptions(...)", self.options, GenerationOptions),
            ("prompt_template is a name", self.prompt_template, str),
        ]
        for words, value, kind in kinds:
            if not isinstance(value, kind):
                raise InputError(f"{words}, not {_shown(value)}")
        if not callable(self.estimator) or not hasattr(self.estimator, "objective"):
            raise InputError(f"an estimator is one such as HybridGrad(), not {_shown(self.estimator)}")
        if self.by_sentence is not None:
            require_by_sentence(self.estimator)

    def binding(self, template_options: TemplateOptions | None = None) -> Binding:
        """The binding for a calibration of these answers (pass it to `calibrate`, with a grader)."""
        facts = self._facts(template_options)
        return Binding(**facts, max_tokens=self.options.max_tokens, stop=self.options.stop, on_cut="unscored")

    def _facts(self, template_options: TemplateOptions | None) -> dict[str, Any]:
        """What scores are bound to, as fields of a binding or a verdict."""
        with self.model.turn:
            identity = self.model.identity
            return {
                "model": identity.name,
                "revision": identity.revision,
                "fingerprint": identity.fingerprint,
                "estimator": self.estimator.name,
                "settings": self._settings_of(self.estimator),
                "prompt_template": template_name(self.model, self.prompt_template, template_options),
            }

    def drafting(
        self, conversations: Sequence[Conversation], *, template_options: TemplateOptions | None = None
    ) -> Work:
        """The work of answering and scoring several conversations, whose result is their drafts (`Draft[Generation]`).

        They share the model's steps with each other and with other callers; on the event loop none waits in a thread.
        It raises the first error that a conversation causes, and the others are then cancelled.
        """

        def submitted() -> list[Ticket[Draft[Generation]]]:
            requests = [self.request(conversation, template_options=template_options) for conversation in conversations]
            return self.model.submit_all(requests)  # or none, where one cannot be answered

        return Work(lambda: outcomes(submitted()), lambda: awaited_all(submitted))

    def draft(
        self,
        generation: Generation,
        *,
        template_options: TemplateOptions | None = None,
        known: Verdict | None = None,
        structure: Structure | None = None,
    ) -> Draft[Generation]:
        """One answer with its score; an answer to a prompt with tools is taken apart into text and calls.

        `known` is the undecided verdict on its beginning, whose sentences were scored while it was written. By the
        `structure` that it owes its fields have scores, too.
        """
        tools = (template_options or {}).get("tools")
        answer = self.model.tool_answer(generation, tools) if tools else ToolAnswer(generation.text)
        given: Any = {"template_options": template_options, "tool_calls": answer.calls, "known": known}
        verdict = self.assessed(generation.evidence, answer.text, structure=structure, **given)
        return Draft(verdict, generation, generation.prompt.form)

    def request(
        self,
        conversation: Conversation,
        *,
        template_options: TemplateOptions | None = None,
        on_piece: Listener = None,
        terms: Terms | None = None,
        structure: Structure | None = None,
    ) -> Request[Draft[Generation]]:
        """The request for an answer and its score, for `model.submit`: concurrent ones share the model's steps.

        Raises:
            SemGradGuardError: it cannot be answered.
        """
        given: Any = {"template_options": template_options}
        prompt = self.model.render(conversation, **(template_options or {}))

        def drafted(found: Sequence[Generation], known: Verdict | None) -> Draft[Generation]:
            return self.draft(found[0], known=known, structure=structure, **given)

        return self.request_of(prompt, (self.options,), drafted, on_piece=on_piece, terms=terms, **given)

    def request_of(
        self,
        prompt: Prompt,
        options: tuple[GenerationOptions, ...],
        finish: Callable[[Sequence[Generation], Verdict | None], R],
        *,
        template_options: TemplateOptions | None = None,
        on_piece: Listener = None,
        terms: Terms | None = None,
    ) -> Request[R]:
        """The request for answers to a prompt, one with each of these options; `finish` scores them.

        `on_piece` is called with the pieces of the answer, in the model's thread, and must not wait. Where answers are
        judged by sentence, and `terms` withhold, these are sentences that are let through; `finish` gets their verdict.
        """
        early: EarlySentences | None = None
        if terms is not None and on_piece is not None and terms.delivers_early and self.has_parts(template_options):
            early = EarlySentences(terms, on_piece)
        opened = partial(self.opened, template_options=template_options)
        return Request(
            prompt=prompt,
            options=options,
            objective=self.estimator.objective,
            on_piece=_without_calls(self.model, on_piece) if on_piece and _has_tools(template_options) else on_piece,
            on_sentences=early and (lambda ended: early.add(opened(ended, early.known))),
            draws=self.draws,
            finish=lambda found: finish(found, early and early.known),
        )

    def has_parts(self, template_options: TemplateOptions | None = None) -> bool:
        """Whether sentences can be judged before their answer ends: not where it may call tools, or has a grammar."""
        unread = self.options.grammar is not None or _has_tools(template_options)
        return self.by_sentence is not None and current_recorder() is None and not unread

    def opened(
        self, ended: EndedSentences, known: Verdict | None, *, template_options: TemplateOptions | None = None
    ) -> Draft[None]:
        """The part of an answer that has ended, while the answer is being written; `known` is that before."""
        text = ended.answer.text[: ended.spans[-1][1]]
        verdict = self.assessed(ended.answer, text, template_options=template_options, known=known, ended=ended)
        return Draft(verdict, None, ended.answer.prompt.form)

    @property
    def draws(self) -> tuple[Sampling, ...]:
        """The samples that the scores need."""
        recorder = current_recorder()
        estimators = (self.estimator, *(() if recorder is None else recorder.estimators))
        plans = dict.fromkeys(getattr(estimator, "plan", None) for estimator in estimators)
        return tuple(plan for plan in plans if isinstance(plan, Sampling))

    def live(
        self, conversation: Conversation, *, terms: Terms | None = None, template_options: TemplateOptions | None = None
    ) -> StreamSteps[Piece, Draft[Generation]]:
        """The steps of an answer, whose value is the scored draft. It is read and begun with the first of them.

        By sentence, those sentences are pieces that `terms` let through.
        """
        given: Any = {"terms": terms, "template_options": template_options}
        return answer_steps(lambda on_piece: self.model.submit(self.request(conversation, on_piece=on_piece, **given)))

    def scored(
        self,
        conversation: Conversation,
        text: str,
        *,
        template_options: TemplateOptions | None = None,
        cut: bool = False,
        reasoning: str | None = None,
    ) -> Draft[None]:
        """A text from elsewhere as this model's answer to a conversation; or unscored, with the reason.

        `cut`: a limit stopped its author; `reasoning`: its author's, "" where that is not known. Reasoning in the text
        goes from `verdict.text` into `verdict.details.reasoning`.
        """
        try:
            if _has_tools(template_options):
                _ = self.model.tool_format  # a template without tools would leave them out in silence
            evidence = self.model.evidence(
                conversation, text, template_options=template_options, cut=cut, reasoning=reasoning
            )
        except (InputError, UnsupportedToolsError) as error:
            return Draft(self.unscored(text, str(error), template_options), None)
        verdict = self.assessed(evidence, evidence.text, template_options=template_options)
        return Draft(verdict, None, evidence.prompt.form)

    def assessed(
        self,
        evidence: Evidence,
        text: str,
        *,
        template_options: TemplateOptions | None = None,
        tool_calls: Sequence[ToolCall] = (),
        known: Verdict | None = None,
        ended: EndedSentences | None = None,
        structure: Structure | None = None,
    ) -> Verdict:
        """The score of an answer and everything that it is bound to: an undecided verdict, for `decide` to judge.

        `template_options` (tools, for example) are those the answer was made with. By sentence every sentence has a
        score of its own, and the answer that of its most doubtful one; `known` is the verdict on a beginning that was
        scored while the answer was written, `ended` are the sentences that have ended in one that still is.
        """
        recorder = current_recorder()
        with self.model.turn:  # the score and the identity with it are of one state of the model
            # A score with gradients frees the states that the others and the thought are read off.
            thought = {} if ended else _thought(evidence)
            parts = self._parts(evidence, tool_calls, structure)
            others = {
                other.name: RecordedScore.of(self._score_of(other, evidence, tool_calls)[1], self._settings_of(other))
                for other in (() if recorder is None else recorder.estimators)
            }
            sentences, score = self._score_of(self.estimator, evidence, tool_calls, known=known, ended=ended)
            facts = self._facts(template_options)
        unscored: Status = "failed" if evidence.response_ids else "unscored"
        token = evidence.prompt.semantic_token
        verdict = Verdict.of(
            status=unscored if score.uncertainty is None else "scored",
            action="answer",
            text=text,
            tool_calls=tuple(tool_calls),
            uncertainty=score.uncertainty,
            prompt=digest_of(evidence.prompt.text),
            prompt_tokens=len(evidence.prompt.ids),
            semantic_token=token.offset,
            semantic_token_source=token.source,
            cut=evidence.cut,
            reason=score.reason,
            sentences=sentences,
            **facts,
            **parts,
            **thought,
            **(score.details or {}),
        )
        if recorder is not None:
            recorder.note(verdict, others)
        return verdict

    def _parts(self, evidence: Evidence, calls: Sequence[ToolCall], structure: Structure | None) -> dict[str, Any]:
        """The answer's calls and values; none of an estimator that compares whole answers."""
        if not evidence.response_ids or isinstance(self.estimator, AskingEstimator):
            return {}
        text = self.model.decode(evidence.response_ids, special=True)
        calls = calls or calls_in_text(text)
        if not (calls or structure):
            return {}

        def scored(spans: Sequence[Span]) -> list[float | None]:
            found = parts_of(evidence, spans)
            return [None if own is None else _score(self.estimator, own).uncertainty for own in found]

        return scored_parts(text, calls, structure, scored)

    def _score_of(
        self,
        estimator: Estimator,
        evidence: Evidence,
        tool_calls: Sequence[ToolCall],
        *,
        known: Verdict | None = None,
        ended: EndedSentences | None = None,
    ) -> tuple[tuple[SentenceVerdict, ...], Score]:
        """The sentences of an answer, none where the whole is judged, and its score."""
        if self.by_sentence is None:
            return (), _score(estimator, evidence)
        if ended:
            return scored_sentences(partial(_score, estimator), ended.answer, ended.spans, ended.found, known)
        if tool_calls:
            return (), Score(None, WITH_CALLS)
        begun, reason = () if known is None else known.sentences, evidence.why_empty
        if not evidence.response_ids:  # or a mark of reasoning follows on sentences that have left
            rest = [SentenceVerdict(start=one.end, end=len(evidence.text), reason=reason) for one in begun[-1:]]
            return (*begun, *rest), Score(None, reason)
        if (parts := sentences_of(evidence, known=len(begun))) is None:
            return (), Score(None, OTHER_TOKENS)
        spans, found = [span for span, _ in parts], [own for _, own in parts[len(begun) :]]
        return scored_sentences(partial(_score, estimator), evidence, spans, found, known)

    def _settings_of(self, estimator: Estimator) -> dict[str, Any]:
        """Everything but the weights that moves scores: the estimator's settings, dtype, an own t*, the decoding."""
        options, settings = self.options, {**estimator.settings(), "dtype": self.model.identity.dtype}
        settings |= self.model.departures
        if options.temperature:
            settings |= {"temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k}
        if options.grammar is not None:
            settings["grammar"] = sha256(options.grammar.encode()).hexdigest()[:12]
        if options.max_thinking_tokens is not None:
            settings["max_thinking_tokens"] = options.max_thinking_tokens
        if self.served:
            settings["served"] = True
        if self.by_sentence is not None:
            settings = Unit.sentences(self.by_sentence).among(settings)
            if estimator.objective.gradients:
                settings["earlier"] = "context"  # the only form; it is in files
        return settings

    def unscored(self, text: str, reason: str, template_options: TemplateOptions | None = None) -> Verdict:
        """The verdict on a text that cannot be scored, with the reason."""
        return unscored(text, reason=reason, **self._facts(template_options))


def require_by_sentence(estimator: Estimator) -> None:
    """Refuse an estimator that compares whole answers.

    Raises:
        InputError: it draws further answers, or asks the model about this one.
    """
    if isinstance(estimator, AskingEstimator):
        raise InputError(
            f'{estimator.name} compares whole answers; by="sentence" needs an estimator of one replay, or of the '
            "likelihoods, e.g. HybridGrad()"
        )


def template_name(model: LanguageModel, name: str, template_options: Mapping[str, Any] | None = None) -> str:
    """A prompt form's full name: the caller's name for it, and the fingerprint of the chat template and its options."""
    return f"{name}@{model.template_fingerprint(template_options) if template_options else model.identity.template}"


def _without_calls(model: LanguageModel, listener: Callable[[Piece], None]) -> Callable[[Piece], None]:
    """A listener that gets no text which is a call of a tool, or may turn out to be one."""
    text, shown = "", 0

    def on_piece(piece: Piece) -> None:
        nonlocal text, shown
        if not isinstance(piece, str):
            listener(piece)
            return
        text += piece
        if (end := shown_text(model.tool_format, text)) > shown:
            begin, shown = shown, end
            listener(text[begin:end])

    return on_piece


def _thought(evidence: Evidence) -> dict[str, Any]:
    """A verdict's fields about the thought before its answer."""
    if evidence.reasoning is None or not evidence.reasoning.text:
        return {}
    try:
        seen = evidence.thought()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        give_back_memory()
        seen = None
    begin, end = evidence.reasoning.span
    fields: dict[str, Any] = {"reasoning": evidence.reasoning.text, "reasoning_tokens": end - begin or None}
    if seen is not None and seen.entropies:
        fields |= {"reasoning_entropy": seen.mean_entropy, "reasoning_peak": max(seen.entropies)}
    return fields


def _score(estimator: Estimator, evidence: Evidence) -> Score:
    """The estimator's score; none, with the reason, where memory runs out even for this answer by itself."""
    for tried in (lambda: evidence, evidence.alone):
        try:
            return estimator(tried())
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        give_back_memory()
    return Score(None, OUT_OF_MEMORY)


def _has_tools(template_options: TemplateOptions | None) -> bool:
    return bool(template_options and template_options.get("tools"))


def _shown(value: object) -> str:
    """A value in a message: short, and with its type where that says more."""
    return repr(value) if value is None or isinstance(value, str | int | float) else f"a {type(value).__name__}"


def answer_steps(submit: Callable[[Callable[[Piece], None]], Ticket[R]]) -> StreamSteps[Piece, R]:
    """The steps of an answer that a model of ours writes; the value is the result of its request.

    `submit` has it written, and the given listener gets the pieces. The worker holds the pieces and not these steps,
    so that an answer without a reader ends.
    """
    pieces, begun = Pieces[Piece](), list[Ticket[R]]()

    def begin() -> Ticket[R]:
        begun.append(submit(pieces.put))
        begun[0].add_done_callback(lambda _: pieces.end())
        return begun[0]

    try:
        request: Ticket[R] = yield Work(begin)
        while (some := (yield _waiting(pieces.next()))) is not None:
            yield from some
        return (yield _waiting(request))
    finally:
        for ticket in begun:
            ticket.cancel()


def _waiting(future: Future[Any]) -> Work:
    return Work(lambda: waited(future, current_stop()), lambda: ain_time(asyncio.wrap_future(future)))
