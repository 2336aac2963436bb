"""`Guard(model, estimator, policy)` works for one release, and says what the order is now."""

from __future__ import annotations

import pytest

from semgrad_guard import Guard, LanguageModel, ParaGrad, Policy
from semgrad_guard.errors import InputError

ALL = Policy(threshold=1e9)


def test_the_old_order_warns_and_means_what_it_meant(language_model: LanguageModel) -> None:
    with pytest.warns(DeprecationWarning, match=r"Guard\(model, policy, estimator=...\)") as caught:
        guard = Guard(language_model, ParaGrad(), ALL)  # type: ignore[arg-type]
    assert (guard.estimator, guard.policy) == (ParaGrad(), ALL)
    assert caught[0].filename == __file__


def test_nonsense_in_the_policys_place_is_refused(language_model: LanguageModel) -> None:
    for wrong in ("policy", 0.5, object()):
        with pytest.raises(InputError, match="Policy"):
            Guard(language_model, wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="one policy"):
        Guard(language_model, ALL, ALL)
    with pytest.raises(InputError, match="Policy"), pytest.warns(DeprecationWarning, match="is now"):
        Guard(language_model, ParaGrad())  # type: ignore[arg-type]
