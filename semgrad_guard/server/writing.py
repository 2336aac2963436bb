"""How one model answers requests: prompts before, scored drafts in the clients' form after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from semgrad_guard.adapters.answer_form import AnswerForm
from semgrad_guard.adapters.call_ids import new_id
from semgrad_guard.adapters.logprobs import openai_logprobs, token_texts
from semgrad_guard.engine.generation.generation import Generation
from semgrad_guard.engine.generation.options import GenerationOptions
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.errors import PromptTooLongError
from semgrad_guard.estimators import Estimator
from semgrad_guard.guard import Answerer, Draft
from semgrad_guard.records import Message, ToolCall
from semgrad_guard.server.answers import Answer


@dataclass(frozen=True, kw_only=True)
class AnswerRequest:
    """What a client asks of a model: `count` answers to one conversation, in one form.

    `logprobs` asks for the tokens' log-probabilities, `top_logprobs` for those of so many others beside each token.
    `prompt_limit` is how many tokens the prompt may have. `pieces` asks for what each token adds to the text. `heard`
    is called, in the model's thread, with each piece of text as it is written.
    """

    conversation: tuple[Message, ...]
    options: GenerationOptions
    form: AnswerForm = field(default_factory=AnswerForm)
    count: int = 1
    logprobs: bool = False
    top_logprobs: int = 0
    pieces: bool = False
    prompt_limit: int | None = None
    heard: Callable[[str], None] | None = None


@dataclass(frozen=True)
class Assignment:
    """A request that can be written: its prompt, and how each of its answers is written."""

    request: AnswerRequest
    conversation: tuple[Message, ...]
    prompt: Prompt
    answerer: Answerer
    options: tuple[GenerationOptions, ...]

    def hearing(self) -> Callable[[str], None] | None:
        """Who hears the pieces of the answer; text that may turn out to be a call is held back."""
        heard = self.request.heard
        if heard is None or self.request.count > 1:
            return None
        return _Hearing(heard, self.answerer.model).hear if self.request.form.tools else heard


class _Hearing:
    """Hands on what of a text is certainly no call."""

    def __init__(self, heard: Callable[[str], None], model: LanguageModel) -> None:
        self._heard, self._model = heard, model
        self._written, self._shown = "", 0

    def hear(self, piece: str) -> None:
        self._written += piece
        end = self._model.tool_format.shown(self._written)
        if end > self._shown:
            self._heard(self._written[self._shown : end])
            self._shown = end


class Writer:
    """Reads requests to one model, and makes scored drafts of what it writes. For the model's thread.

    `prompt_template` is the name for the form of the prompts; `served` says that the model scores what others wrote.
    """

    def __init__(
        self, model: LanguageModel, estimator: Estimator, *, prompt_template: str = "chat", served: bool = False
    ) -> None:
        self.model, self.estimator = model, estimator
        self._prompt_template, self._served = prompt_template, served

    def answerer(self, options: GenerationOptions | None = None) -> Answerer:
        """The model and its estimator, with these options."""
        return Answerer(
            self.model,
            self.estimator,
            options=options or GenerationOptions(),
            prompt_template=self._prompt_template,
            served=self._served,
        )

    def assigned(self, request: AnswerRequest) -> Assignment:
        """A request, read.

        Raises:
            SemGradGuardError: it cannot be answered.
        """
        form = request.form
        conversation = form.instructed(request.conversation)
        prompt, limit = self.model.render(conversation, **form.template_options), request.prompt_limit
        if limit is not None and (found := len(prompt.ids)) > limit:
            raise PromptTooLongError(f"the prompt has {found} tokens, and this server takes {limit}; shorten it")
        options = replace(request.options, grammar=form.grammar(self.model))
        fitted, seed = self.model.fitted(prompt, options), options.seed
        seeds = [None if seed is None else seed + number for number in range(request.count)]
        each = tuple(replace(fitted, seed=seed) for seed in seeds)
        return Assignment(request, conversation, prompt, self.answerer(options), each)

    def written(self, assignments: Sequence[Assignment]) -> list[list[Draft[Answer]]]:
        """The scored drafts of requests that are alike but for what they ask, written together in one run."""
        first = assignments[0]
        template_options = first.request.form.template_options
        heard = first.hearing()
        if heard is not None:
            drafts = [self._heard(first, heard)]
        else:
            every = [each.conversation for each in assignments for _ in range(each.request.count)]
            drafts = first.answerer.drafts(every, template_options=template_options)
        left = iter(drafts)
        return [[self._as_answer(next(left), each.request) for _ in each.options] for each in assignments]

    def written_singly(self, assignment: Assignment) -> list[Draft[Answer]]:
        """The scored drafts of a request, each answer written in a run of its own."""
        if len(assignment.options) == 1:
            return self.written([assignment])[0]
        answerer, found = assignment.answerer, list[Draft[Answer]]()
        for each in assignment.options:
            one = replace(answerer, options=replace(answerer.options, seed=each.seed))
            template_options = assignment.request.form.template_options
            [draft] = one.drafts([assignment.conversation], template_options=template_options)
            found.append(self._as_answer(draft, assignment.request))
        return found

    def drafts(self, assignment: Assignment, generations: Sequence[Generation]) -> list[Draft[Answer]]:
        """What was written for a request, scored."""
        options = assignment.request.form.template_options
        drafts = [assignment.answerer.draft(each, template_options=options) for each in generations]
        return [self._as_answer(draft, assignment.request) for draft in drafts]

    def _heard(self, assignment: Assignment, heard: Callable[[str], None]) -> Draft[Generation]:
        """The draft of an answer that is heard while it is written."""
        options = assignment.request.form.template_options
        live = assignment.answerer.live(assignment.conversation, template_options=options)
        try:
            for piece in live:
                heard(piece)
            return live.draft()
        finally:
            live.close()

    def _as_answer(self, draft: Draft[Generation], request: AnswerRequest) -> Draft[Answer]:
        generation, verdict = draft.answer, draft.verdict
        if broken := request.form.taken_apart(self.model, generation).broken:
            # OpenAI's form has no place for a call that nobody can read: it is delivered as the text that it is.
            verdict = verdict.model_copy(update={"text": "\n".join((verdict.text, *broken)).lstrip("\n")})
        logprobs = self._logprobs(generation, request) if request.logprobs else None
        answer = Answer(
            text=verdict.text,
            tool_calls=tuple(_identified(call) for call in verdict.tool_calls),
            finish_reason="tool_calls" if verdict.tool_calls else generation.finish_reason,
            logprobs=logprobs,
            prompt_tokens=len(generation.prompt.ids),
            completion_tokens=generation.completion_tokens,
            pieces=self.pieces(verdict.text, generation.response_ids) if request.pieces else None,
        )
        return Draft(verdict, answer, draft.prompt)

    def pieces(self, text: str, ids: Sequence[int] = ()) -> tuple[str, ...]:
        """What each token adds to a text: these tokens, where they spell it, else the text's own."""
        found = token_texts(self.model, ids, special=False)
        if "".join(found) == text:
            return tuple(found)
        tokenizer: Any = self.model.tokenizer
        return tuple(token_texts(self.model, tokenizer(text, add_special_tokens=False)["input_ids"]))

    def _logprobs(self, generation: Generation, request: AnswerRequest) -> list[dict[str, Any]]:
        found = openai_logprobs(self.model, self.estimator, generation.evidence, top=request.top_logprobs)
        return [] if found is None else found["content"]


def _identified(call: ToolCall) -> ToolCall:
    """The call with an id: clients join a tool's answer to its call by it, and templates may write none."""
    return call if call.id else replace(call, id=new_id())
