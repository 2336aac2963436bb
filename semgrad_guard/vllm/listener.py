"""`Listener`: vLLM's own passes fill the recorders of its answers, so that a score reads nothing again.

It also ends thoughts where our engine would end them, by the marks of each prompt. (vLLM's own `thinking_token_budget`
takes one pair of marks for a whole engine, and counts from the opening mark.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from semgrad_guard.engine.answers.options import force
from semgrad_guard.engine.answers.writing import WrittenAnswer
from semgrad_guard.engine.answers.writing_model import WritingModel
from semgrad_guard.engine.objective import LogitTransform, Objective
from semgrad_guard.engine.scores.gradients import observed_layer
from semgrad_guard.engine.scores.scorer import Scorer
from semgrad_guard.engine.scores.tape import KeysValues, Recorder, Tape, left_of
from semgrad_guard.engine.scores.twin import Place
from semgrad_guard.vllm.paged_cache import PagedCache
from semgrad_guard.vllm.shared_weights import FUSED, library


class VLLMAnswer(WrittenAnswer):
    """An answer that vLLM writes under a name.

    States are there from position `begin` to before `reached`, and those before the head for `predicted` tokens.
    """

    def __init__(self, model: WritingModel, *answer: Any, objective: Objective, name: str, **more: Any) -> None:
        super().__init__(model, *answer, **more)
        self.name, self.epoch = name, model.scorer.epoch
        self.gradients, length = objective.gradients, len(self.prompt.ids)
        first = min(objective.positions(self.prompt.semantic_token.offset, length)) if self.gradients else -1
        self.begin = self.reached = length + first
        self.predicted = 0

    def begin_at(self, position: int) -> None:
        """Positions before this one are not computed any more: keep what observing takes."""
        self.begin = self.reached = position
        self.passes, self.keys, self.predicted = [], (), 0

    def take_all(self, tokens: Sequence[int]) -> None:
        """All of its tokens so far, the one that ended it included."""
        for token in tokens[len(self.ids) :]:
            if not self.done:
                self.take(token)

    def forced(self, written: Sequence[int]) -> int | None:
        """The token that ends its thought, where one has to come next."""
        return None if self._limit is None else self._limit.forced(written)


@dataclass(frozen=True)
class _Group:
    """The rows of a pass that one recorder takes, equally many of each answer; whether the last `predicts` a token."""

    recorder: Recorder
    answers: Sequence[VLLMAnswer]
    rows: torch.Tensor
    predicts: bool

    def taken(self, states: torch.Tensor) -> torch.Tensor:
        """These rows alone [answers, positions, d], as a copy."""
        return states.index_select(0, self.rows.to(states.device)).unflatten(0, (len(self.answers), -1))


class Listener:
    """Listens to a model runner of vLLM's; `answers` are those that it hears, by the names of requests."""

    def __init__(self, runner: Any) -> None:
        self.answers: dict[str, VLLMAnswer] = {}
        self.runner = runner
        self._scheduled: Any = None
        self._groups: Sequence[_Group] = ()
        self.stretches: dict[bool, tuple[Recorder, list[VLLMAnswer]]] = {}
        """The recorders of steps with the same answers: with gradients, and without."""
        # Of the last pass: until the next, the pages of its rows are theirs.
        self._tables: Any = None
        self._rows = WeakKeyDictionary[VLLMAnswer, int]()
        self._pages: PagedCache | None = None
        self._transforms = False
        """Whether the output of vLLM's head is of no use to a score: it comes after a transform."""
        runner.input_batch.logitsprocs.non_argmax_invariant.append(self)
        runner.input_batch.logitsprocs_need_output_token_ids = True

    def record(self, scorer: Scorer) -> None:
        """From now on keep what passes leave of answers; a model of one layer shows nothing but the embeddings."""
        self._layer = observed_layer(scorer.architecture.n_layers)
        if self._layer == 0:
            return
        runner, layers = self.runner, self.runner.model.model.layers
        self._scorer = scorer
        self._transforms = scorer.architecture.transform != LogitTransform()
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

    def add(self, answer: VLLMAnswer) -> None:
        """Hear an answer."""
        self.answers[answer.name] = answer

    def forget(self, answers: Sequence[VLLMAnswer]) -> None:
        """Hear these no more."""
        for answer in answers:
            self.answers.pop(answer.name, None)
        self.stretches.clear()

    # vLLM's logits processor.

    def update_state(self, batch_update: Any) -> None:
        """Nothing is kept of vLLM's batch."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of vLLM's rows [B, V], changed where a thought is to end."""
        batch = self.runner.input_batch
        for row, request in enumerate(batch.req_ids if self.answers else ()):
            answer = self._answer(request)
            if answer and (token := answer.forced(batch.req_output_token_ids[row])) is not None:
                force(logits[row], token)
        return logits

    def _answer(self, request: str) -> VLLMAnswer | None:
        """That of a request by vLLM's own name, which is the given one, or that with a random end."""
        return self.answers.get(request) or self.answers.get(request.rpartition("-")[0])

    # One pass.

    def _execute_model(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        for answer, row in self._rows.items():
            if self.runner.input_batch.req_ids[row] not in scheduled.num_scheduled_tokens:
                answer.keys = self._keys_of(answer)  # this pass may write into its pages
        self._scheduled, self._rows = scheduled, WeakKeyDictionary()
        try:
            output = self._execute(scheduled, *args, **kwargs)
        except BaseException:
            self._rows.clear()
            raise
        finally:
            self._scheduled, self._groups = None, ()
        if pages := self._pages:
            for answer, row in self._rows.items():
                longest = len(answer.prompt.ids) + answer.options.max_tokens
                if answer.gradients and not answer.keys and not pages.holds_all(longest):
                    answer.keys = pages.read(self._tables, row, answer.begin)  # vLLM will let go of what they are on
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
        if logits is not None and len(hidden) == len(self.runner.input_batch.req_ids):
            for group in self._groups:
                if group.predicts:
                    rows = torch.tensor([self._rows[answer] for answer in group.answers], device=hidden.device)
                    group.recorder.see_head(hidden[rows, None], logits[rows, None])
                    for answer in group.answers:
                        answer.predicted += 1
        return logits

    def _grouped(self) -> Iterator[_Group]:
        """The new rows of this pass: those of answers that grow by one token together, all others by themselves.

        A request that was preempted is read again, and its own tokens with it; these are not new.
        """
        batch, end = self.runner.input_batch, 0
        steps: dict[bool, dict[VLLMAnswer, int]] = {}
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
                steps.setdefault(answer.gradients, {})[answer] = end - 1
            else:
                yield _Group(self._recorder([answer]), [answer], torch.arange(end - new, end), predicts)
        for gradients, places in steps.items():
            if [*places] != self.stretches.get(gradients, (None, []))[1]:
                self.stretches[gradients] = self._recorder([*places]), [*places]
            yield _Group(*self.stretches[gradients], torch.tensor([*places.values()]), True)

    def _recorder(self, answers: Sequence[VLLMAnswer]) -> Recorder:
        """One more of some answers, with what the others leave of the budgets."""
        held = {recorder for answer in self.answers.values() for recorder, _ in answer.passes}
        left = left_of(self._scorer.memory, held)
        made = Recorder(self._layer, memory=replace(left, logits=0) if self._transforms else left)
        for row, answer in enumerate(answers):
            answer.passes.append((made, row))
        return made

    def _keys_of(self, answer: VLLMAnswer) -> Sequence[KeysValues]:
        """The keys and values of all positions, where the pages still hold them; else those that were read before."""
        row = self._rows.get(answer) if answer.gradients else None
        if row is None or self._pages is None or not self._pages.holds_all(answer.reached):
            return answer.keys
        return self._pages.read(self._tables, row, answer.reached)


def _maps(number: int, layer: nn.Module, twin: nn.Module) -> Iterator[tuple[nn.Module, list[tuple[Place, int]]]]:
    """The linear maps in a layer of vLLM's, and those of the twin that each holds, with their widths."""
    known = {path: module for path, module in twin.named_modules() if isinstance(module, nn.Linear)}
    for path, module in layer.named_modules():
        above, _, leaf = path.rpartition(".")
        names = [path] if path in known else [f"{above}.{part}" for part in FUSED.get(leaf, ())]
        if names and all(name in known for name in names):
            yield module, [((number, name), known[name].out_features) for name in names]
