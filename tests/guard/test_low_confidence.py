"""`LowConfidenceError`: one constructor for every path, and a message that promises only what the error holds."""

from __future__ import annotations

import pytest

from semgrad_guard import Verdict
from semgrad_guard.errors import LowConfidenceError

VERDICT = Verdict.of(
    status="scored", action="abstain", text="Nur-Sultan", estimator="hybridgrad", model="m", reason="too high"
)


@pytest.mark.parametrize("draft", ["Nur-Sultan", "", None])
def test_the_message_names_the_draft_where_there_is_one(draft: str | None) -> None:
    error = LowConfidenceError(VERDICT, draft=draft, advice="Ask again.")
    assert (error.verdict.text, error.verdict.draft) == ("", draft)
    assert ("withheld answer" in str(error)) is bool(draft)
    assert "too high (decision: abstain)" in str(error)
    assert str(error).endswith("Ask again.")
    assert "Nur-Sultan" not in str(error)
    assert VERDICT.text == "Nur-Sultan"
