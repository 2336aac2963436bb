"""LangChain's own suites, on the tiny random model and on the embedded one.

`SEMGRAD_GUARD_TEST_MODEL=path-or-hub-id` runs the second on a real model instead, where nothing is expected to fail.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_semgrad_guard import ChatSemGrad

REAL_MODEL = os.environ.get("SEMGRAD_GUARD_TEST_MODEL")
unknowing = pytest.mark.xfail(
    REAL_MODEL is None,
    reason="the embedded model was taught questions and answers only: it fills a string of JSON until max_tokens",
    strict=False,
)


class TestUnit(ChatModelUnitTests):
    """Nothing is loaded, and every feature is declared: tools, a choice of them, structured output."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatSemGrad


class TestTiny(ChatModelIntegrationTests):
    """Random weights: what needs neither tools nor sense."""

    @pytest.fixture(autouse=True)
    def _folder(self, tiny: str) -> None:
        self.folder = tiny

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatSemGrad

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": self.folder}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {**super().standard_chat_model_params, "max_tokens": 20}

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False


class TestModel(ChatModelIntegrationTests):
    """The embedded model, or a real one: everything that its chat template knows."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatSemGrad

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": REAL_MODEL or "pocket"}

    @property
    def has_tool_calling(self) -> bool:
        """As the profile says; where the template knows no tools, `test_tools.py` has a model whose template does."""
        profile = ChatSemGrad(**self.chat_model_params).profile
        return profile is None or profile["tool_calling"]

    @property
    def supports_json_mode(self) -> bool:
        return True

    @unknowing
    @pytest.mark.parametrize("schema_type", ["pydantic", "typeddict", "json_schema"])
    def test_structured_output(self, model: BaseChatModel, schema_type: Any) -> None:
        super().test_structured_output(model, schema_type)

    @unknowing
    @pytest.mark.parametrize("schema_type", ["pydantic", "typeddict", "json_schema"])
    async def test_structured_output_async(self, model: BaseChatModel, schema_type: Any) -> None:
        await super().test_structured_output_async(model, schema_type)

    @unknowing
    def test_structured_output_pydantic_2_v1(self, model: BaseChatModel) -> None:
        super().test_structured_output_pydantic_2_v1(model)

    @unknowing
    def test_structured_output_optional_param(self, model: BaseChatModel) -> None:
        super().test_structured_output_optional_param(model)

    @unknowing
    def test_json_mode(self, model: BaseChatModel) -> None:
        super().test_json_mode(model)
