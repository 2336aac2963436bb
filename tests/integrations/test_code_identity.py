"""A function by its content: another one has another identity or is refused, and the same one keeps its own."""

from __future__ import annotations

import functools
import json
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

from semgrad_guard.adapters.code_identity import Versioned, chain_identity, code_identity
from semgrad_guard.errors import InputError

LIMIT = 3
CONFIG = ModuleType("made_configuration")


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
    """A function that reads a global of this value, in code within it."""
    scope: dict[str, Any] = {"LIMIT": value, "__name__": "somewhere"}
    exec("def chosen(call):\n    return [LIMIT for _ in (1,)] == call\n", scope)  # noqa: S102
    return scope["chosen"]


def calling(value: Any) -> Callable[..., bool]:
    """A function that calls one of another package, which differs."""
    helpers: dict[str, Any] = {"__name__": "elsewhere"}
    exec(f"def helper(call):\n    return call == {value!r}\n", helpers)  # noqa: S102
    scope: dict[str, Any] = {"__name__": "somewhere", "helper": helpers["helper"]}
    exec("def chosen(call):\n    return helper(call)\n", scope)  # noqa: S102
    return scope["chosen"]


def with_field(value: Any) -> Callable[..., bool]:
    inner: Any = closing("x")
    inner.value = value
    return lambda call: call == inner.value


