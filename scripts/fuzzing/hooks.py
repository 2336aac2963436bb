"""schemathesis' hooks: most bodies name the model that there is and hold a question, and errors have OpenAI's form."""

from __future__ import annotations

import os
from typing import Any

import schemathesis

_FURTHER = {"model": os.environ["MODEL"], "messages": [{"role": "user", "content": "hello"}], "text": "an answer"}


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Change two bodies of three so that they come further in: with the model, then with a question, too."""
    known = context.operation.definition.raw.get("requestBody", {}).get("content", {}).get("application/json", {})
    names = known.get("schema", {}).get("properties", {})
    if isinstance(body, dict) and (steps := len(repr(body)) % 3):
        taken = list(_FURTHER.items())[: 1 if steps == 1 else None]
        return {name: value for name, value in (body | dict(taken)).items() if name in names}
    return body


@schemathesis.check
def error_form(context: Any, response: Any, case: Any) -> None:
    """An error is one as OpenAI's clients read them; none that HTTP itself refuses reached a route."""
    plain = "text/plain" in str(response.headers.get("content-type"))
    if response.status_code >= 400 and not (response.status_code == 400 and plain):
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text
