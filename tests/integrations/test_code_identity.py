"""A function by its content: another one has another identity, and the same one keeps it."""

from __future__ import annotations

import functools
import math
import operator
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel, PrivateAttr

from semgrad_guard.adapters.code_identity import Versioned, code_identity, content_digest
from semgrad_guard.errors import InputError

LIMIT = 3


def identity(function: Any) -> str:
    return code_identity(function, role="answering")


def closing(value: Any) -> Callable[[Any], bool]:
    return lambda call: call == value


def defaults(value: Any) -> Callable[..., bool]:
    return lambda call, other=value: call == other


def nested(value: Any) -> Callable[..., bool]:
    inner = closing(value)
    return lambda call: inner(call)


def reading(value: Any) -> Callable[..., bool]:
    """A function that reads a global of this value."""
    scope: dict[str, Any] = {"LIMIT": value, "__name__": "somewhere"}
    exec("def chosen(call):\n    return [LIMIT for _ in (1,)] == call\n", scope)  # noqa: S102
    return scope["chosen"]


def calling(value: Any) -> Callable[..., bool]:
    """A function that calls another one, which differs."""
    scope: dict[str, Any] = {"__name__": "somewhere"}
    exec(f"def helper(call):\n    return call == {value!r}\ndef chosen(call):\n    return helper(call)\n", scope)  # noqa: S102
    return scope["chosen"]


@dataclass(frozen=True)
class Picks:
    """An object that is called."""

    value: Any

    def __call__(self, call: Any) -> bool:
        return call == self.value

    def method(self, call: Any) -> bool:
        return call != self.value


MAKERS = {
    "closing": closing,
    "defaults": defaults,
    "nested": nested,
    "reading": reading,
    "calling": calling,
    "partial": lambda value: functools.partial(closing("x"), value),
    "object": Picks,
    "method": lambda value: Picks(value).method,
    "wrapped": lambda value: functools.wraps(closing("x"))(closing(value)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_another_value_is_another_function(name: str) -> None:
    make = MAKERS[name]
    one, same, other = identity(make("A")), identity(make("A")), identity(make("B"))
    assert one == same != other
    assert identity(make(["A", {"x": (1, 2)}])) != identity(make(["A", {"x": (1, 3)}]))


class Names:
    """What code works with beside globals and closures."""

    wanted: tuple[Any, ...] = ("A",)
    listed: ClassVar[list[Any]] = ["A"]

    @classmethod
    def of_class(cls, call: Any) -> bool:
        return call in cls.wanted

    @classmethod
    def of_list(cls, call: Any) -> bool:
        return call in cls.listed


class Text(str):
    """A text with a field."""

    field: Any


class Kept(BaseModel):
    _private: Any = PrivateAttr(None)

    def __call__(self, call: Any) -> bool:
        return call == self._private


CONFIG = ModuleType("made_configuration")


def of_module(call: Any) -> bool:
    return call == CONFIG.VALUE


def of_import(call: Any) -> bool:
    import made_configuration  # pyright: ignore[reportMissingImports]

    return bool(call == made_configuration.VALUE)


def of_attribute(call: Any) -> bool:
    return bool(call == vars_of.value)


vars_of: Any = lambda: None  # noqa: E731 - a function with a field
text = Text("x")
kept = Kept()
of_text, of_itself = closing(text), of_attribute
STATES: dict[str, tuple[Any, Callable[[Any], None]]] = {
    "class": (Names.of_class, lambda value: setattr(Names, "wanted", (value,))),
    "class list": (Names.of_list, lambda value: setattr(Names, "listed", [value])),
    "module": (of_module, lambda value: setattr(CONFIG, "VALUE", value)),
    "import": (of_import, lambda value: setattr(CONFIG, "VALUE", value)),
    "function": (of_attribute, lambda value: setattr(vars_of, "value", value)),
    "subclass": (of_text, lambda value: setattr(text, "field", value)),
    "private": (kept, lambda value: setattr(kept, "_private", value)),
}


@pytest.mark.parametrize("name", STATES)
def test_another_state_is_another_function(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "made_configuration", CONFIG)
    function, change = STATES[name]
    found = list[str]()
    for value in ("A", "B", "A"):
        change(value)
        found.append(identity(function))
    assert found[0] == found[2] != found[1]


def of_environment(call: Any) -> bool:
    return bool(call == os.environ["WANTED"])


def of_file(call: Any) -> bool:
    return bool(call == Path("wanted").read_text())


def of_names(call: Any) -> bool:
    return bool(call == globals()["LIMIT"])


def of_any_name(call: Any) -> bool:
    return bool(call == getattr(CONFIG, "VALUE"))  # noqa: B009 - as code does that makes up the name


@pytest.mark.parametrize("function", [of_environment, of_file, of_names, of_any_name])
def test_code_that_works_with_what_it_does_not_name_is_refused(function: Any) -> None:
    with pytest.raises(InputError, match=r"Versioned\("):
        identity(function)


class Kind(Enum):
    ONE = 1


def of_libraries(call: Any) -> bool:
    import json

    return math.isclose(call, math.pi) or bool(re.match("x", json.dumps(call))) or call is Kind.ONE


def test_code_of_libraries_and_enumerations_counts_by_its_name() -> None:
    assert identity(of_libraries) == identity(of_libraries)


def test_lambdas_of_one_name_differ_by_their_code() -> None:
    first, second = (lambda c: c.text == "A"), (lambda c: c.text == "B")
    assert first.__qualname__ == second.__qualname__
    assert identity(first) != identity(second)
    assert identity(lambda c: c.first) != identity(lambda c: c.last)


def test_the_identity_is_the_same_in_another_process() -> None:
    source = textwrap.dedent("""
        from semgrad_guard.adapters.code_identity import code_identity
        def make(words):
            return lambda call: call.text in {"alpha", "beta", "gamma", "delta"} and call.kind in words
        print(code_identity(make({"x", "y", "z"}), role="answering"))
    """)
    runs = [subprocess.run([sys.executable, "-c", source], capture_output=True, check=True, text=True) for _ in "ab"]
    assert len({run.stdout for run in runs}) == 1


@pytest.mark.parametrize(
    "function", [len, operator.itemgetter(0), "x".startswith, closing(object()), closing(iter("a"))]
)
def test_what_cannot_be_known_is_refused_with_what_to_give(function: Any) -> None:
    with pytest.raises(InputError, match=r"answering=.*Versioned\("):
        identity(function)
    assert identity(Versioned(function, name="picks", version="2")) == "picks@2"


@pytest.mark.parametrize("given", [("x", "", "1"), (len, "", "1"), (len, "n", None)])
def test_a_versioned_function_has_a_name_and_a_version(given: Any) -> None:
    with pytest.raises(InputError, match="a versioned function"):
        Versioned(*given)


def test_a_looser_digest_lets_a_run_change_what_it_closes_over() -> None:
    heard: list[int] = []
    function = closing(heard)
    before = content_digest(function)
    heard.append(1)
    assert content_digest(function) == before
    assert content_digest(closing("A")) != content_digest(closing("B"))
    assert content_digest(closing(object()))
