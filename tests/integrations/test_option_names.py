"""Both doors refuse unknown options with the same words."""

from __future__ import annotations

from typing import Any

import pytest

from langchain_semgrad_guard import ChatSemGrad
from llama_index_semgrad_guard import SemGradLLM
from semgrad_guard.errors import InputError


@pytest.mark.parametrize("door", [ChatSemGrad, SemGradLLM])
def test_an_unknown_field(door: Any) -> None:
    with pytest.raises(InputError, match=rf"{door.__name__} takes no temprature; it takes .*max_tokens.*temperature"):
        door(temprature=1)


def test_an_unknown_option_of_a_call() -> None:
    says = r"a call of {} takes no temprature; it takes .*max_tokens.*temperature"
    with pytest.raises(InputError, match=says.format("ChatSemGrad")):
        ChatSemGrad().invoke("hi", temprature=1)
    with pytest.raises(InputError, match=says.format("SemGradLLM")):
        SemGradLLM().complete("hi", temprature=1)
