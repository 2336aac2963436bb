"""LangChain's own suites. What needs tools, images or knowledge is declared by their flags."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_semgrad_guard import ChatSemGrad


class _Flags:
    """The tiny model reads text, and is not offered tools."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatSemGrad

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {**super().standard_chat_model_params, "max_tokens": 20}  # type: ignore[misc]


class TestUnit(_Flags, ChatModelUnitTests):
    """On the embedded model's name: nothing is loaded."""


class TestIntegration(_Flags, ChatModelIntegrationTests):
    """On the tiny random model."""

    @pytest.fixture(autouse=True)
    def _folder(self, tiny: str) -> None:
        self.folder = tiny

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": self.folder}
