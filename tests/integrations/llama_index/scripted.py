"""A `SemGradLLM` whose drafts a test writes; deciding about them, and everything above, is the real package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llama_index.core.base.llms.types import LLMMetadata

from llama_index_semgrad_guard import SemGradLLM, UncertaintyRouterCallback, get_verdict
from llama_index_semgrad_guard.llm import A_STRUCTURE
from llama_index_semgrad_guard.records import Chunk
from semgrad_guard import LanguageModel, Policy, Verdict
from semgrad_guard.adapters.calls import AnswerForm
from semgrad_guard.guard.flow import Draft
from semgrad_guard.guard.timing import Work
from semgrad_guard.records import PromptForm, digest_of

CANARY = "ZANZIBAR"
"""A word of drafts that must not be found anywhere."""
WITHHELD = "WITHHELD"

Script = Callable[[str], tuple[Any, ...]]
"""The reply to a prompt, given as one text: a text, how uncertain it is, the calls in it, and the verdicts on these."""


class Scripted(SemGradLLM):
    """Answers by its script; the model behind it only lends its name and its tokenizer."""

    script: Any = None
    calls_functions: bool = False

    @property
    def metadata(self) -> LLMMetadata:
        return super().metadata.model_copy(update={"is_function_calling_model": self.calls_functions})

    def _live(self, prompt: Any, form: AnswerForm, writing: Any, terms: Any, *, is_live: bool) -> Any:
        """The writing of a draft, in pieces of three characters."""
        draft = yield Work(lambda: self._scripted(prompt, form))
        text = draft.verdict.text
        yield from (text[start : start + 3] for start in range(0, len(text) if is_live else 0, 3))
        return draft

    def _scripted(self, prompt: Any, owed: AnswerForm) -> Draft[Chunk]:
        """A draft as the model's thread makes it."""
        shown = prompt if isinstance(prompt, str) else "\n".join(message.content or "" for message in prompt)
        text, uncertainty, calls, scores = (*self.script(shown), [], ())[:4]
        form = PromptForm(text=shown, tokens=len(shown.split()), roles=("user",), user_text=shown)
        verdict = Verdict.of(
            status="unscored" if uncertainty is None else "scored",
            action="answer",
            text=text,
            tool_calls=tuple(calls),
            calls=scores,
            estimator="none" if uncertainty is None else "hybridgrad",
            uncertainty=uncertainty,
            model=self.model,
            prompt=digest_of(shown),
            reason="no score" if uncertainty is None else None,
        )
        answer = Chunk(text, record={"model": self.model, "finish_reason": "stop"})
        trusted = bool(self.router) and self.router.trusts(calls)
        return Draft(verdict, answer, form, trusted=trusted, irreplaceable=A_STRUCTURE if owed.is_owed else "")


def verdict_of(response: Any) -> Verdict:
    """The verdict that a response carries."""
    verdict = get_verdict(response)
    assert verdict is not None
    return verdict


def router_of(**options: Any) -> UncertaintyRouterCallback:
    """A router that lets through scores of at most .1."""
    return UncertaintyRouterCallback(Policy(threshold=0.1), **{"abstain_message": WITHHELD, **options})


def scripted(
    model: LanguageModel, script: Script, router: Any = None, *, calls_functions: bool = False, **options: Any
) -> Scripted:
    """A scripted LLM with a router of these options, or with this one."""
    chosen = router_of(**options) if router is None else router
    fields: Any = {"script": script, "router": chosen, "calls_functions": calls_functions, "context_window": 4096}
    return Scripted.from_model(model, **fields)
