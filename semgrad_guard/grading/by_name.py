"""All graders, by the names that a command line gives them: `exact-match`, `bem=PATH`, `contains+judge=PROVIDER:MODEL`.

Those by words need no model: exact match, token F1, ROUGE-L and `contains`; which of them is the default. Those that
are models: natural language inference, BEM, and a chat model as a judge, which LangChain reaches.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from semgrad_guard.calibration.prompt_parts import common_subsequence
from semgrad_guard.engine.prompts.thoughts import Foreign
from semgrad_guard.engine.text_units import normalise, token_f1
from semgrad_guard.errors import GradingError, InputError, MissingExtraError
from semgrad_guard.files import reason, table_of
from semgrad_guard.grading.contains import Contains
from semgrad_guard.grading.grader import (
    AnswerGrader,
    AnswerToGrade,
    SecondOpinion,
    Verdicts,
    WithRefusals,
    WordGrader,
    any_reference,
    settling,
)
from semgrad_guard.questions.data_files import read_text

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel

    from semgrad_guard.estimators.text_pairs import AnswerEquivalence, Entailment

logger = logging.getLogger("semgrad_guard")


@dataclass(frozen=True)
class ExactMatch(WordGrader):
    """Equal to one of the references after normalisation."""

    @property
    def name(self) -> str:
        return "exact-match"

    def agrees(self, answer: AnswerToGrade) -> bool:
        """Whether the text is a reference, but for case, articles and punctuation."""
        found = normalise(answer.text)
        return bool(found) and any(found == normalise(reference) for reference in answer.references)


@dataclass(frozen=True)
class SharedWords(WordGrader):
    """Shares enough words with one of the references: their `measure` is at or above `threshold`, in (0, 1]."""

    kind: str
    measure: Callable[[str, str], float]
    threshold: float

    @property
    def name(self) -> str:
        return f"{self.kind}>={self.threshold:g}"

    def agrees(self, answer: AnswerToGrade) -> bool:
        """Whether the text shares enough words with a reference."""
        return any(self.measure(answer.text, reference) >= self.threshold for reference in answer.references)


def rouge_l(text: str, answer: str) -> float:
    """Harmonic mean of precision and recall of the longest common subsequence of words, in [0, 1].

    Source: Lin, "ROUGE: a package for automatic evaluation of summaries", 2004, with beta = 1. The words are those of
    `normalise`, so that scripts other than Latin count too; the original package drops them.
    """
    found, expected = normalise(text).split(), normalise(answer).split()
    common = len(common_subsequence(found, expected))
    return 2 * common / (len(found) + len(expected)) if common else 0.0


@dataclass(frozen=True)
class EntailmentGrader:
    """Correct if question and answer entail question and reference: entailment is the likeliest of the three labels.

    One direction only: an answer may contain more than the reference. A sentence of an answer is correct the other way
    round: if the passage, or question and reference, entail it.
    """

    model: Entailment

    @property
    def name(self) -> str:
        return f"nli({self.model.name})"

    def grade(self, answers: Sequence[AnswerToGrade]) -> Verdicts:
        """A verdict for each answer, in order."""

        def premise_and_hypothesis(one: AnswerToGrade, source: str) -> tuple[str, str]:
            if one.sentence:
                return source if source == one.passage else f"{one.question} {source}", one.text
            return f"{one.question} {one.text}", f"{one.question} {source}"

        def entails(pairs: list[tuple[AnswerToGrade, str]]) -> list[bool]:
            texts = [premise_and_hypothesis(*pair) for pair in pairs]
            return [scores.entails for scores in self.model.probabilities(texts)]

        return any_reference(answers, entails)


@dataclass(frozen=True)
class Bem:
    """Correct if BEM finds the answer equivalent to a reference: P at or above `threshold`, in (0, 1].

    The paper's published code counts an answer as correct from .7 on.
    """

    model: AnswerEquivalence
    threshold: float = 0.7

    @property
    def name(self) -> str:
        return f"bem({self.model.name})>={self.threshold:g}"

    def grade(self, answers: Sequence[AnswerToGrade]) -> Verdicts:
        """A verdict for each answer, in order."""

        def equivalent(pairs: list[tuple[AnswerToGrade, str]]) -> list[bool]:
            triples = [(one.question, reference, one.text) for one, reference in pairs]
            return [p >= self.threshold for p in self.model.probabilities(triples)]

        return any_reference(answers, equivalent)


_PROMPTS: dict[str, str] = table_of("semgrad_guard.grading", "judge.toml")
"""Ours: the paper (appendix, "LLM-as-a-Judge") does not print the prompt that it used."""

_AT_ONCE = 8
"""Requests to a judge at once."""
_VERDICT = re.compile(r"\W*(?:verdict\W+)?(correct|incorrect)\W*", re.IGNORECASE)


class Judge:
    """A chat model that decides whether an answer agrees with the references.

    Args:
        chat: any LangChain chat model; set its temperature to 0.
        name: the model's name, for records; by default the chat model's own.
    """

    def __init__(self, chat: BaseChatModel, *, name: str | None = None) -> None:
        self._chat = chat
        self._name = name or str(getattr(chat, "model", None) or getattr(chat, "model_name", None) or chat.get_name())

    @classmethod
    def from_name(cls, name: str) -> Judge:
        """The chat model that LangChain knows by this name, for example "openai:gpt-4.1" or "deepseek:deepseek-chat".

        Raises:
            MissingExtraError: LangChain, or its package for the provider, is not installed.
            GradingError: the provider is unknown, or not set up (a key is missing).
        """
        try:
            from langchain.chat_models import init_chat_model
        except ModuleNotFoundError as error:
            raise MissingExtraError("langchain", extra="agents") from error
        try:
            return cls(init_chat_model(name, temperature=0), name=name)
        except Exception as error:
            raise GradingError(
                f"The judge {name!r} cannot be set up: {reason(error)}. Name it as PROVIDER:MODEL, install the "
                "provider's LangChain package, and set its key."
            ) from error

    @property
    def name(self) -> str:
        return f"judge({self._name})"

    def grade(self, answers: Sequence[AnswerToGrade]) -> Verdicts:
        """A verdict for each answer, in order; None, with a warning, where the reply is not a verdict. Abstentions,
        and answers where only one is right, are decided without the chat model.

        Raises:
            GradingError: the chat model fails.
        """
        return settling(answers, self._ask)

    def _ask(self, answers: Sequence[AnswerToGrade]) -> Verdicts:
        prompts = [_prompt(answer) for answer in answers]
        try:
            replies = self._chat.batch([[("user", prompt)] for prompt in prompts], {"max_concurrency": _AT_ONCE})
        except Exception as error:
            raise GradingError(
                f"{self.name} cannot be asked: {reason(error)}. Grades given so far are kept; run the same command "
                "again to resume."
            ) from error
        return [read_verdict(reply.text) for reply in replies]


def read_verdict(reply: str) -> bool | None:
    """CORRECT or INCORRECT, with punctuation and a thought before it at most; None for any other reply."""
    found = _VERDICT.fullmatch(Foreign.of(reply, None).answer.strip())
    if found is None:
        logger.warning("semgrad-guard: the judge's reply is no verdict: %r", reply[:200])
        return None
    return found.group(1).lower() == "correct"


def _prompt(answer: AnswerToGrade) -> str:
    references = "\n".join(f"- {reference}" for reference in answer.sources)
    prompt = _PROMPTS["sentence" if answer.sentence else "answer"]
    return prompt.format(question=answer.question, references=references, answer=answer.text)


GRADERS: dict[str, WordGrader] = {
    "contains": Contains(),
    "exact-match": ExactMatch(),
    "token-f1": SharedWords("token-f1", token_f1, 0.5),
    "rouge-l": SharedWords("rouge-l", rouge_l, 0.3),
}
"""Those that need no model, by the names the command line offers.

