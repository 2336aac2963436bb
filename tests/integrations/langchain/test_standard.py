"""LangChain's own suites, on the tiny random model and on the embedded one.

`SEMGRAD_GUARD_TEST_MODEL=path-or-hub-id` runs the last of them on a real model, where nothing is expected to fail.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_semgrad_guard import ChatSemGrad, GuardedChatModel, UncertaintyRouterCallback
from semgrad_guard import Policy

from .scripted import Scripted

REAL_MODEL = os.environ.get("SEMGRAD_GUARD_TEST_MODEL")
JSON = "test_structured_output test_structured_output_async test_structured_output_pydantic_2_v1 "
JSON += "test_structured_output_optional_param test_json_mode"
TOOLS = "test_tool_calling test_tool_calling_async test_tool_choice test_bind_runnables_as_tools "
TOOLS += "test_unicode_tool_call_integration test_agent_loop"
UNKNOWING = {
    **dict.fromkeys(JSON.split(), "taught questions and answers only, it fills a string of JSON until max_tokens"),
    **dict.fromkeys(TOOLS.split(), "taught none of these tools, it does not know when to call them, or with what"),
}
"""Tests of knowledge that neither the embedded nor a random model can have, and why."""
BRIEF, SHORT = {"max_tokens": 64}, {"max_tokens": 16}
"""Long enough for a call, and for the start of JSON, which these models would fill up to any limit."""
TEMPLATES = Path(__file__).parents[2] / "fixtures" / "chat_templates"
TOOLED: dict[str, Any] = {"template_options": {"chat_template": (TEMPLATES / "qwen2.5.jinja").read_text()}}
"""A template that knows tools."""


class _Knowledge:
    """A test of knowledge that these models lack is not run: it could only be right by chance."""

    chat_model_class: ClassVar[Any] = ChatSemGrad

    @pytest.fixture(autouse=True)
    def _knowledge(self, request: pytest.FixtureRequest) -> None:
        reason = UNKNOWING.get(request.node.originalname)
        if reason and REAL_MODEL is None:
            pytest.xfail(reason)


EVERYTHING = Policy(threshold=1e308, on_cut="score")


class TestUnit(ChatModelUnitTests):
    """Of the embedded model, whose template knows no tools: binding them is no error before a call."""

    chat_model_class: ClassVar[Any] = ChatSemGrad
    chat_model_params: ClassVar[Any] = {"model": "pocket"}


class TestGuardedUnit(TestUnit):
    """The same with a router as its field."""

    chat_model_params: ClassVar[Any] = {"model": "pocket", "router": UncertaintyRouterCallback(EVERYTHING)}


class TestServedUnit(ChatModelUnitTests):
    """A guard around another chat model; options of generation belong to the model inside, or to the call."""

    chat_model_class: ClassVar[Any] = GuardedChatModel
    chat_model_params: ClassVar[Any] = {"model": Scripted(), "router": UncertaintyRouterCallback(EVERYTHING)}
    standard_chat_model_params: ClassVar[Any] = {}
    has_tool_choice: ClassVar[Any] = False

    @pytest.mark.xfail(reason="they belong to the model inside", strict=True)
    def test_standard_params(self, model: BaseChatModel) -> None:
        super().test_standard_params(model)


class TestTiny(_Knowledge, ChatModelIntegrationTests):
    """Random weights behind a template that knows tools (Qwen2.5's): calls, and tests that need no sense."""

    has_structured_output: ClassVar[Any] = False

    @pytest.fixture(autouse=True)
    def _folder(self, tiny_for_tools: str) -> None:
        self.folder = tiny_for_tools

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": self.folder, **TOOLED, **BRIEF}


class TestModel(_Knowledge, ChatModelIntegrationTests):
    """The embedded model, or a real one: everything that its chat template knows."""

    supports_json_mode: ClassVar[Any] = True
    chat_model_params: ClassVar[Any] = {"model": REAL_MODEL} if REAL_MODEL else {"model": "pocket", **SHORT}

    @property
    def has_tool_calling(self) -> bool:
        profile = ChatSemGrad(**self.chat_model_params).profile
        return profile is None or profile["tool_calling"]


class TestGuarded(TestModel):
    """The same model with a router that lets every answer through."""

    chat_model_params: ClassVar[Any] = {**TestModel.chat_model_params, "router": UncertaintyRouterCallback(EVERYTHING)}
