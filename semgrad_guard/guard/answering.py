"""`Answerer`: a model and an estimator. Answers with their scores, before anything is decided about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, overload

from semgrad_guard.calibration import Binding
from semgrad_guard.engine.generation.generation import Evidence, Generation
from semgrad_guard.engine.generation.options import GenerationOptions, Sampling
from semgrad_guard.engine.generation.sentence_scoring import EndedSentences
from semgrad_guard.engine.generation.visible import Piece
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.engine.worker import Request, Ticket
from semgrad_guard.engine.worker.request import outcomes
from semgrad_guard.errors import InputError, UnsupportedToolsError
from semgrad_guard.estimators import Estimator
from semgrad_guard.guard.assessing import assess, scoring_settings, template_name
from semgrad_guard.guard.calibrated_estimator import require_by_sentence
from semgrad_guard.guard.early_sentences import Certain, EarlySentences
from semgrad_guard.guard.flow import Draft
from semgrad_guard.guard.policy import Terms
from semgrad_guard.guard.streams import LiveAnswer
from semgrad_guard.guard.timing import awaited_all
from semgrad_guard.guard.verdicts import current_recorder, unscored
from semgrad_guard.records import Conversation, PromptForm, ToolCall, Verdict
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
            require_by_sentence(self.estimator)
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
        """Answer and score several conversations; they share the model's steps with each other and with other callers.

        Raises:
            Exception: the first that a conversation causes; the others are then cancelled.
        """
        return outcomes(self._submitted(conversations, template_options))

    async def adrafts(
        self, conversations: Sequence[Conversation], *, template_options: TemplateOptions | None = None
    ) -> list[Draft[Generation]]:
        """Like `drafts`, on the event loop: no conversation waits in a thread."""
        return await awaited_all(partial(self._submitted, conversations, template_options))

    def _submitted(
        self, conversations: Sequence[Conversation], template_options: TemplateOptions | None
    ) -> list[Ticket[Draft[Generation]]]:
        """All of them, or none where one cannot be answered."""
        requests = [self.request(conversation, template_options=template_options) for conversation in conversations]
        return self.model.submit_all(requests)

    def draft(
        self,
        generation: Generation,
        *,
        template_options: TemplateOptions | None = None,
        known: Verdict | None = None,
    ) -> Draft[Generation]:
        """One answer with its score; an answer to a prompt with tools is taken apart into text and calls.

        `known` is the undecided verdict on its beginning, whose sentences were scored while it was written.
        """
        text, calls = generation.text, tuple[ToolCall, ...]()
        if _has_tools(template_options):
            answer = self.model.tool_answer(generation)
            text, calls = answer.text, answer.calls
        verdict = self._assessed(generation.evidence, text, template_options, tool_calls=calls, known=known)
        return Draft(verdict, generation, generation.prompt.form)

    @overload
    def submit(
        self,
        conversation: Conversation,
        *,
        template_options: TemplateOptions | None = ...,
        on_piece: Listener = ...,
        terms: Terms | None = ...,
        form: PromptForm | None = ...,
    ) -> Ticket[Draft[Generation]]: ...

    @overload
    def submit(
        self,
        conversation: Conversation,
        *,
        template_options: TemplateOptions | None = ...,
        on_piece: Listener = ...,
        terms: Terms | None = ...,
        form: PromptForm | None = ...,
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
        terms: Terms | None = None,
        form: PromptForm | None = None,
    ) -> Request[Draft[Generation]]:
        """The request for an answer and its score.

        `on_piece` is called with the pieces of the answer, in the model's thread, and must not wait. Where answers are
        judged by sentence, and `terms` withhold, the pieces are the sentences that these let through (`early`).
        """
        early = self.early(terms, on_piece, template_options, form=form)
        return Request(
            prompt=self.model.render(conversation, **(template_options or {})),
            options=(self.options,),
            objective=self.estimator.objective,
            on_piece=without_calls(self.model, on_piece) if on_piece and _has_tools(template_options) else on_piece,
            on_sentences=early,
            draws=self.draws,
            finish=lambda found: self.draft(
                found[0], template_options=template_options, known=None if early is None else early.known
            ),
        )

    def early(
        self,
        terms: Terms | None,
        on_piece: Listener,
        template_options: TemplateOptions | None = None,
        *,
        form: PromptForm | None = None,
        certain: Certain | None = None,
    ) -> EarlySentences | None:
        """The listener to sentences that hands on those that leave while their answer is being written.

        None where only its end can tell: an answer without parts, and terms by which one doubt, or the place where it
        is cut off, withholds all of it. `form` is that of the prompt, where a front knows more about it than the model.
        `certain` is as for `EarlySentences`.
        """
        if terms is None or on_piece is None or not terms.delivers_early or not self.has_parts(template_options):
            return None
        opened = partial(self.opened, template_options=template_options, form=form)
        return EarlySentences(terms, on_piece, opened, certain)

    def has_parts(self, template_options: TemplateOptions | None = None) -> bool:
        """Whether sentences can be judged before their answer ends: not where it may call tools, or has a grammar."""
        unread = self.options.grammar is not None or _has_tools(template_options)
        return self.by_sentence is not None and current_recorder() is None and not unread

    def opened(
        self,
        ended: EndedSentences,
        known: Verdict | None,
        *,
        template_options: TemplateOptions | None = None,
        form: PromptForm | None = None,
    ) -> Draft[None]:
        """The part of an answer that has ended, while the answer is being written; `known` is that before."""
        text = ended.answer.text[: ended.spans[-1][1]]
        verdict = self._assessed(ended.answer, text, template_options, known=known, ended=ended)
        return Draft(verdict, None, form or ended.answer.prompt.form)

    @property
    def draws(self) -> tuple[Sampling, ...]:
        """The samples that the scores need."""
        recorder = current_recorder()
        estimators = (self.estimator, *(() if recorder is None else recorder.estimators))
        plans = dict.fromkeys(getattr(estimator, "plan", None) for estimator in estimators)
        return tuple(plan for plan in plans if isinstance(plan, Sampling))

    def live(
        self,
        conversation: Conversation,
        *,
        terms: Terms | None = None,
        template_options: TemplateOptions | None = None,
    ) -> LiveAnswer:
        """Answer piece by piece; the scored draft at the end. It is read and begun with the first piece.

        By sentence, those sentences are pieces that `terms` let through.
        """
        given: Any = {"terms": terms, "template_options": template_options}
        return LiveAnswer(lambda on_piece: self.submit(conversation, on_piece=on_piece, **given))

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
        verdict = self._assessed(evidence, evidence.text, template_options, served=self.served)
        return Draft(verdict, None, evidence.prompt.form)

    def _assessed(
        self, evidence: Evidence, text: str, template_options: TemplateOptions | None, **given: Any
    ) -> Verdict:
        """The undecided verdict on an answer, with all that is this answerer's (`assess`)."""
        return assess(
            self.model,
            self.estimator,
            evidence,
            text=text,
            options=self.options,
            prompt_template=self.prompt_template,
            template_options=template_options,
            by_sentence=self.by_sentence,
            **given,
        )

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


def _shown(value: object) -> str:
    """A value in a message: short, and with its type where that says more."""
    return repr(value) if value is None or isinstance(value, str | int | float) else f"a {type(value).__name__}"
