"""`Answerer`: a model and an estimator. Answers with their scores, before anything is decided about them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any, TypeVar, overload

from semgrad_guard.calibration import Binding
from semgrad_guard.engine.generation.generation import Evidence, Generation
from semgrad_guard.engine.generation.options import GenerationOptions, Sampling
from semgrad_guard.engine.generation.visible import Piece
from semgrad_guard.engine.interruption import current_stop
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.engine.replay.batch import OUT_OF_MEMORY, give_back_memory, is_out_of_memory
from semgrad_guard.engine.worker import PieceStream, Request, Ticket
from semgrad_guard.engine.worker.request import waited
from semgrad_guard.errors import AnswerCancelledError, InputError, UnsupportedToolsError
from semgrad_guard.estimators import Estimator
from semgrad_guard.guard.flow import Draft
from semgrad_guard.guard.scored_sentences import WITH_CALLS, require_by_sentence, scored_sentences
from semgrad_guard.guard.timing import Work, ain_time, awaited, off_loop
from semgrad_guard.guard.verdicts import RecordedScore, current_recorder, unscored
from semgrad_guard.records import Conversation, Score, SentenceVerdict, Status, ToolCall, Verdict, digest_of
from semgrad_guard.settings import OnDoubt

T = TypeVar("T")
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
        given: Any = self.model
        if not isinstance(given, LanguageModel):
            raise InputError(f"a guard needs a LanguageModel (LanguageModel.from_pretrained), not {_shown(given)}")
        if not callable(self.estimator) or not hasattr(self.estimator, "objective"):
            raise InputError(f"an estimator is one such as HybridGrad(), not {_shown(self.estimator)}")
        if self.by_sentence is not None:
            require_by_sentence(self.estimator, self.by_sentence)
        options: Any = self.options
        if not isinstance(options, GenerationOptions):
            raise InputError(f"options are GenerationOptions(...), not {_shown(options)}")
        template: Any = self.prompt_template
        if not isinstance(template, str):
            raise InputError(f"prompt_template is a name, not {_shown(template)}")

    def binding(self, template_options: TemplateOptions | None = None) -> Binding:
        """The binding for a calibration of these answers (pass it to `calibrate`, with a grader)."""
        with self.model.turn:
            identity = self.model.identity
            settings = scoring_settings(
                self.model, self.estimator, self.options, served=self.served, by_sentence=self.by_sentence
            )
            template = template_name(self.model, self.prompt_template, template_options)
        return Binding(
            model=identity.name,
            revision=identity.revision,
            fingerprint=identity.fingerprint,
            estimator=self.estimator.name,
            settings=settings,
            prompt_template=template,
            max_tokens=self.options.max_tokens,
            stop=self.options.stop,
        )

    def drafts(
        self, conversations: Sequence[Conversation], *, template_options: TemplateOptions | None = None
    ) -> list[Draft[Generation]]:
        """Answer several conversations in one generation, and score them in one backward pass.

        A single one shares the model's steps with those of other callers.
        """
        if len(conversations) == 1:
            return [self.submit(conversations[0], template_options=template_options).outcome()]
        with self.model.turn:  # one look at the model, for the answers and for their scores
            generations = self.model.generate_batch(
                conversations, self.options, objective=self.estimator.objective, template_options=template_options
            )
            return [self.draft(generation, template_options=template_options) for generation in generations]

    async def adrafts(
        self, conversations: Sequence[Conversation], *, template_options: TemplateOptions | None = None
    ) -> list[Draft[Generation]]:
        """Like `drafts`, on the event loop: a conversation waits in no thread of its own."""
        if len(conversations) != 1:
            return await off_loop(lambda: self.drafts(conversations, template_options=template_options))
        return [await awaited(partial(self.submit, conversations[0], template_options=template_options))]

    def draft(self, generation: Generation, *, template_options: TemplateOptions | None = None) -> Draft[Generation]:
        """One answer with its score; an answer to a prompt with tools is taken apart into text and calls."""
        text, calls = generation.text, tuple[ToolCall, ...]()
        if _has_tools(template_options):
            answer = self.model.tool_answer(generation)
            text, calls = answer.text, answer.calls
        verdict = assess(
            self.model,
            self.estimator,
            generation.evidence,
            text=text,
            options=self.options,
            prompt_template=self.prompt_template,
            template_options=template_options,
            tool_calls=calls,
            by_sentence=self.by_sentence,
        )
        return Draft(verdict, generation, generation.prompt.form)

    @overload
    def submit(
        self, conversation: Conversation, *, template_options: TemplateOptions | None = ..., on_piece: Listener = ...
    ) -> Ticket[Draft[Generation]]: ...

    @overload
    def submit(
        self,
        conversation: Conversation,
        *,
        template_options: TemplateOptions | None = ...,
        on_piece: Listener = ...,
        then: Callable[[Draft[Generation]], T],
    ) -> Ticket[T]: ...

    def submit(self, conversation: Conversation, *, then: Any = None, **given: Any) -> Ticket[Any]:
        """Have a conversation answered and scored (`request`); waits for nothing. Concurrent callers share steps.

        `then` makes the result of the draft, in the model's thread.

        Raises:
            SemGradGuardError: it cannot be answered.
        """
        request = self.request(conversation, **given)
        return self.model.submit(request if then is None else request.then(then))

    def request(
        self,
        conversation: Conversation,
        *,
        template_options: TemplateOptions | None = None,
        on_piece: Listener = None,
    ) -> Request[Draft[Generation]]:
        """The request for an answer and its score.

        `on_piece` is called with the pieces of the answer, in the model's thread, and must not wait.
        """
        return Request(
            prompt=self.model.render(conversation, **(template_options or {})),
            options=(self.options,),
            objective=self.estimator.objective,
            on_piece=without_calls(self.model, on_piece) if on_piece and _has_tools(template_options) else on_piece,
            draws=self.draws,
            finish=lambda found: self.draft(found[0], template_options=template_options),
        )

    @property
    def draws(self) -> tuple[Sampling, ...]:
        """The samples that the scores need."""
        recorder = current_recorder()
        estimators = (self.estimator, *(() if recorder is None else recorder.estimators))
        plans = dict.fromkeys(getattr(estimator, "plan", None) for estimator in estimators)
        return tuple(plan for plan in plans if isinstance(plan, Sampling))

    def live(self, conversation: Conversation, *, template_options: TemplateOptions | None = None) -> LiveAnswer:
        """Answer piece by piece; the scored draft at the end. It is read and begun with the first piece."""
        return LiveAnswer(
            lambda on_piece: self.submit(conversation, template_options=template_options, on_piece=on_piece)
        )

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

        `cut`: a limit stopped its author; `reasoning`: its author's, "" where that is not known. Reasoning between the
        template's marks goes from `verdict.text` into `verdict.reasoning`.
        """
        try:
            if _has_tools(template_options):
                _ = self.model.tool_format  # a template without tools would leave them out in silence
            evidence = self.model.evidence(
                conversation, text, template_options=template_options, cut=cut, reasoning=reasoning
            )
        except (InputError, UnsupportedToolsError) as error:
            return Draft(self.unscored(text, str(error), template_options), None)
        verdict = assess(
            self.model,
            self.estimator,
            evidence,
            text=evidence.text,
            options=self.options,
            prompt_template=self.prompt_template,
            template_options=template_options,
            served=self.served,
            by_sentence=self.by_sentence,
        )
        return Draft(verdict, None, evidence.prompt.form)

    def unscored(self, text: str, reason: str, template_options: TemplateOptions | None = None) -> Verdict:
        """The verdict on a text that cannot be scored, with the reason."""
        bound = self.binding(template_options)
        return unscored(
            text,
            reason=reason,
            model=bound.model,
            estimator=bound.estimator,
            revision=bound.revision,
            fingerprint=bound.fingerprint,
            settings=bound.settings,
            prompt_template=bound.prompt_template,
        )


