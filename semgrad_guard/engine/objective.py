"""The objective: which tokens' likelihood is differentiated by which hidden states, and how that becomes a number.

The likelihood is read off the output head through a `LogitTransform`.

t*, the semantic token: the prompt token whose hidden states best preserve the meaning of the prompt.

The paper (section 3.2) picks t* per model by its Semantic Preservation Score and lands on the same place each time:
the first token of the assistant header (`<|im_start|>` for Qwen, `<|start_header_id|>` for Llama 3.1) or, where the
chat template has no header, the last token of the user's text (Mistral Nemo). That place can be read off the chat
template itself, by comparing renderings of one conversation:

    prompted      with the generation prompt: the prompt the model sees
    unprompted    without it: the assistant header starts where the two part
    marked        prompted, with `MARK` right behind the last user's text: that text ends where the two part

Nothing is searched for, so a user who writes the header's own text cannot move t*.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from semgrad_guard.declared import require_valid
from semgrad_guard.errors import BindingMismatchError, EmptyLayerSpanError, InputError
from semgrad_guard.records import SemanticToken
from semgrad_guard.settings import Variant

if TYPE_CHECKING:
    import torch

Norm = Literal["l1", "l2"]


@dataclass(frozen=True)
class Objective:
    """The differentiated quantity, sum_t w_t log p(y_t), and the hidden states it is differentiated by.

    `variant="paper"` sums over the response's tokens and takes layers floor(L/2)+1 .. L-1 (Eq. 4);
    `variant="official"` averages over the tokens and takes the last floor(L/2) of layers 0 .. L-1, as the paper's
    published code does. `layers` overrides the span: layer 0 is the embedding output, layer l the output of the
    l-th decoder layer; the final, normalised state (layer L) is never part of it.

    `norm` makes a number of a gradient g of n entries: "l1" its mean absolute value, ||g||_1 / n, "l2" its root mean
    square, ||g||_2 / sqrt(n). (The paper's Table 2 replaces the norm and does not give the divisor; for one
    model every choice ranks answers alike, and this one stays on the scale of "l1", on which HybridGrad's mixture
    depends.) `weighted=False` sets w_t = 1. `token` takes another prompt token than t*, counted from the prompt's end
    (-1 is its last). `last_tokens` is how many of the prompt's last tokens `GradientScores.grid` covers; by default
    it begins at the differentiated token, which costs nothing.

    With `gradients=False` nothing is differentiated: the answer is only observed (`Evidence.observed`), and its
    generation keeps no more than that takes.
    """

    variant: Variant = "paper"
    layers: tuple[int, ...] | None = None
    _: KW_ONLY
    norm: Norm = "l1"
    weighted: bool = True
    token: int | None = None
    last_tokens: int | None = None
    gradients: bool = True

    def __post_init__(self) -> None:
        require_valid(self)
        if self.token is not None and self.token >= 0:
            raise InputError(f"token counts from the prompt's end, -1 being its last token; it is {self.token}")
        if self.last_tokens is not None and self.last_tokens < 1:
            raise InputError(f"last_tokens must be at least 1, not {self.last_tokens}")

    @property
    def averages(self) -> bool:
        """Whether the tokens' terms are averaged (official) or summed (paper)."""
        return self.variant == "official"

    def positions(self, semantic_token: int, length: int) -> tuple[int, int]:
        """The differentiated token and the grid's first, from the end of a prompt of `length` tokens with this t*.

        A grid that would reach beyond the prompt begins with it.

        Raises:
            InputError: `token` lies outside the prompt.
        """
        token = semantic_token if self.token is None else self.token
        if token < -length:
            raise InputError(f"token={token} lies outside a prompt of {length} tokens: use -{length} .. -1")
        return token, token if self.last_tokens is None else -min(self.last_tokens, length)

    def span(self, n_layers: int) -> tuple[int, ...]:
        """The layers of a model with `n_layers` decoder layers, ascending.

        Raises:
            EmptyLayerSpanError: the span is empty for this depth (paper: L <= 2; official: L <= 1).
            InputError: `layers` holds a number outside 0 .. L-1.
        """
        if self.layers is not None:
            span = tuple(sorted(set(self.layers)))
            if not span:
                raise EmptyLayerSpanError(f"layers= names no layer of this model's {n_layers}")
            if span[0] < 0 or span[-1] >= n_layers:
                raise InputError(f"layers= must lie within 0 .. {n_layers - 1} for this model, not {span}")
            return span
        first = n_layers // 2 + 1 if self.variant == "paper" else n_layers - n_layers // 2
        if first >= n_layers:
            raise EmptyLayerSpanError(
                f"the {self.variant} variant has no hidden state to differentiate by in a model of {n_layers} decoder "
                f"layer(s); name the layers yourself, for example layers=({n_layers - 1},)"
            )
        return tuple(range(first, n_layers))


@dataclass(frozen=True)
class LogitTransform:
    """logits = softcap(scale * z) for z = H W^T + b: the elementwise step between head and softmax.

    Gemma 2 caps (`final_logit_softcapping`), Cohere multiplies (`logit_scale`), Granite divides (`logits_scaling`).
    """

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        if self.scale != 1.0:
            z = z * self.scale
        return z if self.softcap is None else (z / self.softcap).tanh() * self.softcap

    def derivative(self, logits: torch.Tensor) -> torch.Tensor | float:
        """d logits / d z, from the logits: same shape, or a plain factor where it is constant."""
        if self.softcap is None:
            return self.scale
        return (1 - (logits / self.softcap).square()) * self.scale


