"""What passes left of texts: keys and values, hidden states from layer k on, outputs of linear maps, the head's output.

A `Recorder` listens to passes over one batch of rows; a `Tape` is one row's part of all the passes that read it, and a
`Row` names the tokens of its text that are scored. Texts that were written are on tape already, others are `read` once.

`Memory` tells how much of this may be held besides the model; the last part is about memory that runs out.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import Cache, DynamicCache

from semgrad_guard.declared import Bounds, require_valid
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.scores.twin import Place, Twin

R = TypeVar("R")
T = TypeVar("T")

Span = tuple[int, int]
"""Positions of a text, from the first to before the last."""

_JOINED = 16  # passes after which what they left is joined: many small tensors leave gaps in memory behind them

KeysValues = tuple[torch.Tensor, torch.Tensor] | None
"""One layer's keys and values of one row [heads, positions, d]; None for a layer that text does not pass through."""


Bytes = Annotated[int, Bounds(0)]


@dataclass(frozen=True)
class Memory:
    """Budgets in bytes. Beyond them scores cost time instead; they stay the same, but for roundings of half precision.

    `logits`: the head's outputs that writing keeps, and those kept between the two passes over the vocabulary; beyond
    it they are computed again.
    `activations`: the states kept for a replay's backward pass; beyond it only every decoder layer's input is kept, and
    the layer is run once more (about a forward pass of the upper layers).
    `outputs`: the outputs of the upper layers' linear maps while writing; those beyond it are computed again.
    `running`: keys and values of the answers that are written at once, with room for their longest. Beyond it further
    answers wait; one is always written.

    Raises:
        InputError: one is less than 0, or no whole number.
    """

    logits: Bytes = 96 << 20
    activations: Bytes = 512 << 20
    outputs: Bytes = 96 << 20
    running: Bytes = 1 << 30

    def __post_init__(self) -> None:
        require_valid(self)


FRUGAL = Memory(logits=0, activations=0, outputs=0)
"""As little as can be: tens of megabytes for a model of half a billion parameters, whatever the answer's length."""


