"""`Listener`: vLLM's own passes fill the recorders of its answers, so that a score reads nothing again.

It also ends thoughts where our engine would end them. (vLLM's own `thinking_token_budget` takes one pair of marks for a
whole engine, named when it starts, and counts from the opening mark. Here each answer has those of its own prompt.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextvars import Context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from semgrad_guard.engine.answers.options import force
from semgrad_guard.engine.answers.writing import BatchRequest, Writer, WrittenAnswer
from semgrad_guard.engine.objective import LogitTransform, Objective
from semgrad_guard.engine.replay.memory import FRUGAL
from semgrad_guard.engine.replay.tape import KeysValues, Recorder, Survey, Tape, left_of
from semgrad_guard.engine.replay.twin import Place
from semgrad_guard.engine.scores.head import surveyed_step
from semgrad_guard.engine.scores.observed import observed_layer
from semgrad_guard.engine.scores.scorer import Scorer
from semgrad_guard.vllm.paged_cache import PagedCache
from semgrad_guard.vllm.shared_weights import library, parts_of


class VLLMAnswer(WrittenAnswer):
    """An answer that vLLM writes under a name; `inner` is the one that vLLM gives it inside.

    States are there from position `begin` to before `reached`, and those before the head for `predicted` tokens.
    """

    def __init__(self, request: BatchRequest, writer: Writer, objective: Objective, name: str) -> None:
        super().__init__(request, writer)
        self.name = self.inner = name
        self.epoch = writer.scorer.epoch
        self.gradients, length = objective.gradients, len(request.prompt.ids)
        first = min(objective.positions(request.prompt.semantic_token.offset, length)) if self.gradients else -1
        self.begin = self.reached = length + first
        self.predicted = 0

    def begin_at(self, position: int) -> None:
        """Positions before this one are not computed any more: keep what observing takes."""
        self.begin = self.reached = position
        self.passes, self.keys, self.predicted = [], (), 0

    def forced(self, written: Sequence[int]) -> int | None:
        """The token that ends its thought, where one has to come next."""
        return None if self._limit is None else self._limit.forced(written)


@dataclass(frozen=True)
class _Group:
    """The rows of a pass that one recorder takes, equally many of each answer; `heads` are rows of the head's input."""

    recorder: Recorder
    answers: Sequence[VLLMAnswer]
    rows: torch.Tensor
    heads: Sequence[int]

    def taken(self, states: torch.Tensor) -> torch.Tensor:
        """These rows alone [answers, positions, d], as a copy."""
        return states.index_select(0, self.rows.to(states.device)).unflatten(0, (len(self.answers), -1))


