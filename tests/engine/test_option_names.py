"""One spelling of each option: an unknown one is an error that names the known."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from semgrad_guard import GenerationOptions, Guard, LanguageModel, Policy
from semgrad_guard.engine.answers.options import DiverseBeams, Sampling, plan_record
from semgrad_guard.errors import InputError
from semgrad_guard.estimators.suite import paper_suite

KINDS: list[Any] = [GenerationOptions, Sampling, DiverseBeams]


@pytest.mark.parametrize("kind", KINDS)
def test_options_are_replaced_and_pickled(kind: Any) -> None:
    options = kind(max_tokens=7)
    assert replace(options, max_tokens=8).max_tokens == 8
    assert pickle.loads(pickle.dumps(options)) == options  # noqa: S301 - ours


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_option_is_named_with_those_there_are(kind: Any) -> None:
    with pytest.raises(InputError, match=rf"{kind.__name__} takes no maxtokens; it takes .*max_tokens"):
        kind(maxtokens=7)


def test_a_guard_names_its_options(language_model: LanguageModel) -> None:
    unknown: Any = {"max_tokens": 7}
    with pytest.raises(InputError, match=r"Guard takes no max_tokens; it takes .*on_doubt, options, prompt_template"):
        Guard(language_model, Policy(threshold=1.0), **unknown)


def test_files_keep_the_names_that_they_have() -> None:
    """Bindings of calibrations hold these records: another key would refuse calibrations that users have."""
    assert list(plan_record(Sampling())) == ["count", "temperature", "top_p", "top_k", "seed", "max_new_tokens"]
    assert plan_record(DiverseBeams(max_tokens=3)) == {"count": 10, "penalty": 1.0, "max_new_tokens": 3}
    plans = [method.settings().get("plan") for method in paper_suite(max_tokens=5)]
    assert all(plan["max_new_tokens"] == 5 and "max_tokens" not in plan for plan in plans if isinstance(plan, dict))
    assert any(plans)