class Recorder:
    """Keeps what passes over one batch of rows leave from column `start` on.

    That is h^(k), k = `layer`, the states before the head, the outputs of as many linear maps of the layers from k on
    as `memory.outputs` hold, and the head's output as long as all of it stays within `memory.logits`.
    """

    def __init__(self, layer: int, start: int = 0, *, memory: Memory = FRUGAL) -> None:
        self.layer, self.start, self.columns, self._passes = layer, start, 0, 0
        self.finals: list[torch.Tensor] = []
        """The states before the head [batch, d], step by step."""
        self.logits: list[torch.Tensor] | None = []
        """The head's output [batch, V], step by step; None where not all of it was kept."""
        self._memory = memory
        self._hidden: list[torch.Tensor] = []
        self._outputs: dict[Place, list[torch.Tensor]] = {}
        self._left_out, self._output_bytes = set[Place](), 0
        self._shape, self._cut = torch.Size(), 0

    @contextmanager
    def listening(self, twin: Twin) -> Iterator[None]:
        """For the time of a block, keep what passes through the twin."""
        with ExitStack() as stack:
            stack.enter_context(twin.watching({self.layer: self.see_hidden}))
            hook = twin.head.register_forward_hook(lambda *call: self.see_head(call[1][0], call[2]))
            stack.callback(hook.remove)
            if self._memory.outputs:
                stack.enter_context(twin.with_maps(sees=self.see_output))
            yield

    @property
    def positions(self) -> int:
        """How many columns are kept."""
        return max(0, self.columns - self.start)

    @property
    def held(self) -> tuple[int, int]:
        """Bytes of the head's outputs, and of the linear maps' outputs."""
        return sum(step.nbytes for step in self.logits or ()), self._output_bytes

    def see_hidden(self, hidden: torch.Tensor) -> None:
        """Take in h^(k) [batch, columns, d] of the next columns."""
        self._cut, self._shape = max(0, self.start - self.columns), hidden.shape[:2]
        self.columns += hidden.shape[1]
        self._passes += 1
        if self._cut < hidden.shape[1]:
            self._hidden.append(hidden[:, self._cut :].detach().clone())

    def see_output(self, place: Place, output: torch.Tensor) -> None:
        """Take in the output of a linear map [batch, columns, out] in the pass whose h^(k) came last."""
        if place[0] < self.layer or place in self._left_out or output.shape[:2] != self._shape or output.ndim != 3:
            return
        if self._cut < output.shape[1]:  # a copy: code may change the output in place
            pieces = self._outputs.setdefault(place, [])
            pieces.append(output[:, self._cut :].detach().clone())
            self._output_bytes += pieces[-1].nbytes
            if self._passes % _JOINED == 0:
                pieces[-_JOINED:] = _joined(pieces[-_JOINED:])
        while self._output_bytes > self._memory.outputs:
            last, pieces = self._outputs.popitem()
            self._output_bytes -= sum(piece.nbytes for piece in pieces)
            self._left_out.add(last)

    def see_head(self, final: torch.Tensor, raw: torch.Tensor) -> None:
        """Take in the states before the head and its output [batch, columns, .] of one step; the last column counts."""
        final, raw = final[:, -1].detach().clone(), raw[:, -1].detach()
        self.finals.append(final)
        if self.logits is not None and (len(self.logits) + 1) * raw.nbytes <= self._memory.logits:
            self.logits.append(raw.clone())
        else:
            self.logits = None

    def hidden(self) -> torch.Tensor:
        """h^(k) from column `start` on [batch, positions, d]."""
        self._hidden = _joined(self._hidden)
        return self._hidden[0]

    def places(self) -> set[Place]:
        """The linear maps whose outputs are kept at each position from column `start` on."""
        counts = {place: sum(piece.shape[1] for piece in pieces) for place, pieces in self._outputs.items()}
        return {place for place, count in counts.items() if count == self.positions}

    def output(self, place: Place, row: int) -> torch.Tensor:
        """The output of one of these maps for one row [positions, out]."""
        pieces = [piece[row] for piece in self._outputs[place]]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def left_of(memory: Memory, recorders: Iterable[Recorder]) -> Memory:
    """The rest of the budgets beyond what some recorders hold."""
    held = [recorder.held for recorder in recorders]
    logits, outputs = (sum(some) for some in zip((0, 0), *held, strict=True))
    return replace(memory, logits=max(0, memory.logits - logits), outputs=max(0, memory.outputs - outputs))


def _joined(pieces: list[torch.Tensor]) -> list[torch.Tensor]:
    return pieces if len(pieces) == 1 else [torch.cat(pieces, dim=1)]


