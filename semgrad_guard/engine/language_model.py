"""A local Hugging Face causal LM that answers: generates, streams, and scores its own texts and others'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, Self, TypeVar, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from semgrad_guard.engine.answers.answer import Answer, BatchScoring, Evidence, Generation
from semgrad_guard.engine.answers.batch import RunningBatch
from semgrad_guard.engine.answers.options import GenerationOptions, require_kind
from semgrad_guard.engine.answers.running import Request
from semgrad_guard.engine.answers.sentence_evidence import Segment, sentences_of
from semgrad_guard.engine.answers.worker import Worker, worker_of
from semgrad_guard.engine.answers.writing import Visible, answered
from semgrad_guard.engine.answers.writing_model import WritingModel, name_of
from semgrad_guard.engine.checkpoint import load
from semgrad_guard.engine.interruption import Ticket, outcomes
from semgrad_guard.engine.objective import Objective, TokenChoice
from semgrad_guard.engine.prompts.forms import Tool, ToolAnswer, calls_in
from semgrad_guard.engine.prompts.prompt import require_bounded, require_text
from semgrad_guard.engine.prompts.thoughts import Foreign
from semgrad_guard.engine.scores.gradients import GradientScores
from semgrad_guard.errors import EmptyResponseError, InputError, PromptTooLongError, ReasoningError
from semgrad_guard.named import POCKET
from semgrad_guard.records import Conversation

R = TypeVar("R")


class LanguageModel(WritingModel):
    """A causal LM whose answers can be scored. Thread-safe: concurrent callers share the model's steps."""

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        *,
        revision: str | None = None,
        dtype: torch.dtype | str | None = None,
        device_map: Any = None,
        quantization_config: Any = None,
        attn_implementation: str | None = None,
        local_files_only: bool | None = None,
        semantic_token: int | TokenChoice | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> Self:
        """Load a checkpoint: a name of ours, a folder, a GGUF file, or a hub id. No remote code.

        "pocket" is the embedded model, "smollm2" the one that `semgrad-guard fetch smollm2` brings.

        Weights are safetensors, or one GGUF file: "model.gguf", a folder that holds one, or "hub/repository:file.gguf".
        A GGUF file's weights are dequantized (to float32, where `dtype` says nothing else), so they take as much memory
        as the model did before it was quantized. Its tokenizer and its chat template are the file's.

        Args:
            name_or_path: the model to load.
            revision: a hub revision.
            dtype: default: the checkpoint's own, and float32 for the pocket model, which is meant for CPUs.
            device_map, attn_implementation, local_files_only: as in transformers.
            quantization_config: as in transformers, or the same as a dict: {"quant_method": ..., ...}.
            semantic_token: t*, counted from the prompt's end, where the chat template's own should be overridden; or
                a probe's recommendation, `TokenChoice.load("probe.json")`.
            template_options: given to the chat template with every prompt, e.g. {"enable_thinking": False}.

        Raises:
            ModelNotFoundError: nothing loadable at that name or path; the message names the missing part.
            UnsupportedModelError: no decoder-only causal LM, or one whose layers are spread over devices.
            InputError: no such dtype or quantization.
            MissingExtraError: a GGUF file, without the packages of the extra `gguf`.
            BindingMismatchError: t* was chosen for another chat template.
        """
        model, tokenizer = load(
            name_or_path,
            revision=revision,
            dtype=dtype if dtype is not None else torch.float32 if name_or_path == POCKET else "auto",
            device_map=device_map,
            quantization_config=quantization_config,
            attn_implementation=attn_implementation,
            local_files_only=local_files_only,
        )
        found_revision = revision or getattr(model.config, "_commit_hash", None)
        return cls(
            model,
            tokenizer,
            name=name_of(name_or_path),
            revision=found_revision,
            semantic_token=semantic_token,
            template_options=template_options,
        )

    @classmethod
    def from_transformers(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str | None = None,
        revision: str | None = None,
        semantic_token: int | TokenChoice | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> Self:
        """Wrap a model and tokenizer that are already loaded; both stay exactly as they are.

        Raises:
            InputError: no tokenizer.
            UnsupportedModelError: no decoder-only causal LM, or one whose layers are spread over devices.
        """
        if not callable(getattr(tokenizer, "decode", None)):
            found = type(cast("object", tokenizer)).__name__
            raise InputError(f"a {found} is no tokenizer; pass what AutoTokenizer.from_pretrained gives")
        known = name or str(getattr(model, "name_or_path", "") or type(model).__name__)
        return cls(
            model,
            tokenizer,
            name=known,
            revision=revision,
            semantic_token=semantic_token,
            template_options=template_options,
        )

    def generate(
        self,
        conversation: Conversation,
        options: GenerationOptions | None = None,
        *,
        objective: Objective | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> Generation:
        """Answer one conversation. `objective` is that of later scoring, so that its states are kept."""
        return self.generate_batch([conversation], options, objective=objective, template_options=template_options)[0]

    def generate_batch(
        self,
        conversations: Sequence[Conversation],
        options: GenerationOptions | None = None,
        *,
        objective: Objective | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[Generation]:
        """Answer several conversations, which are written together; those that end together are scored together.

        With `max_batch` so many are written at once. Other callers may share the steps.

        Raises:
            EmptyPromptError, PromptTooLongError, InputError: one of them cannot be answered; then none is.
        """
        if isinstance(conversations, (str, bytes, Mapping)) or not isinstance(cast("object", conversations), Sequence):
            raise InputError("conversations is a list of conversations; to answer one alone, use generate")
        named = _named(template_options)
        prompts = [self.render(conversation, **named) for conversation in conversations]
        wanted = require_kind("options", options or GenerationOptions(), GenerationOptions).rows(len(prompts))
        requests = [
            Request(prompt=prompt, options=(own,), objective=objective or Objective(), finish=itemgetter(0))
            for prompt, own in zip(prompts, wanted, strict=True)
        ]
        return outcomes(self.submit_all(requests))

    def submit(self, request: Request[R]) -> Ticket[R]:
        """Have a request answered by the model's one thread, together with those of other callers; waits for nothing.

        Concurrent callers share its steps: up to `max_batch` answers, 8 by default, are written at once.

        Raises:
            PromptTooLongError: the prompt leaves no room for an answer.
            InputError: no answer can be made to follow the grammar.
        """
        return self.submit_all([request])[0]

    def submit_all(self, requests: Sequence[Request[R]]) -> list[Ticket[R]]:
        """Like `submit`, for several requests: all of them, or none where one cannot be answered."""
        fitted: list[Request[R]] = []
        for request in requests:
            options = tuple(self.fitted(options, request.prompt) for options in request.options)
            for grammar in {one.grammar for one in options} - {None}:
                self.grammars.matcher(grammar)
            fitted.append(replace(request, options=options))
        return self.worker.submit(self, fitted)

    def running_batch(self, objective: Objective | None = None) -> RunningBatch:
        return RunningBatch(self, objective or Objective())

    @property
    def worker(self) -> Worker:
        """The owner of the model's thread; all `LanguageModel`s of the same weights share it."""
        return worker_of(self.scorer)

    def tool_answer(self, generation: Generation, tools: Sequence[Tool] = ()) -> ToolAnswer:
        """An answer to a prompt with tools, taken apart into text and calls.

        By the `tools` arguments that are written without types get those of their schemas.

        Raises:
            UnsupportedToolsError: the chat template knows no tools, or an unknown form of calls.
        """
        before = generation.preceding_ids if self.tool_format.reads_thoughts else ()
        raw = self.decode((*before, *generation.response_ids), special=True)
        found = calls_in(self.tool_format, raw, prompt=generation.prompt.text, tools=tools)
        return found if found.calls or found.broken else ToolAnswer(generation.text)

    def evidence(
        self,
        conversation: Conversation,
        text: str,
        *,
        template_options: Mapping[str, Any] | None = None,
        cut: bool = False,
        reasoning: str | None = None,
    ) -> Evidence:
        """Evidence about an answer that came from anywhere: another server, an edit, a cache.

        The text is tokenised as a continuation of the rendered prompt, without an end token. Where it holds its
        reasoning, by the marks of any family, the answer behind it is scored given the reasoning, in the template's own
        marks. `reasoning` is that of an author who gives it separately, "" where it is not known: then, and where the
        template has no place for it, the answer has no score (`why_empty`). With `cut` a limit ended the text.

        Raises:
            EmptyResponseError: the text holds nothing but white space.
            InputError: it is no text.
            PromptTooLongError: prompt and text do not fit the context window.
        """
        prompt = self.render(conversation, **_named(template_options))
        require_text("the response", text)
        if reasoning is not None:
            require_text("reasoning", reasoning)
        require_bounded(text, self.context_window, name="response")
        foreign = Foreign.of(text, prompt.thinking, cut=cut, thought=reasoning)
        encoded = self.encode(text if foreign.written is None else foreign.written)
        if not text.strip() or not encoded:
            raise EmptyResponseError("the response is empty; there is nothing to score")
        window = self.context_window
        if window is not None and len(prompt.ids) + len(encoded) > window:
            raise PromptTooLongError(
                f"prompt ({len(prompt.ids)} tokens) and response ({len(encoded)}) exceed the context window of {window}"
            )
        if foreign.written is None:
            found = Visible(foreign.answer, (), reasoning=foreign.reasoning)
        else:
            found = answered(encoded, (), self, prompt.thinking, cut=cut)
        answer = Answer(
            prompt,
            foreign.answer,
            found.scored_ids,
            found.preceding,
            found.reasoning,
            cut=len(encoded) if cut else None,
        )
        return Evidence(BatchScoring(self, [answer]))

    def score(self, conversation: Conversation, text: str, *, objective: Objective | None = None) -> GradientScores:
        """Gradient scores of a text as the answer to a conversation, by any author (see `evidence`).

        Raises:
            ReasoningError, EmptyResponseError: it has none.
        """
        timed = self._scorable(conversation, text).gradients(objective)
        if timed is None:
            raise EmptyResponseError("the response is empty; there is nothing to score")
        return timed.scores

    def segments(self, conversation: Conversation, text: str, *, objective: Objective | None = None) -> list[Segment]:
        """The sentences of such a text, with scores of their own.

        Raises:
            ReasoningError, EmptyResponseError: as `score`.
            InputError: the tokens of the text spell another one.
        """
        evidence = self._scorable(conversation, text)
        parts = sentences_of(evidence)
        if parts is None:
            raise InputError(
                "the tokens of this text spell another one, so its sentences have none; score it as a whole"
            )
        segments = list[Segment]()
        for (start, end), own in parts:
            timed = None if own is None else own.gradients(objective)
            segments.append(Segment(evidence.text[start:end], start, end, timed and timed.scores))
        return segments

    def _scorable(self, conversation: Conversation, text: str) -> Evidence:
        evidence = self.evidence(conversation, text)
        if evidence.reasoning is not None and not evidence.response_ids:
            raise ReasoningError(f"the text cannot be scored: {evidence.why_empty}")
        return evidence


def _named(template_options: object) -> dict[str, Any]:
    """The options of one call for the chat template, by name.

    Raises:
        InputError: it is no mapping of names.
    """
    options = dict(require_kind("template_options", template_options or {}, Mapping))
    return {require_kind("a name in template_options", name, str): value for name, value in options.items()}