MAKERS: dict[str, Callable[[Any], Any]] = {
    "closing": closing,
    "defaults": defaults,
    "nested": nested,
    "reading": reading,
    "calling": calling,
    "field": with_field,
    "partial": lambda value: functools.partial(closing("x"), value),
    "wrapped": lambda value: functools.wraps(closing("x"))(closing(value)),
    "named like a library's": lambda value: functools.wraps(json.loads)(closing(value)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_another_value_is_another_function(name: str) -> None:
    make = MAKERS[name]
    one, same, other = identity(make("A")), identity(make("A")), identity(make("B"))
    assert one == same != other
    assert identity(make(["A", {"x": (1, 2)}])) != identity(make(["A", {"x": (1, 3)}]))


@dataclass(frozen=True)
class Picks:
    """An object that is called."""

    value: Any

    def __call__(self, call: Any) -> bool:
        return call == self.value

    def method(self, call: Any) -> bool:
        return call != self.value


class Names:
    """Values that code works with in addition to globals and closures."""

    listed: ClassVar[list[Any]] = ["A"]

    @classmethod
    def of_class(cls, call: Any) -> bool:
        return call in cls.listed


class Text(str):
    """A text with a field."""

    field: Any


class Kept(BaseModel):
    _private: Any = PrivateAttr(None)

    def __call__(self, call: Any) -> bool:
        return call == self._private


class Kind(Enum):
    ONE = 1


def of_import(call: Any) -> bool:
    import made_configuration  # pyright: ignore[reportMissingImports]

    return bool(call == made_configuration.VALUE)


REFUSED: dict[str, Any] = {
    "builtin": len,
    "getter": operator.itemgetter(0),
    "method of a text": "x".startswith,
    "object": Picks("A"),
    "method": Picks("A").method,
    "class method": Names.of_class,
    "class": Picks,
    "private field": Kept(),
    "closed object": closing(object()),
    "closed object of the user's": closing(Picks("A")),
    "closed iterator": closing(iter("a")),
    "subclass of text": closing(Text("x")),
    "reads a class": lambda call: call in Names.listed,
    "reads an enumeration": lambda call: call is Kind.ONE,
    "reads a module": lambda call: call == CONFIG.VALUE,
    "reads a module by any name": lambda call: call == getattr(CONFIG, "VALUE"),  # noqa: B009 - as code does that makes up the name
    "imports": of_import,
    "environment": lambda call: call == os.environ["WANTED"],
    "file": lambda call: call == Path("wanted").read_text(),
    "globals": lambda call: call == globals()["LIMIT"],
    "opens": lambda call: call == open("wanted").read(),  # noqa: SIM115
    "evaluates by another name": closing(eval),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_have_a_state_is_refused_with_advice(name: str) -> None:
    function = REFUSED[name]
    with pytest.raises(InputError, match=r"answering=.*Versioned\("):
        identity(function)
    assert identity(Versioned(function, name="picks", version="2")) == "picks@2"


def of_libraries(call: Any) -> bool:
    return math.isclose(call, math.pi) or bool(re.match("x", json.dumps(call))) or sorted([call]) == [LIMIT]


def test_code_of_the_standard_library_counts_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity(of_libraries)
    assert identity(of_libraries) == before
    monkeypatch.setitem(globals(), "LIMIT", 4)
    assert identity(of_libraries) != before


def test_lambdas_of_one_name_differ_by_their_code() -> None:
    first, second = (lambda c: c.text == "A"), (lambda c: c.text == "B")
    assert first.__qualname__ == second.__qualname__
    assert identity(first) != identity(second)
    assert identity(lambda c: c.first) != identity(lambda c: c.last)


def test_the_identity_is_the_same_in_another_process() -> None:
    source = textwrap.dedent("""
        from semgrad_guard.adapters.code_identity import chain_identity
        from semgrad_guard.adapters.code_identity import code_identity
        def make(words):
            return lambda call: call.text in {"alpha", "beta", "gamma", "delta"} and call.kind in words
        made = make({"x", "y", "z"})
        print(code_identity(made, role="answering"), chain_identity([made], models=()))
    """)
    runs = [subprocess.run([sys.executable, "-c", source], capture_output=True, check=True, text=True) for _ in "ab"]
    assert len({run.stdout for run in runs}) == 1


@pytest.mark.parametrize("given", [("x", "", "1"), (len, "", "1"), (len, "n", None)])
def test_a_versioned_function_has_a_name_and_a_version(given: Any) -> None:
    with pytest.raises(InputError, match="a versioned function"):
        Versioned(*given)


def parts(code: str, *, module: str = "made_chain") -> Any:
    """What a module of the user's defines as `part`."""
    scope: dict[str, Any] = {"__name__": module, "cached_property": functools.cached_property, "CONFIG": CONFIG}
    exec(textwrap.dedent(code), scope)  # noqa: S102
    return scope["part"]


CODE = {
    "function": "def part(x): return {}",
    "helper": "def helper(x): return {}\ndef part(x): return helper(x)",
    "constant": "LIMIT = {}\ndef part(x): return x < LIMIT",
    "default": "def part(x, limit={}): return x",
    "nested": "def part(x): return [{} for _ in x]",
    "closure": "def make(limit):\n    return lambda x: x < limit\npart = make({})",
    "method": "class Part:\n    def run(self): return {}\npart = Part()",
    "static": "class Part:\n    @staticmethod\n    def run(): return {}\npart = Part()",
    "property": "class Part:\n    @property\n    def run(self): return {}\npart = Part()",
    "cached": "class Part:\n    @cached_property\n    def run(self): return {}\npart = Part()",
    "member": "class Part:\n    limit = {}\npart = Part()",
    "base": "class Base:\n    limit = {}\nclass Part(Base): pass\npart = Part()",
    "bound": "class Part:\n    def run(self): return {}\npart = Part().run",
}


@pytest.mark.parametrize("name", CODE)
def test_a_chain_of_other_code_is_another_chain(name: str) -> None:
    one, same, other = (chain_identity([parts(CODE[name].format(n))], models=()) for n in (1, 1, 2))
    assert one == same != other


def test_a_chain_knows_the_values_that_its_code_reads_in_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "made_configuration", CONFIG)
    for code in (
        "def part(x): return CONFIG.VALUE",
        "def part(x):\n    import made_configuration\n    return made_configuration.VALUE",
    ):
        found = list[str]()
        for value in ("A", "B", "A"):
            monkeypatch.setattr(CONFIG, "VALUE", value, raising=False)
            found.append(chain_identity([parts(code)], models=()))
        assert found[0] == found[2] != found[1]


def test_a_chain_knows_code_behind_any_number_of_documents() -> None:
    documents = [{"vector": [0.5] * 8, "of": [number]} for number in range(30_000)]
    one, same, other = (chain_identity([documents, closing(value), documents], models=()) for value in "AAB")
    assert one == same != other


def test_a_chain_is_the_same_where_a_run_changed_what_it_closes_over() -> None:
    calls: list[int] = []
    function = closing(calls)
    before = chain_identity([function], models=())
    calls.append(1)
    assert chain_identity([function], models=()) == before
    assert chain_identity([closing("A")], models=()) != chain_identity([closing("B")], models=())
    assert chain_identity([closing(object())], models=())
