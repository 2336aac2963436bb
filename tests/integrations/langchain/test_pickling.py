"""A chat model in another process: weights are named, not carried."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.output_parsers import StrOutputParser

from langchain_semgrad_guard import (
    ChatSemGrad,
    GuardedChatModel,
    UncertaintyMiddleware,
    UncertaintyRouterCallback,
    get_verdict,
)
from semgrad_guard import LanguageModel, SemGrad
from semgrad_guard.errors import InputError
from tests.warm_python import WarmPython

from .agents import ASKED
from .support import NOTHING, QUESTION, text_of


def test_a_used_chat_model_travels_by_name(tiny: str) -> None:
    chat = ChatSemGrad(model=tiny, max_tokens=6, estimator=SemGrad(), stop=["x"], prompt_template="mine")
    answer = chat.invoke(QUESTION)
    dumped = pickle.dumps(chat)
    assert len(dumped) < 10_000
    again = pickle.loads(dumped)  # noqa: S301 - ours
    assert again == chat
    assert again.language_model is chat.language_model
    assert again.profile == chat.profile
    verdict, expected = get_verdict(again.invoke(QUESTION)), get_verdict(answer)
    assert verdict is not None
    assert expected is not None
    assert (verdict.text, verdict.uncertainty) == (expected.text, expected.uncertainty)


def test_another_process_loads_the_weights_anew(warm_python: WarmPython, tiny: str, tmp_path: Path) -> None:
    chat = ChatSemGrad(model=tiny, max_tokens=6)
    answer = chat.invoke(QUESTION)
    (tmp_path / "chat.pickle").write_bytes(pickle.dumps(chat))
    program = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).invoke(sys.argv[2]).text, end='')"
    command = ["-c", program, str(tmp_path / "chat.pickle"), QUESTION]
    assert warm_python.run(command, folder=tmp_path).stdout == answer.text


@pytest.mark.parametrize("kind", ["guard", "router", "router of the model", "middleware", "chain"])
def test_guards_travel_with_their_rules(tiny: str, kind: str) -> None:
    chat = ChatSemGrad(model=tiny, max_tokens=6)
    rules = {"policy": NOTHING, "abstain_message": "No."}
    if kind == "middleware":
        again = pickle.loads(pickle.dumps(UncertaintyMiddleware(**rules)))  # noqa: S301 - ours
        assert create_agent(chat, [], middleware=[again]).invoke(ASKED)["messages"][-1].text == "No."
        return
    made: Any = {
        "guard": lambda: GuardedChatModel(chat, **rules),
        "router": lambda: UncertaintyRouterCallback(**rules),
        "router of the model": lambda: ChatSemGrad(model=tiny, callbacks=[UncertaintyRouterCallback(**rules)]),
        "chain": lambda: GuardedChatModel(chat, **rules) | StrOutputParser(),
    }[kind]()
    again = pickle.loads(pickle.dumps(made))  # noqa: S301 - ours
    found = chat.invoke(QUESTION, {"callbacks": [again]}) if kind == "router" else again.invoke(QUESTION)
    assert text_of([found]) == "No."


def test_a_model_that_was_loaded_beforehand_is_refused(language_model: LanguageModel) -> None:
    chat = ChatSemGrad.from_model(language_model)
    with pytest.raises(InputError, match=r"cannot be pickled.*model=\.\.\."):
        pickle.dumps(chat)