@dataclass(frozen=True, eq=False)
class Tape:
    """One text's part of the passes that read it.

    `passes` are their recorders, in the order of the text, and the row in each. The first hidden state is that of
    position `begin`, the first state before the head that of position `predicting`. `keys` are those of every layer's
    positions from 0 on. `epoch` tells of which state of the model they are (`Scorer.epoch`; None: of any).

    Of a model whose layers hold a state there are no passes, but a cache that is `cut` before position `begin`.
    """

    passes: tuple[tuple[Recorder, int], ...]
    begin: int
    predicting: int
    keys: Sequence[KeysValues]
    epoch: object = None
    cut: Cache | None = None

    @property
    def layer(self) -> int:
        """The layer whose input was kept; -1 where none was."""
        return self.passes[0][0].layer if self.passes else -1

    @property
    def end(self) -> int:
        """The position behind the last hidden state."""
        return self.begin + sum(recorder.positions for recorder, _ in self.passes)

    def hidden(self, spans: Sequence[Span]) -> torch.Tensor:
        """h^(k) at these positions [n, d]."""
        return torch.cat([recorder.hidden()[row, places] for recorder, row, places in self._pieces(spans)])

    def places(self, spans: Sequence[Span]) -> set[Place]:
        """The linear maps whose outputs at these positions all passes over them have kept."""
        kept = [recorder.places() for recorder, *_ in self._pieces(spans)]
        return set[Place].intersection(*kept) if kept else set()

    def output(self, place: Place, spans: Sequence[Span]) -> torch.Tensor:
        """The output of one of these maps at these positions [n, out]."""
        parts = [recorder.output(place, row)[places] for recorder, row, places in self._pieces(spans)]
        # A single part is a view: in a graph, an output that is altered in place is an error.
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _pieces(self, spans: Sequence[Span]) -> list[tuple[Recorder, int, slice]]:
        """Where these positions are: in which recorders, in which row, and there at which places."""
        found: list[tuple[Recorder, int, slice]] = []
        for first, last in spans:
            begin = self.begin
            for recorder, row in self.passes:
                places = slice(max(first - begin, 0), min(last - begin, recorder.positions))
                begin += recorder.positions
                if places.start < places.stop:
                    found.append((recorder, row, places))
        return found

    def steps(self, kind: Literal["finals", "logits"], begin: int, end: int) -> list[torch.Tensor] | None:
        """The states before the head [d], or its output [V], of positions [begin, end); None where some are missing."""
        found: list[torch.Tensor] = []
        place = self.predicting
        for recorder, row in self.passes:
            steps: Sequence[torch.Tensor] | None = getattr(recorder, kind)
            count = len(recorder.finals)
            first, last = max(begin - place, 0), min(end - place, count)
            if first < last:
                if steps is None or len(steps) != count:
                    return None
                found += [step[row] for step in steps[first:last]]
            place += count
        return found if len(found) == end - begin and begin >= self.predicting else None


@dataclass(frozen=True, eq=False)
class Row:
    """The tokens [begin, end) of a text, scored given all tokens before them.

    `ids` is the text: a prompt of `prompt` tokens, and what was written. `token` is the position of t*, or of the token
    taken in its place, `grid` where the grid begins. Where a row is `in_context`, keys and values of the tokens between
    prompt and `begin` are constants to the gradient (earlier sentences); else it passes through them (a thought).
    """

    ids: tuple[int, ...]
    prompt: int
    token: int
    grid: int
    begin: int
    end: int
    in_context: bool = False
    tape: Tape | None = None

    @classmethod
    def of(
        cls,
        prompt: Sequence[int],
        written: Sequence[int],
        semantic_token: int,
        objective: Objective,
        *,
        before: int = 0,
        end: int | None = None,
        in_context: bool = False,
        tape: Tape | None = None,
    ) -> Row:
        """Of what was written after a prompt, the tokens from `before` on, to `end`; t* counts from the prompt's end.

        Raises:
            InputError: the objective's token lies outside the prompt.
        """
        token, grid = objective.positions(semantic_token, len(prompt))
        n = len(prompt)
        last = n + len(written) if end is None else n + end
        within = in_context and before > 0
        return cls((*prompt, *written), n, n + token, n + grid, n + before, last, within, tape)

    @property
    def length(self) -> int:
        """How many tokens are scored."""
        return self.end - self.begin

    @property
    def first(self) -> int:
        """The first position that can matter to a gradient."""
        return min(self.token, self.grid)

    @property
    def live(self) -> tuple[Span, ...]:
        """The positions that are run again with a graph; the last `length` of them predict the scored tokens."""
        if self.in_context:
            return (self.first, self.prompt), (self.begin - 1, self.end - 1)
        return ((self.first, self.end - 1),)

    @property
    def constants(self) -> tuple[Span, ...]:
        """All other positions before the last that is run: keys and values that are known."""
        return ((0, self.first), (self.prompt, self.begin - 1)) if self.in_context else ((0, self.first),)

    @property
    def live_count(self) -> int:
        """How many positions are run again."""
        return sum(end - begin for begin, end in self.live)

    @property
    def targets(self) -> tuple[int, ...]:
        """The scored tokens."""
        return self.ids[self.begin : self.end]

    @property
    def taped(self) -> Tape:
        """Its tape.

        Raises:
            ValueError: it has none.
        """
        if self.tape is None:
            raise ValueError("a row without a tape has to be read first")
        return self.tape

    def is_on(self, tape: Tape, layer: int) -> bool:
        """Whether a tape holds what a replay of this row from this layer on needs."""
        needed = self.begin - 1 if self.in_context else self.first
        known = [keys[0].shape[1] for keys in tape.keys if keys is not None]
        reaches = tape.begin <= self.first and tape.end >= self.end - 1
        return tape.layer == layer and reaches and bool(known) and min(known) >= needed