class LiveAnswer:
    """An answer that a model is writing: its pieces, then the result of its request, the scored draft (`Live`).

    `submit` has it written, and the given listener gets the pieces.
    """

    def __init__(self, submit: Callable[[Callable[[Piece], None]], Ticket[Any]]) -> None:
        self._submit = submit
        self._stream: PieceStream[Any] | None = None
        self._is_closed = False

    def next(self) -> Work:
        """The next pieces; None behind the last."""
        return Work(lambda: waited(self._begun().next(), current_stop()), self._anext)

    def draft(self) -> Work:
        """The whole answer with its score."""
        return Work(lambda: self._begun().ticket.outcome(), self._adraft)

    def close(self) -> Work:
        """Stop the model; harmless at any time."""
        return Work.at_once(self.stop)

    def stop(self) -> None:
        """As `close`, from any thread."""
        self._is_closed = True
        if self._stream is not None:
            self._stream.close()

    def _begun(self) -> PieceStream[Any]:
        if self._is_closed:
            raise AnswerCancelledError("the stream was closed before its answer was complete")
        if self._stream is None:
            self._stream = PieceStream(self._submit)
        return self._stream

    async def _anext(self) -> Sequence[Piece] | None:
        stream = self._stream or await off_loop(self._begun)
        return await ain_time(asyncio.wrap_future(stream.next()))

    async def _adraft(self) -> Any:
        stream = self._stream or await off_loop(self._begun)
        return await ain_time(asyncio.wrap_future(stream.ticket))


