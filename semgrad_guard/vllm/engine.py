"""`Engine`: vLLM's engine in this process, and the answers that it writes for us."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any

from semgrad_guard.engine.answers.options import GenerationOptions
from semgrad_guard.engine.answers.writing import BatchRequest, Decoder
from semgrad_guard.engine.objective import Objective
from semgrad_guard.errors import AnswerInterruptedError, InputError, UnsupportedModelError
from semgrad_guard.vllm.recorder import Record, RecordedAnswer, Recorder
from semgrad_guard.vllm.shared_weights import library
from semgrad_guard.vllm.thought_limits import ThoughtLimits

_NUMBERS = count()


class VLLMAnswer(RecordedAnswer):
    """An answer that vLLM writes, under this name. Of a prompt only the states for scoring are kept."""

    def __init__(self, request: BatchRequest, decoder: Decoder, objective: Objective) -> None:
        super().__init__(request, decoder, Record.for_scoring(request.prompt, objective))
        self.name = f"semgrad-guard-{next(_NUMBERS)}"
        self.limit = decoder.thought_limit(request.prompt, request.options)
        self.inner = ""
        """The name that vLLM gives it inside."""


class Engine:
    """A step continues all answers that are being written, for all callers. Not for two threads at a time.

    Raises:
        InputError: the engine runs in another process.
        UnsupportedModelError: it is spread over several.
    """

    def __init__(self, llm: Any) -> None:
        self._engine: Any = llm.llm_engine
        if not hasattr(self._engine.engine_core, "engine_core"):  # a client of another process has none
            raise InputError(
                "vLLM's engine runs in another process; set VLLM_ENABLE_V1_MULTIPROCESSING=0 before vllm is imported"
            )
        if (size := self._engine.vllm_config.parallel_config.world_size) > 1:
            raise UnsupportedModelError(
                f"vLLM spreads this model over {size} processes, and scoring takes whole weights: load it with "
                "tensor_parallel_size=1 and pipeline_parallel_size=1"
            )
        (self.runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
        """vLLM's model runner."""
        self.recorder: Recorder | None = None
        """The listener to its passes, once there is one."""
        self._thoughts = ThoughtLimits(self.runner)
        self._running: dict[str, VLLMAnswer] = {}

    def add(self, answer: VLLMAnswer) -> None:
        """Have an answer written.

        Raises:
            InputError: vLLM does not take it.
        """
        require_taken(answer.options, self._engine.vllm_config)
        sampling = sampling_of(answer.options, detokenize=False)  # where an answer ends is ours to see
        try:
            [prompt] = self._engine.renderer.render_cmpl([{"prompt_token_ids": list(answer.prompt.ids)}])
            answer.inner = self._engine.add_request(answer.name, prompt, sampling)
        except (ValueError, library("vllm.exceptions").VLLMClientError) as error:
            raise InputError(f"vLLM does not take this request: {error}") from error
        self._running[answer.name] = answer
        if self.recorder is not None:
            self.recorder.records[answer.inner] = answer.record
        if answer.limit is not None:
            self._thoughts.limits[answer.inner] = answer.limit

    def step(self) -> None:
        """One step of the engine: one more token of each answer whose prompt has been read."""
        for output in self._engine.step():
            answer = self._running.get(output.request_id)
            if answer is None:  # it was let go
                continue
            completion = output.outputs[0]
            for token in completion.token_ids[len(answer.ids) :]:
                if not answer.done:
                    answer.take(token)
            if output.finished and not answer.done:
                answer.fail(AnswerInterruptedError(f"vLLM ended the answer early ({completion.finish_reason})"))
        self.abort([answer for answer in self._running.values() if answer.done])

    def abort(self, answers: Iterable[VLLMAnswer]) -> None:
        """Stop writing these answers."""
        gone = [answer for answer in answers if self._running.pop(answer.name, None)]
        self._engine.abort_request([answer.name for answer in gone])
        for answer in gone:
            self._thoughts.limits.pop(answer.inner, None)
            if self.recorder is not None:
                self.recorder.records.pop(answer.inner, None)


def require_taken(options: GenerationOptions, config: Any) -> None:
    """Return if vLLM writes answers with these options as our engine does; `config` is its `VllmConfig`.

    Raises:
        InputError: another program than llguidance would read their grammar, and otherwise; or tokens are guessed ahead
            of where a thought may have to end.
    """
    if options.max_thinking_tokens is not None and config.speculative_config is not None:
        raise InputError(
            "vLLM guesses several tokens at once (speculative decoding), and a thought can end at none of them alone: "
            "leave max_thinking_tokens out, or start vLLM without it"
        )
    if options.grammar is not None and config.structured_outputs_config.backend != "guidance":
        raise InputError(
            "an answer in this form takes vLLM's backend guidance: load it with structured_outputs_config={'backend': "
            "'guidance'}, or start `vllm serve` with --structured-outputs-config.backend guidance"
        )


def sampling_of(options: GenerationOptions, **more: Any) -> Any:
    """vLLM's parameters for these options, and `more` of its own; a sampled answer is vLLM's for that seed, not ours.

    vLLM's own end tokens are ignored: `more` names the tokens that end an answer, or the caller handles them.
    A grammar is read by llguidance, there as here. Thoughts are ended by `ThoughtLimits`.
    """
    vllm = library("vllm.sampling_params")
    form: dict[str, Any] = {}
    if options.grammar is not None:
        form["structured_outputs"] = vllm.StructuredOutputsParams(grammar=options.grammar)
    return vllm.SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k or -1,
        seed=options.seed,
        ignore_eos=True,
        **form,
        **more,
    )