ROUGE-L's threshold is the literature's for short answers (Kuhn et al., "Semantic uncertainty", ICLR 2023). It lets much
through: one right word of five is .33.
"""


def is_final(grader: str) -> bool:
    """Whether no verdict of this grader is final, and means wrong: one by words alone has its name."""
    return grader.split(_REFUSALS_IN_NAME)[0] in {known.name for known in GRADERS.values()}


_REFUSALS, _REFUSALS_IN_NAME = "+refusals=", "+refusals("

_NOT_ALL_OF_IT = "one sentence asserts a reference; what else the answer says is not checked"
_IN_COMMON = "the answer has enough words in common with a reference; what else it says is not checked"
_RIGHT_MEANS = {"contains": _NOT_ALL_OF_IT, "nli": _NOT_ALL_OF_IT, "token-f1": _IN_COMMON, "rouge-l": _IN_COMMON}


def right_means(grader: str) -> str | None:
    """The limits of "right", for a grader that does not look at the whole answer; `grader` is its full name."""
    return _RIGHT_MEANS.get(re.split(r"[(@>+]", grader)[0])


def no_verdict(count: int, among: int, grader: str, *, unit: str = "answers") -> str:
    """The notice about answers on which a grader came to no verdict."""
    notice = f"{count} of {among} {unit} have no verdict by {grader}; they count as wrong."
    if grader != GRADERS["contains"].name:
        return notice
    return f"{notice} The grader contains+judge=PROVIDER:MODEL or contains+nli=MODEL lets a model decide on them."


def default_grader(prompt_template: str) -> str:
    """The grader where none is named: a model with a chat template answers in sentences, one without continues a text.

    `prompt_template` is the full name of the prompts' form (`guard.template_name`), which ends in "@plain" where there
    is none.
    """
    return "exact-match" if prompt_template.endswith("@plain") else "contains"


_FIRST = "contains+"
_NEEDS_MODEL = {"nli": "FOLDER or hub id", "bem": "FOLDER or hub id", "judge": "PROVIDER:MODEL, as LangChain has it"}


def load_graders(specs: Sequence[str], *, nli: str | None = None) -> list[AnswerGrader]:
    """The graders of these names, in order; all names are checked before any model is loaded.

    Args:
        specs: `contains`, `exact-match`, `token-f1`, `rouge-l`, `nli[=MODEL]`, `bem=MODEL`, `judge=PROVIDER:MODEL`;
            `contains+` before one of the last three hands it the answers on which `contains` comes to no verdict;
            `+refusals=FILE` behind one names further beginnings of clauses that abstain, one a line.
        nli: the model of `nli` where it names none.

    Raises:
        InputError: an unknown name, a name that needs a model and has none, or a name twice.
        ModelNotFoundError, UnsupportedModelError: a model cannot be loaded, or is of another kind.
        GradingError, MissingExtraError: a judge cannot be set up.
    """
    found = [_loader(spec, nli) for spec in specs]
    if not found:
        raise InputError("grading needs at least one grader, for example exact-match")
    graders = [load() for load in found]
    names = [grader.name for grader in graders]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"the grader {twice[0]} is named twice; name each once, the deciding one first")
    return graders


def require_kind(spec: str) -> str:
    """The name itself, of a kind that there is; its model is not looked for.

    Raises:
        InputError: the grader is unknown.
    """
    graded = spec.partition(_REFUSALS)[0]
    name, _, model = graded.removeprefix(_FIRST).partition("=")
    if name not in _NEEDS_MODEL and (name not in GRADERS or model or graded.startswith(_FIRST)):
        named = ", ".join([*GRADERS, *(f"{kind}=..." for kind in _NEEDS_MODEL), f"{_FIRST}judge=..."])
        raise InputError(f"there is no grader {spec!r}; there are {named}")
    return spec


def _loader(spec: str, nli: str | None) -> Callable[[], AnswerGrader]:
    graded, own, file = require_kind(spec).partition(_REFUSALS)
    if own:
        first, refusals = _loader(graded, nli), tuple(filter(str.strip, read_text(Path(file)).splitlines()))
        return lambda: WithRefusals(first(), refusals)
    if spec.startswith(_FIRST):
        second = _loader(spec.removeprefix(_FIRST), nli)
        return lambda: SecondOpinion(GRADERS["contains"], second())
    name, _, model = spec.partition("=")
    if name in GRADERS:
        return lambda: GRADERS[name]
    model = model or (nli or "" if name == "nli" else "")
    if not model:
        raise InputError(f"the grader {name!r} needs a model: {name}={_NEEDS_MODEL[name]}")
    return lambda: _load(name, model)


def _load(name: str, model: str) -> AnswerGrader:
    if name == "judge":
        return Judge.from_name(model)
    if name == "nli":
        return EntailmentGrader(entailment_model(model))
    from semgrad_guard.estimators.text_pairs import AnswerEquivalence

    return Bem(AnswerEquivalence.from_pretrained(model))


@lru_cache(maxsize=1)
def entailment_model(name: str) -> Entailment:
    """The NLI model of this name, loaded once where methods and a grader share it."""
    from semgrad_guard.estimators.text_pairs import Entailment

    return Entailment.from_pretrained(name)
