"""A function by its content: another one has another identity, and the same one keeps it."""

from __future__ import annotations

import functools
import operator
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

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
