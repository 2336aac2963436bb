"""Answers that must have a form: JSON of a schema, or a tool call. llguidance tells which tokens may come next.

Scores are made from the raw distribution, as always: a form that the model would not have chosen looks uncertain.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from semgrad_guard.errors import InputError, require_installed

_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One way to write each JSON value: free white space lets a weak model write it forever."""


def json_rule(schema: Mapping[str, Any]) -> str:
    """The grammar rule of a JSON value. Objects hold the schema's properties, unless it explicitly allows more."""
    return f"%json {json.dumps({**closed(schema), 'x-guidance': _STYLE})}"


def text_rule(text: str, special_tokens: Mapping[str, int]) -> str:
    """The rule of a fixed text; a special token in it is that token, not its letters."""
    marks = sorted(filter(None, special_tokens), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
    rules = [f"<[{special_tokens[one]}]>" if one in special_tokens else json.dumps(one) for one in pieces if one]
    return " ".join(rules or ['""'])


def one_of(rules: Sequence[str]) -> str:
    """The grammar of an answer that follows one of these rules."""
    return "start: " + " | ".join(rules)


_KNOWN = 16
"""Grammars that are kept compiled: a request's is compiled in its caller's thread, and used in the model's."""


def closed(schema: Any) -> Any:
    """A JSON schema whose objects take no properties but the named ones, unless it allows others."""
    if isinstance(schema, list):
        return [closed(part) for part in cast("list[Any]", schema)]
    if not isinstance(schema, Mapping):
        return schema
    rules = {key: closed(value) for key, value in cast("Mapping[str, Any]", schema).items()}
    if isinstance(rules.get("properties"), dict) and rules.get("type") == "object":
        rules.setdefault("additionalProperties", False)
    return rules


FORM_FIELDS = ("response_format", "tool_choice", "tools")
"""The options of a request that give its answer a form."""


class GrammarCompiler:
    """Turns grammars into logits processors for one tokenizer.

    Raises:
        MissingExtraError: llguidance is not installed.
        InputError: the tokenizer is a slow one, whose tokens llguidance cannot read.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, end_tokens: tuple[int, ...]) -> None:
        require_installed("llguidance", extra="langchain")
        from llguidance.hf import from_tokenizer

        if not tokenizer.is_fast or not end_tokens:
            raise InputError(
                "answers of this model cannot be given a form: that takes a fast tokenizer and an end token. "
                "Leave tool_choice and response_format out."
            ).about(*FORM_FIELDS)
        self.end_tokens = end_tokens
        self._tokenizer: Any = from_tokenizer(cast("Any", tokenizer), eos_token=list(end_tokens))
        self.matcher = lru_cache(maxsize=_KNOWN)(self._matcher)

    def _matcher(self, grammar: str) -> Any:
        """llguidance's form of a grammar, to be copied for each answer.

        Raises:
            InputError: the grammar, which holds the caller's schema, cannot be followed.
        """
        from llguidance import LLMatcher

        matcher: Any = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0)
        if matcher.is_error():
            message = matcher.get_error().partition("\n")[0]
            raise InputError(f"no answer can be made to follow this schema: {message}").about(*FORM_FIELDS)
        return matcher

    def processor(self, grammar: str, *, width: int) -> GrammarProcessor:
        """A processor for the one answer to a prompt of `width` tokens.

        Raises:
            InputError: the grammar cannot be followed.
        """
        return GrammarProcessor(self.matcher(grammar).deep_copy(), width, self.end_tokens)


class GrammarProcessor(LogitsProcessor):
    """Forbids every token that would leave the grammar, in one row."""

    def __init__(self, matcher: Any, width: int, end_tokens: Sequence[int]) -> None:
        self._matcher, self._seen, self._end_tokens = matcher, width, list(end_tokens)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        for token in input_ids[0, self._seen :].tolist():
            if not self._matcher.consume_token(token):
                # llguidance's own words hold the answer so far, which may be one that must be withheld.
                raise InputError(
                    "this model's tokens cannot follow this schema or call; leave its form to the model"
                ).about(*FORM_FIELDS)
        self._seen = input_ids.shape[1]
        if self._matcher.is_stopped():  # the grammar is complete: only an end may come
            allowed = torch.tensor(self._end_tokens, device=scores.device)
        else:
            bias = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
            allowed = bias[: scores.shape[1]].nonzero().flatten().to(scores.device)
        return torch.full_like(scores, float("-inf")).index_copy(1, allowed, scores[:, allowed])
