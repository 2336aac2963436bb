"""A model that vLLM writes for has the face of any other: requests go to its worker, which drives vLLM's own batch."""

from __future__ import annotations

import inspect

import pytest

from semgrad_guard.engine.answers.batch import RunningBatch
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.vllm.engine import VLLMBatch
from semgrad_guard.vllm.language_model import VLLMLanguageModel

FACE = [name for name, _ in inspect.getmembers(RunningBatch, inspect.isfunction) if not name.startswith("_")]


@pytest.mark.parametrize("name", FACE)
def test_its_batch_is_driven_like_ours(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(kind, name)) for kind in (RunningBatch, VLLMBatch))
    assert theirs.parameters.keys() == ours.parameters.keys()
    assert theirs.return_annotation == ours.return_annotation


@pytest.mark.parametrize("name", ["submit", "generate", "worker"])
def test_it_takes_requests_like_any_other(name: str) -> None:
    assert inspect.getattr_static(VLLMLanguageModel, name) is inspect.getattr_static(LanguageModel, name)
    for name_of_its_own in ("joins", "write_whole"):  # by steps, and vLLM writes what cannot join as well
        assert inspect.getattr_static(VLLMLanguageModel, name_of_its_own) is not getattr(LanguageModel, name_of_its_own)
