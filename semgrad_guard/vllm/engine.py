"""vLLM's engine in this process, and the running batches whose answers vLLM writes: here, or for another program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import Context
from itertools import count
from typing import Any, cast

from semgrad_guard.engine.answers.batch import RunningBatch
from semgrad_guard.engine.answers.options import GenerationOptions
from semgrad_guard.engine.answers.writing import BatchRequest, Writer, WrittenAnswer
from semgrad_guard.engine.interruption import current_stop
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.prompts.prompt import Prompt
from semgrad_guard.engine.replay.tape import Tape
from semgrad_guard.errors import AnswerInterruptedError, InputError, UnsupportedModelError
from semgrad_guard.vllm.listener import Listener, VLLMAnswer
from semgrad_guard.vllm.shared_weights import library

_NUMBERS = count()


class Engine:
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
        (self.runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
        """vLLM's model runner."""
        self.listener = Listener(self.runner)
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
        self._running[answer.name] = self.listener.answers[answer.inner] = answer

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
            self.listener.forget(answer)


class RecordedBatch(RunningBatch):
    """A running batch whose answers are on vLLM's tapes: `listener` hears its passes."""

    def __init__(
        self, writer: Callable[[], Writer], objective: Objective, sampler: Callable[[], Any], *, listener: Listener
    ) -> None:
        super().__init__(writer, objective, sampler)
        self._listener = listener

    def let_go(self, scored: Sequence[tuple[WrittenAnswer, int]]) -> None:
        """As `RunningBatch.let_go`."""
        super().let_go(scored)
        self._listener.end_stretches()

    def _tape(self, row: WrittenAnswer) -> Tape | None:
        return self._listener.tape(cast(VLLMAnswer, row))

    _tape_so_far = _tape

    def _leave(self) -> None:
        self._keep([number for number, row in enumerate(self._rows) if not row.done])

    def _keep(self, numbers: Sequence[int]) -> None:
        gone = [cast(VLLMAnswer, row) for number, row in enumerate(self._rows) if number not in numbers]
        self._rows = [self._rows[number] for number in numbers]
        Context().run(self._forget, gone)  # under no stop: it may be the one that ended them

    def _forget(self, rows: Sequence[VLLMAnswer]) -> None:
        for row in rows:
            self._listener.forget(row)


class VLLMBatch(RecordedBatch):
    """A running batch that vLLM keeps: it reads prompts in pieces, shares their common beginnings, makes room."""

    def __init__(
        self, engine: Engine, writer: Callable[[], Writer], objective: Objective, sampler: Callable[[], Any]
    ) -> None:
        super().__init__(writer, objective, sampler, listener=engine.listener)
        self._engine = engine

    def takes(self, prompt: Prompt, options: GenerationOptions) -> bool:
        """Whether this answer can join: vLLM takes every one."""
        del prompt, options
        return True

    def join(self, requests: Sequence[BatchRequest]) -> list[WrittenAnswer]:
        """As `RunningBatch.join`, but that the next steps read the prompts.

        Raises:
            AnswerInterruptedError: the current stop ended it, or the model was changed while it wrote the others.
            InputError: vLLM does not take a request.
        """
        with self._scorer.lock:
            current_stop().check()
            self.require_the_same_model()
            writer, names = self._get_writer(), (f"semgrad-guard-{number}" for number in _NUMBERS)
            rows = [VLLMAnswer(request, writer, self._objective, next(names)) for request in requests]
            try:
                for row in rows:
                    self._engine.add(row)
            except BaseException:
                self._engine.abort(rows)
                raise
            self._rows += rows
            return list(rows)

    def join_in_pieces(self, requests: Sequence[BatchRequest], piece: int) -> Iterator[list[WrittenAnswer] | None]:
        """Like `join`: vLLM itself reads prompts in pieces."""
        del piece
        yield self.join(requests)

    def step(self, *, look: bool = True) -> None:
        """As `RunningBatch.step`, for the answers whose prompt was read; every step looks at the model."""
        del look
        with self._scorer.lock:
            try:
                current_stop().check()
                self.require_the_same_model()
                if not all(row.done for row in self._rows):  # another batch's step may have ended them
                    self._engine.step()
            except BaseException:
                self.drop(self._rows)
                raise
            self._leave()

    def _forget(self, rows: Sequence[VLLMAnswer]) -> None:
        with self._scorer.lock:
            self._engine.abort(rows)


class WrittenAnswers(RecordedBatch):
    """Answers that vLLM writes for another program, which tells their tokens, and drops them."""

    def begin(self, name: str, request: BatchRequest) -> VLLMAnswer:
        """An answer that vLLM will write under this name."""
        row = VLLMAnswer(request, self._get_writer(), self._objective, name)
        self._listener.answers[name] = row
        self._rows.append(row)
        return row

    def take(self, row: VLLMAnswer, tokens: Sequence[int], *, stopped: bool = False) -> None:
        """All tokens of an answer so far, the one that ended it included; `stopped`: their reader ended it."""
        for token in tokens[len(row.ids) :]:
            if not row.done:
                row.take(token)
        if stopped:
            row.end(len(tokens))


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