def without_calls(model: LanguageModel, listener: Callable[[Piece], None]) -> Callable[[Piece], None]:
    """A listener that gets no text which is a call of a tool, or may turn out to be one."""
    text, shown = "", 0

    def on_piece(piece: Piece) -> None:
        nonlocal text, shown
        if not isinstance(piece, str):
            listener(piece)
            return
        text += piece
        if (end := model.tool_format.shown(text)) > shown:
            begin, shown = shown, end
            listener(text[begin:end])

    return on_piece


def _has_tools(template_options: TemplateOptions | None) -> bool:
    return bool(template_options and template_options.get("tools"))


def assess(
    model: LanguageModel,
    estimator: Estimator,
    evidence: Evidence,
    *,
    text: str,
    options: GenerationOptions | None = None,
    prompt_template: str = "chat",
    template_options: Mapping[str, Any] | None = None,
    tool_calls: Sequence[ToolCall] = (),
    served: bool = False,
    by_sentence: OnDoubt | None = None,
) -> Verdict:
    """Score an answer: an undecided verdict, for `decide` to judge.

    `options` and `template_options` (tools, for example) are those the answer was made with: calibrations are bound to
    them. `served`: another server's model wrote it. `by_sentence`: every sentence has a score of its own, and the
    answer that of its most doubtful one.
    """
    recorder, options = current_recorder(), options or GenerationOptions()
    with model.turn:  # the score and the identity with it are of one state of the model
        # A score with gradients frees the states that the others and the thought are read off.
        thought = _thought(evidence)
        others = {
            other.name: (
                _by_sentence(model, other, evidence, tool_calls)[1] if by_sentence else _score(other, evidence),
                scoring_settings(model, other, options, served=served, by_sentence=by_sentence),
            )
            for other in (() if recorder is None else recorder.estimators)
        }
        sentences, score = (), None
        if by_sentence:
            sentences, score = _by_sentence(model, estimator, evidence, tool_calls)
        score, identity = score or _score(estimator, evidence), model.identity
        settings = scoring_settings(model, estimator, options, served=served, by_sentence=by_sentence)
        template = template_name(model, prompt_template, template_options)
    token = evidence.prompt.semantic_token
    status: Status = "scored" if score.uncertainty is not None else "failed" if evidence.response_ids else "unscored"
    verdict = Verdict(
        status=status,
        action="answer",
        text=text,
        tool_calls=tuple(tool_calls),
        estimator=estimator.name,
        uncertainty=score.uncertainty,
        model=identity.name,
        revision=identity.revision,
        fingerprint=identity.fingerprint,
        settings=settings,
        prompt_template=template,
        prompt=digest_of(evidence.prompt.text),
        semantic_token=token.offset,
        semantic_token_source=token.source,
        cut=evidence.cut,
        reason=score.reason,
        sentences=sentences,
        **thought,
        **(score.details or {}),
    )
    if recorder is not None:
        recorder.note(
            verdict,
            {
                name: RecordedScore(
                    uncertainty=one.uncertainty,
                    settings=bound,
                    features=None if one.features is None else dict(one.features),
                )
                for name, (one, bound) in others.items()
            },
        )
    return verdict


def _by_sentence(
    model: LanguageModel, estimator: Estimator, evidence: Evidence, tool_calls: Sequence[ToolCall]
) -> tuple[tuple[SentenceVerdict, ...], Score]:
    if tool_calls:
        return (), Score(None, WITH_CALLS)
    return scored_sentences(model, partial(_score, estimator), evidence)


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


def scoring_settings(
    model: LanguageModel,
    estimator: Estimator,
    options: GenerationOptions,
    *,
    served: bool = False,
    by_sentence: OnDoubt | None = None,
) -> dict[str, Any]:
    """Everything but the weights that moves scores: the estimator's settings, the dtype, an own t* and the decoding."""
    decoding = {"temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k}
    sampled = {} if options.temperature == 0 else decoding
    grammar = {} if options.grammar is None else {"grammar": sha256(options.grammar.encode()).hexdigest()[:12]}
    elsewhere = {"served": True} if served else {}
    unit = {} if by_sentence is None else {"by": "sentence", "on_doubt": by_sentence}
    thoughts = {} if options.max_thinking_tokens is None else {"max_thinking_tokens": options.max_thinking_tokens}
    return {
        **estimator.settings(),
        "dtype": model.identity.dtype,
        **model.departures,
        **sampled,
        **grammar,
        **thoughts,
        **elsewhere,
        **unit,
    }


def template_name(model: LanguageModel, name: str, template_options: Mapping[str, Any] | None = None) -> str:
    """A prompt form's full name: the caller's name for it, and the fingerprint of the chat template and its options."""
    return f"{name}@{model.template_fingerprint(template_options) if template_options else model.identity.template}"


def _shown(value: object) -> str:
    """A value in a message: short, and with its type where that says more."""
    return repr(value) if value is None or isinstance(value, str | int | float) else f"a {type(value).__name__}"