MARK = "\ue000"
"""A private-use character: no chat template writes it, none strips it."""


@dataclass(frozen=True)
class TokenizedText:
    """A text and its tokens, with the half-open character span of each where the tokenizer knows it (fast ones do).

    Without spans, `encode` tokenises prefixes of the text, and the longest common prefix of token ids tells the token.
    """

    text: str
    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...] | None
    encode: Callable[[str], tuple[int, ...]]

    def first_token_of(self, position: int) -> int:
        """Index of the first token that holds the character at `position`, straddling tokens included."""
        if self.spans is None:
            return _shared(self.ids, self.encode(self.text[:position]))
        return next((i for i, (_, end) in enumerate(self.spans) if end > position), len(self.ids) - 1)

    def last_token_of(self, position: int) -> int:
        """Index of the last token that holds the character at `position`: a character may take several byte tokens."""
        if self.spans is None:
            prefix = self.encode(self.text[: position + 1])
            shared = _shared(self.ids, prefix)
            return shared - 1 if shared == len(prefix) else shared
        return max((i for i, (start, end) in enumerate(self.spans) if start <= position and end > 0), default=0)


def find_semantic_token(
    prompt: TokenizedText, *, unprompted: str, marked: str, special_tokens: Iterable[str] = ()
) -> SemanticToken:
    """t* of a prompt made by a chat template: the assistant header's first token, else the user text's last one.

    A difference that starts before the user's text ends is not a header (a template may also print the time of day).
    """
    header = header_start(prompt.text, unprompted, special_tokens=special_tokens)
    user_end = user_text_end(prompt.text, marked)
    if header is not None and header >= (user_end or 0):
        return SemanticToken(prompt.first_token_of(header) - len(prompt.ids), "assistant_header")
    if user_end:
        return SemanticToken(prompt.last_token_of(user_end - 1) - len(prompt.ids), "user_text")
    return SemanticToken(-1, "last_token")


def header_start(prompted: str, unprompted: str, *, special_tokens: Iterable[str] = ()) -> int | None:
    """The place of the assistant header's first visible character in `prompted`; None if the template has no header.

    Some templates close the text without the prompt (Phi-3 writes `<|endoftext|>` in place of `<|assistant|>`): the
    common prefix then holds a stray `<|`, so it must not end inside a special token.
    """
    boundary = _shared(prompted, unprompted)
    if boundary < len(unprompted):
        pattern = "|".join(re.escape(token) for token in sorted(special_tokens, key=len, reverse=True) if token)
        tokens = re.finditer(pattern, unprompted) if pattern else ()
        cut = (token.start() for token in tokens if token.start() < boundary < token.end())
        boundary = next(cut, boundary)
    header = prompted[boundary:].lstrip()
    return len(prompted) - len(header) if header else None


def header_text(prompted: str, unprompted: str, marked: str, *, special_tokens: Iterable[str] = ()) -> str:
    """The assistant header: the template's text after the last message, which opens an answer; "" if there is none.

    Of a template that writes its header in any case, it is all behind the user's text.
    """
    start, user_end = header_start(prompted, unprompted, special_tokens=special_tokens), user_text_end(prompted, marked)
    return "" if start is None and user_end is None else prompted[max(start or 0, user_end or 0) :]


def user_text_end(prompted: str, marked: str) -> int | None:
    """Where the marked text ends in `prompted` (exclusive); None if the template left it out."""
    return None if prompted == marked else _shared(prompted, marked)


def _shared(left: Sequence[object], right: Sequence[object]) -> int:
    """Length of the longest common prefix of two texts or of two id sequences, by bisection (long prompts are long)."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class TokenChoice(BaseModel):
    """Which prompt token to differentiate by.

    `offset` counts from the prompt's end (-1 is its last token); None means the place that the chat template
    itself gives, which is found in every prompt by itself. `template` is the fingerprint of the chat template and its
    options, without which an offset means nothing, `model` the name of the model that was probed (for people).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    offset: int | None = Field(lt=0)
    template: str
    model: str
    reason: str

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The choice in a probe's record.

        Raises:
            InputError: the file cannot be read, or holds no such choice.
        """
        source = Path(path)
        try:
            record: Any = json.loads(source.read_text(encoding="utf-8"))
            return cls.model_validate(record["semantic_token"])
        except OSError as error:
            raise InputError(f"Cannot read {source}: {error.strerror or error}.") from error
        except (ValueError, TypeError, KeyError, RecursionError, ValidationError) as error:
            raise InputError(
                f"{source} is not what `semgrad-guard probe` writes: it holds no intact semantic_token. Probe again."
            ) from error

    def offset_for(self, template: str) -> int | None:
        """The offset, for a model whose template has this fingerprint.

        Raises:
            BindingMismatchError: it has another.
        """
        if template != self.template:
            raise BindingMismatchError(
                f"t* was chosen for the chat template {self.template} ({self.model}), and this model's is {template}: "
                "the same offset is another token there. Probe this model, or leave t* to the template."
            )
        return self.offset
