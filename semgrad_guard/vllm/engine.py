"""vLLM's engine in this process, and the running batches whose answers vLLM writes: here, or for another program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextvars import Context
from itertools import count
from typing import Any, cast

from semgrad_guard.engine.answers.batch import RunningBatch
from semgrad_guard.engine.answers.options import GenerationOptions
from semgrad_guard.engine.answers.writing import WrittenAnswer
from semgrad_guard.engine.answers.writing_model import WritingModel
from semgrad_guard.engine.interruption import current_stop
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.engine.scores.tape import Tape
from semgrad_guard.errors import AnswerInterruptedError, InputError, UnsupportedModelError
from semgrad_guard.vllm.listener import Listener, VLLMAnswer
from semgrad_guard.vllm.shared_weights import library

_NUMBERS = count()


class Engine(Listener):
    """vLLM's engine: a step continues all answers that it writes, of all batches. Not for two threads at a time.

    Raises:
        InputError: it runs in another process.
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
        (runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
        super().__init__(runner)

    def add(self, answer: VLLMAnswer) -> None:
        """Have an answer written.

        Raises:
            InputError: vLLM does not take it.
        """
        require_taken(answer.options, self._engine.vllm_config)
        sampling = sampling_of(answer.options, detokenize=False)  # where an answer ends is ours to see
        try:
            [prompt] = self._engine.renderer.render_cmpl([{"prompt_token_ids": list(answer.prompt.ids)}])
            self._engine.add_request(answer.name, prompt, sampling)
        except (ValueError, library("vllm.exceptions").VLLMClientError) as error:
            raise InputError(f"vLLM does not take this request: {error}") from error
        super().add(answer)

    def step(self) -> None:
        """One step of the engine: one more token of each answer whose prompt has been read."""
        for output in self._engine.step():
            if answer := self.answers.get(output.request_id):  # else it was let go
                completion = output.outputs[0]
                answer.take_all(completion.token_ids)
                if output.finished and not answer.done:
                    answer.fail(AnswerInterruptedError(f"vLLM ended the answer early ({completion.finish_reason})"))
        self.forget([answer for answer in self.answers.values() if answer.done])

    def forget(self, answers: Sequence[VLLMAnswer]) -> None:
        """Write these no further."""
        self._engine.abort_request([answer.name for answer in answers if answer.name in self.answers])
        super().forget(answers)


class WrittenAnswers(RunningBatch):
    """Answers that vLLM writes: in this process, or for another program, which tells their tokens.

    `listener` hears the passes that write them.
    """

    def __init__(self, model: WritingModel, objective: Objective, *, listener: Listener) -> None:
        super().__init__(model, objective)
        self._listener = listener

    def answer(self, prompt: Prompt, options: GenerationOptions, *, name: str | None = None, **more: Any) -> VLLMAnswer:
        """An answer that vLLM writes under this name, by default a new one."""
        name = name or f"semgrad-guard-{next(_NUMBERS)}"
        return VLLMAnswer(self._model, prompt, options, objective=self._objective, name=name, **more)

    def join(self, rows: Sequence[WrittenAnswer]) -> None:
        """As `RunningBatch.join`, but that the next steps read the prompts. InputError: vLLM does not take one."""
        with self._scorer.lock:
            current_stop().check()
            self.require_the_same_model()
            try:
                for row in rows:
                    self._listener.add(cast(VLLMAnswer, row))
                    self._rows.append(row)
            except BaseException:
                self.drop(rows)
                raise

    def _tape(self, row: WrittenAnswer) -> Tape | None:
        return self._listener.tape(cast(VLLMAnswer, row))

    def _leave(self) -> None:
        self._keep([number for number, row in enumerate(self._rows) if not row.done])

    def _keep(self, numbers: Sequence[int]) -> None:
        gone = [cast(VLLMAnswer, row) for number, row in enumerate(self._rows) if number not in numbers]
        self._rows = [self._rows[number] for number in numbers]
        Context().run(self._forget, gone)  # under no stop: it may be the one that ended them

    def _forget(self, rows: Sequence[VLLMAnswer]) -> None:
        with self._scorer.lock:
            self._listener.forget(rows)


class VLLMBatch(WrittenAnswers):
    """A running batch that vLLM's engine keeps: it reads prompts in pieces, shares common beginnings, makes room."""

    def takes(self, prompt: Prompt, options: GenerationOptions) -> bool:
        """Whether this answer can join: vLLM takes every one."""
        return True

    def join_in_pieces(self, rows: Sequence[WrittenAnswer], piece: int) -> Iterator[bool]:
        """Like `join`: vLLM itself reads prompts in pieces."""
        self.join(rows)
        yield True

    def step(self) -> None:
        """As `RunningBatch.step`, for the answers whose prompt was read; every step looks at the model."""
        with self._scorer.lock:
            try:
                current_stop().check()
                self.require_the_same_model()
                if not all(row.done for row in self._rows):  # another batch's step may have ended them
                    cast(Engine, self._listener).step()
            except BaseException:
                self.drop(self._rows)
                raise
            self._leave()

    def write_whole(self, rows: Sequence[WrittenAnswer], *, scored: bool = True) -> None:
        """As `RunningBatch.write_whole`, in a batch of their own."""
        batch = VLLMBatch(self._model, self._objective, listener=self._listener)
        batch.join(rows)
        while batch.rows:
            batch.step()


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
    A grammar is read by llguidance, there as here. Thoughts are ended by `Listener`.
    """
    vllm = library("vllm.sampling_params")
    form = options.grammar and vllm.StructuredOutputsParams(grammar=options.grammar)
    return vllm.SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k or -1,
        seed=options.seed,
        ignore_eos=True,
        structured_outputs=form,
        **more,
    )