class Listener:
    """Listens to a model runner of vLLM's; `answers` are those that it hears, by the names of requests."""

    def __init__(self, runner: Any) -> None:
        self.answers: dict[str, VLLMAnswer] = {}
        self._runner = runner
        self._scheduled: Any = None
        self._groups: Sequence[_Group] = ()
        self._stretches: dict[bool, tuple[Recorder, list[VLLMAnswer]]] = {}
        # Of the last pass: until the next, the pages of its rows are theirs.
        self._tables: Any = None
        self._rows = WeakKeyDictionary[VLLMAnswer, int]()
        self._pages: PagedCache | None = None
        runner.input_batch.logitsprocs.non_argmax_invariant.append(self)
        runner.input_batch.logitsprocs_need_output_token_ids = True

    def record(self, scorer: Scorer) -> None:
        """From now on keep the states of answers for scoring; a model of one layer has none but the embeddings.

        That is h^(k), the head's input and output, and where the pages can be read back, keys, values and outputs of
        linear maps.
        """
        self._layer = observed_layer(scorer.architecture.n_layers)
        if self._layer == 0:
            return
        runner, layers = self._runner, self._runner.model.model.layers
        self._scorer, self._survey = scorer, _survey_of(scorer)
        attentions = [block.self_attn.attn for block in layers[self._layer :]]
        if all(attention.attn_backend.get_name() == "CPU_ATTN" for attention in attentions):  # no other one was tried
            self._pages = PagedCache.of(attentions, self._layer)
        for number in range(self._layer, len(layers)) if self._pages else ():
            for module, parts in _maps(number, layers[number], scorer.twin.layers[number]):
                module.register_forward_hook(partial(self._see_map, parts))
        layers[self._layer - 1].register_forward_hook(self._see_layer)
        self._execute, self._compute_logits = runner.execute_model, runner.model.compute_logits
        runner.execute_model, runner.model.compute_logits = self._execute_model, self._see_head

    def tape(self, answer: VLLMAnswer) -> Tape | None:
        """What passes have left of an answer, which may still be written; None where some were not recorded."""
        return answer.tape(self._keys_of(answer)) if answer.predicted >= len(answer.ids) else None

    def forget(self, answer: VLLMAnswer) -> None:
        """Hear it no more."""
        self.answers.pop(answer.inner, None)
        self.end_stretches()

    def end_stretches(self) -> None:
        """Let later passes fill recorders of their own."""
        self._stretches.clear()

    # vLLM's logits processor.

    def update_state(self, batch_update: Any) -> None:
        """Nothing is kept of vLLM's batch."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of vLLM's rows [B, V], changed where a thought is to end."""
        batch = self._runner.input_batch
        for row, request in enumerate(batch.req_ids if self.answers else ()):
            answer = self._answer(request)
            if answer and (token := answer.forced(batch.req_output_token_ids[row])) is not None:
                force(logits[row], token)
        return logits

    def _answer(self, request: str) -> VLLMAnswer | None:
        """That of a request by vLLM's own name, which is the given one with a random end, or the given."""
        return self.answers.get(request) or self.answers.get(request.rpartition("-")[0])

    # One pass.

    def _execute_model(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        for answer, row in self._rows.items():
            if self._runner.input_batch.req_ids[row] not in scheduled.num_scheduled_tokens:
                answer.keys = self._keys_of(answer)  # this pass may write into its pages
        self._scheduled, self._rows = scheduled, WeakKeyDictionary()
        try:
            output = self._execute(scheduled, *args, **kwargs)
        except BaseException:
            self._rows.clear()
            raise
        finally:
            self._scheduled, self._groups = None, ()
        if self._pages is not None and self._pages.has_windows:  # they will let the first positions go
            for answer, row in self._rows.items():
                if answer.gradients and not answer.keys:
                    answer.keys = self._pages.read(self._tables, row, answer.begin)
        return output

    def _see_layer(self, _module: Any, _args: Any, output: Any) -> None:
        """Take in h^(k). A layer keeps the residual apart."""
        if self._scheduled is None:
            return
        self._groups = list(self._grouped())
        for group in self._groups:
            group.recorder.see_hidden(group.taken(output[0]) + group.taken(output[1]))
        self._tables = library("vllm.forward_context").get_forward_context().attn_metadata

    def _see_map(self, parts: Sequence[tuple[Place, int]], _module: Any, _args: Any, output: Any) -> None:
        """Take in the outputs of the twin's maps that one of vLLM's holds, with their widths."""
        for group in self._groups:
            if group.answers[0].gradients:
                given = group.taken(output[0]).split([width for _, width in parts], dim=-1)
                for (place, _), own in zip(parts, given, strict=True):
                    group.recorder.see_output(place, own)

    def _see_head(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Take in the head's input and output for the next token of answers. The sampler writes into the output."""
        logits = self._compute_logits(hidden, *args, **kwargs)
        if logits is not None and len(hidden) == len(self._runner.input_batch.req_ids):
            for group in self._groups:
                if group.heads:
                    rows = torch.tensor(group.heads, device=hidden.device)
                    group.recorder.see_head(hidden[rows, None], logits[rows, None])
                    for answer in group.answers:
                        answer.predicted += 1
        return logits

    def _grouped(self) -> Iterator[_Group]:
        """The new rows of this pass: those of answers that grow by one token together, all others by themselves.

        A request that was preempted is read again, and its own tokens with it; these are not new.
        """
        batch, end = self._runner.input_batch, 0
        steps: dict[bool, list[tuple[VLLMAnswer, int, int]]] = {True: [], False: []}
        for row, request in enumerate(batch.req_ids):
            count: int = self._scheduled.num_scheduled_tokens.get(request, 0)
            end += count
            if (answer := self._answer(request)) is None:
                continue
            first = int(batch.num_computed_tokens_cpu[batch.req_id_to_index[request]])
            if answer.reached < first:  # it was found in the prefix cache
                answer.begin_at(first)
            new, predicts = first + count - answer.reached, first + count == len(answer.prompt.ids) + answer.predicted
            if new <= 0:
                continue
            answer.reached, self._rows[answer] = first + count, row
            if new == 1 and predicts:
                steps[answer.gradients].append((answer, end - 1, row))
            else:
                recorder = self._recorder([answer])
                yield _Group(recorder, [answer], torch.arange(end - new, end), [row] if predicts else [])
        for gradients, some in steps.items():
            if some:
                answers = [answer for answer, *_ in some]
                recorder, known = self._stretches.get(gradients, (None, []))
                if recorder is None or known != answers:
                    recorder = self._recorder(answers)
                    self._stretches[gradients] = recorder, answers
                yield _Group(
                    recorder, answers, torch.tensor([place for _, place, _ in some]), [row for *_, row in some]
                )

    def _recorder(self, answers: Sequence[VLLMAnswer]) -> Recorder:
        """One more of some answers, with what the others leave of the budgets."""
        if answers[0].gradients:
            held = {recorder for answer in self.answers.values() for recorder, _ in answer.passes}
            left = left_of(self._scorer.memory, held)
            made = Recorder(self._layer, memory=left if self._survey else replace(left, logits=0))
        else:
            made = Recorder(self._layer, memory=FRUGAL, survey=self._survey)
        for row, answer in enumerate(answers):
            answer.passes.append((made, row))
        return made

    def _keys_of(self, answer: VLLMAnswer) -> Sequence[KeysValues]:
        """The keys and values of all positions, where the pages still hold them; else those that were read before."""
        row = self._rows.get(answer) if answer.gradients else None
        if row is None or self._pages is None or not self._pages.holds_all(answer.reached):
            return answer.keys
        return self._pages.read(self._tables, row, answer.reached)


def _survey_of(scorer: Scorer) -> Survey | None:
    """One under no stop: in the middle of a pass one answer's end must not be that of all.

    None where the output of vLLM's head is of no use to a score: it comes after a transform, and scores take its input.
    """
    if scorer.architecture.transform != LogitTransform():
        return None
    survey: Callable[..., torch.Tensor] = partial(surveyed_step, head=scorer.twin.head, transform=LogitTransform())
    return lambda states, raw: Context().run(survey, states, raw)


def _maps(number: int, layer: nn.Module, twin: nn.Module) -> Iterator[tuple[nn.Module, list[tuple[Place, int]]]]:
    """The linear maps in a layer of vLLM's, and those of the twin that each holds, with their widths."""
    known = {path: module for path, module in twin.named_modules() if isinstance(module, nn.Linear)}
    for path, module in layer.named_modules():
        above, _, leaf = path.rpartition(".")
        names = [path] if path in known else [f"{above}.{part}" for part in parts_of(leaf)]
        if names and all(name in known for name in names):
            yield module, [((number, name), known[name].out_features) for name in names]
