"""A t* that was chosen by measurement (`semgrad-guard probe`), kept in a file, and good for one chat template only."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from semgrad_guard.errors import BindingMismatchError, InputError


class TokenChoice(BaseModel):
    """Which prompt token to differentiate by.

    `offset` counts from the prompt's end (-1 is its last token); None stands for the place that the chat template
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