@torch.no_grad()
def read(
    twin: Twin, rows: Sequence[Row], layer: int, *, memory: Memory, epoch: object = None, keys: bool = True
) -> list[Row]:
    """The rows on tapes of their own, by one pass over all their texts; equal texts are read once.

    Texts are padded on the right, where no token of theirs sees the padding. Without `keys` they can be observed, and
    not replayed.
    """
    ends: dict[tuple[int, ...], int] = {}
    for row in rows:
        ends[row.ids] = max(row.end, ends.get(row.ids, 0))
    ids = pad_sequence([torch.tensor(text[:end]) for text, end in ends.items()], batch_first=True).to(twin.device)
    start, cache = min(row.first for row in rows), growing_cache() if keys else None
    recorder = Recorder(layer, start, memory=memory)
    twin.reset()
    with twin.headless() as finals, recorder.listening(twin):
        # All positions have a mask of one: padding lies behind every token that is read.
        twin.call(ids, cache=cache, attention_mask=torch.ones_like(ids))
    recorder.finals, recorder.logits = list(finals[0][:, start:].detach().unbind(1)), None
    tapes = {
        text: Tape(((recorder, place),), start, start, () if cache is None else keys_of(cache, place, 0, end), epoch)
        for place, (text, end) in enumerate(ends.items())
    }
    return [replace(row, tape=tapes[row.ids]) for row in rows]


def growing_cache() -> DynamicCache:
    """An empty cache that keeps every key, sliding windows too: the mask alone decides what a query sees.

    (A `DynamicCache` made from the model's config drops keys outside the window, which a replay would miss.)
    """
    return DynamicCache()


def keys_of(cache: Cache, row: int, begin: int, end: int | None = None) -> list[KeysValues]:
    """Views of one row's keys and values in the columns [begin, end), layer by layer."""
    layers: list[Any] = cache.layers
    return [
        (layer.keys[row, :, begin:end], layer.values[row, :, begin:end]) if layer.is_initialized else None
        for layer in layers
    ]


def below(rows: Sequence[Sequence[KeysValues]]) -> DynamicCache:
    """A growing cache of rows below each other, the shorter ones filled up with zeros on the left."""
    longest = max(keys[0].shape[1] for row in rows for keys in row if keys is not None)
    cache = growing_cache()
    for number, layer in enumerate(zip(*rows, strict=True)):
        known = [keys for keys in layer if keys is not None]
        if known:
            wide = [[F.pad(half, (0, 0, longest - half.shape[1], 0)) for half in keys] for keys in known]
            halves = [torch.stack(half) for half in zip(*wide, strict=True)]
            cache.update(halves[0], halves[1], number)
    return cache


OUT_OF_MEMORY = (
    "memory ran out while the answer was scored: set model.memory = FRUGAL, which holds less, or score shorter prompts "
    "and smaller batches"
)
"""Why there is no score where there was no room for one."""

_SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, of whichever device (a CPU's allocator has no error of its own)."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def unless_memory_runs_out(work: Callable[[], T]) -> T | None:
    """The result of `work`; None where there is no room for it."""
    try:
        return work()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    give_back_memory()
    return None


def as_memory_allows(work: Callable[[Sequence[R]], Sequence[T]], rows: Sequence[R]) -> list[T | None]:
    """The results of `work` for rows together; where memory runs out one by one, and None for one without room."""
    found = unless_memory_runs_out(lambda: work(rows))
    if found is not None:
        return list(found)
    return [None] if len(rows) == 1 else [one for row in rows for one in as_memory_allows(work, [row])]


def give_back_memory() -> None:
    """Release the memory of a failed attempt, the device's own reserve included. Not inside an `except` block.

    An error that is being handled holds the attempt's tensors.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
