"""A server's requests to one model: prompts first, then scored drafts in the clients' form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Self

from pydantic import Field, InstanceOf

from semgrad_guard.adapters.calls import AnswerForm, new_id, openai_logprobs, token_texts
from semgrad_guard.engine.answers.answer import Generation
from semgrad_guard.engine.answers.options import GenerationOptions
from semgrad_guard.engine.answers.request import Request, Ticket
from semgrad_guard.engine.answers.sentences import EndedSentences, Segment
from semgrad_guard.engine.answers.text import Piece
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.engine.sentences import By
from semgrad_guard.errors import InputError, PromptTooLongError
from semgrad_guard.estimators.gradients import ReplayEstimator
from semgrad_guard.guard import Answerer, Draft, Terms, without_calls
from semgrad_guard.records import Message, Verdict
from semgrad_guard.server.answers import Answer, Cuts, pieces_of


@dataclass(frozen=True, kw_only=True)
class AnswerRequest:
    """A client's request to a model: `count` answers to one conversation, in one form.

    With `logprobs` the answers have the tokens' log-probabilities, with `top_logprobs` those of so many alternatives to
    each token. `cuts` are made after the decision. `prompt_limit` is how many tokens the prompt may have.
    `on_piece` is called, in the model's thread, with each piece of text or thought as it is written; where answers are
    judged by sentence, and `terms` withhold, with the sentences that these let through. Both stay in this process.
    """

    conversation: tuple[Message, ...]
    options: GenerationOptions
    form: AnswerForm = field(default_factory=AnswerForm)
    count: int = 1
    logprobs: bool = False
    top_logprobs: int = 0
    cuts: Cuts = field(default_factory=Cuts)
    prompt_limit: int | None = None
    on_piece: Annotated[Callable[[Piece], None] | None, Field(exclude=True)] = None
    terms: Annotated[InstanceOf[Terms] | None, Field(exclude=True)] = None


@dataclass(frozen=True, kw_only=True)
class ForeignText:
    """A text that the model did not write, as the answer to a conversation. With a `reason` it cannot be scored.

    `cut` is true where the text was cut off. `reasoning` is that of its author, "" where it is not known. `entries` are
    the log-probabilities that its server reports, `options` those of the call; `is_part`: it was ended behind a
    sentence.
    """

    text: str
    conversation: tuple[Message, ...] = ()
    form: AnswerForm = field(default_factory=AnswerForm)
    cut: bool = False
    reasoning: str | None = None
    reason: str | None = None
    entries: list[dict[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    is_part: bool = False


@dataclass(frozen=True)
class Assignment:
    """A request that can be written: its prompt, and how each of its answers is written and scored."""

    request: AnswerRequest
    conversation: tuple[Message, ...]
    prompt: Prompt
    answerer: Answerer
    options: tuple[GenerationOptions, ...]

    @classmethod
    def of(cls, request: AnswerRequest, answerer: Answerer) -> Self:
        """A request, read.

        Raises:
            SemGradGuardError: it cannot be answered.
        """
        form, model = request.form, answerer.model
        conversation = form.instructed(request.conversation)
        prompt, limit = model.render(conversation, **form.template_options), request.prompt_limit
        if limit is not None and (length := len(prompt.ids)) > limit:
            raise PromptTooLongError(f"the prompt has {length} tokens, and this server takes {limit}; shorten it")
        options = replace(request.options, grammar=form.grammar(model))
        rows = model.fitted(options, prompt).rows(request.count)
        return cls(request, conversation, prompt, replace(answerer, options=options), rows)

    def submit(self) -> Ticket[list[Draft[Answer]]]:
        """Have the request answered; the ticket is of its scored drafts."""
        answerer, request, early = self.answerer, self.request, None
        on_piece = None if request.count > 1 else request.on_piece
        if self.has_parts:
            early = answerer.early(request.terms, on_piece, request.form.template_options)
        if on_piece is not None and request.form.tools:
            on_piece = without_calls(answerer.model, on_piece)  # text that may turn out to be one is held back
        return answerer.model.submit(
            Request(
                prompt=self.prompt,
                options=self.options,
                objective=answerer.estimator.objective,
                on_piece=on_piece,
                on_sentences=early,
                draws=answerer.draws,
                finish=lambda written: self.drafts(written, known=None if early is None else early.known),
            )
        )

    @property
    def has_parts(self) -> bool:
        """Whether sentences may leave before the answer ends: not where it is one of several, or is cut afterwards."""
        request = self.request
        if request.count > 1 or request.cuts.may_end(request.options.max_tokens):
            return False
        return self.answerer.has_parts(request.form.template_options)

    def opened(self, ended: EndedSentences, known: Verdict | None) -> Draft[None]:
        """As `Answerer.opened`."""
        return self.answerer.opened(ended, known, template_options=self.request.form.template_options)

    def drafts(self, generations: Sequence[Generation], *, known: Verdict | None = None) -> list[Draft[Answer]]:
        """The texts that were written for it, scored; `known` as in `Answerer.draft`."""
        return [self._draft(generation, known) for generation in generations]

    def _draft(self, generation: Generation, known: Verdict | None) -> Draft[Answer]:
        request, form = self.request, self.request.form
        model, estimator = self.answerer.model, self.answerer.estimator
        draft = self.answerer.draft(
            generation, template_options=form.template_options, known=known, structure=form.structure
        )
        verdict = draft.verdict
        if broken := form.taken_apart(model, generation).broken:
            # OpenAI's form has no place for a call that cannot be read: it is delivered as text.
            verdict = verdict.revised(text="\n".join((verdict.text, *broken)).lstrip("\n"))
        logprobs: list[dict[str, Any]] | None = None
        if request.logprobs:
            found = openai_logprobs(model, estimator, generation.evidence, top=request.top_logprobs)
            logprobs = [] if found is None else found["content"]
        answer = Answer(
            text=verdict.text,
            # Clients join a tool's answer to its call by its id, and templates may write none.
            tool_calls=tuple(call if call.id else replace(call, id=new_id()) for call in verdict.tool_calls),
            finish_reason="tool_calls" if verdict.tool_calls else generation.finish_reason,
            logprobs=logprobs,
            completion_tokens=generation.completion_tokens,
            pieces=token_pieces(model, verdict.text, generation.response_ids) if request.cuts else None,
        )
        return Draft(verdict, answer, draft.prompt)


def judged(text: ForeignText, answerer: Answerer) -> Draft[None]:
    """A text from elsewhere with its score, or without one; the record has the same form."""
    options = text.form.template_options
    if text.reason is not None:
        return Draft(answerer.unscored(text.text, text.reason, options), None)
    return answerer.scored(
        text.conversation, text.text, template_options=options, cut=text.cut, reasoning=text.reasoning
    )


def segments(text: ForeignText, by: By, answerer: Answerer) -> list[tuple[Segment, float | None]]:
    """A text's sentences, each with an uncertainty of its own; None where none of its tokens has one.

    Raises:
        InputError: the estimator compares whole answers.
    """
    estimator = answerer.estimator
    if not isinstance(estimator, ReplayEstimator):
        raise InputError(f"{estimator.name} compares whole answers; leave 'by' out, or serve with hybridgrad").about(
            "by"
        )
    found = answerer.model.score(text.conversation, text.text, by=by, objective=estimator.objective)
    return [(one, None if one.scores is None else estimator.value(one.scores)) for one in found]


def token_pieces(model: LanguageModel, text: str, ids: Sequence[int] = ()) -> tuple[str, ...]:
    """The text that each token adds: of these tokens, where they spell the text, else of the text's own."""
    texts = token_texts(model, ids, special=False)
    if (spelled := "".join(texts)) == text:
        return tuple(texts)
    if (begin := spelled.find(text)) >= 0:  # behind white space that the answer does not begin with
        return pieces_of(texts, [(begin, begin + len(text))])
    tokenizer: Any = model.tokenizer
    return tuple(token_texts(model, tokenizer(text, add_special_tokens=False)["input_ids"]))
