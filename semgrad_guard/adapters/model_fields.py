"""The common fields of the frameworks' model classes: for loading weights and for decoding an answer.

Weights load at the first answer, once for equal fields; before that, a model's files can be read.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar, cast

from huggingface_hub import try_to_load_from_cache
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SkipValidation,
    ValidationInfo,
    field_validator,
)

from semgrad_guard.adapters.calls import AnswerForm
from semgrad_guard.declared import declared_options
from semgrad_guard.declared import naming_faults as naming_faults
from semgrad_guard.declared import plain as plain
from semgrad_guard.declared import require_known as require_known
from semgrad_guard.engine.answers.answer import Evidence, Generation
from semgrad_guard.engine.answers.options import GenerationOptions
from semgrad_guard.engine.answers.writing import Piece
from semgrad_guard.engine.interruption import Ticket
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.engine.prompts.forms import known_form
from semgrad_guard.errors import InputError, ModelNotFoundError
from semgrad_guard.estimators import Estimator, HybridGrad
from semgrad_guard.guard.answering import Answerer, answer_steps
from semgrad_guard.guard.decision import unscored
from semgrad_guard.guard.flow import Draft
from semgrad_guard.guard.guard import as_estimator, estimator_of
from semgrad_guard.guard.policy import Policy, Terms, judged_by
from semgrad_guard.guard.steps import StreamSteps
from semgrad_guard.named import folder_of, reading_prompt
from semgrad_guard.records import Conversation, Verdict
from semgrad_guard.settings import (
    AnswerOptions,
    JudgedBy,
    LoadingOptions,
    ModelName,
    OnDoubt,
    Thinking,
    template_options_of,
)
from semgrad_guard.settings import Timeout as Timeout

A = TypeVar("A")
"""A frontend's object for an answer."""
_LOADING = ("revision", "dtype", "device_map", "quantization_config", "attn_implementation", "template_options")
DECODING = frozenset(declared_options(AnswerOptions))
"""The names of the options of writing an answer."""

_shared: weakref.WeakValueDictionary[str, LanguageModel] = weakref.WeakValueDictionary()
_lock = threading.Lock()


@dataclass(frozen=True)
class Weights:
    """A loaded model, and the key of the fields that it was loaded for. Copies of its holder share it."""

    model: LanguageModel
    key: str
    is_named: bool

    @classmethod
    def named(cls, settings: dict[str, Any]) -> Self:
        """Those for these arguments of `LanguageModel.from_pretrained`, loaded once as long as they are in use."""
        key = _key_of(settings)
        with _lock:
            if (found := _shared.get(key)) is None:
                found = _shared[key] = LanguageModel.from_pretrained(**settings)
        return cls(found, key, is_named=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """None: the fields of its holder name it, and another process loads it anew.

        Raises:
            InputError: it was loaded elsewhere, so that they do not.
        """
        if not self.is_named:
            raise InputError(
                "A model that was loaded beforehand cannot be pickled: weights are named, not carried. Name it instead "
                "(model=..., a folder or a hub id), and it is loaded where it is unpickled; or build it anew there "
                "with from_model."
            )
        return type(None), ()


class LocalModelFields(BaseModel, ModelName, AnswerOptions):  # pyright: ignore[reportGeneralTypeIssues] - pydantic makes its own fields of theirs
    """The fields of a framework's class for a local model: those of `AnswerOptions`, and for loading.

    None is the default of `max_tokens` and `stop`. The `stop` strings of a call replace those of the field.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())

    revision: str | None = None
    dtype: Any = None
    """As in transformers ("bfloat16", torch.float32); default: the checkpoint's own, float32 for the pocket model."""
    device_map: Any = None
    quantization_config: Any = None
    """As in transformers: the weights are quantized while they are loaded."""
    attn_implementation: str | None = None
    template_options: Mapping[str, Any] | None = None
    """Given to the chat template with every prompt."""
    thinking: Thinking = LoadingOptions.thinking
    """Whether the model reasons before its answers, where its chat template has a switch for that."""

    estimator: Annotated[Estimator, SkipValidation, BeforeValidator(as_estimator)] = Field(
        default_factory=HybridGrad, exclude=True
    )
    """An estimator, or its name. Default: that of the router's calibration, or HybridGrad."""
    prompt_template: str = "chat"
    """A name for the form of the prompts; a calibration for another form is refused."""
    by: JudgedBy | None = None
    """"sentence": every sentence has a score of its own, and a guard delivers those that it lets through. Default: as
    the router's calibration, or "answer"."""
    on_doubt: OnDoubt | None = None
    """By sentence: "stop" (the default) ends the answer before a doubtful one, "drop" leaves it out."""

    _weights: Weights | None = PrivateAttr(default=None)

    def __init__(self, **fields: Any) -> None:
        known = type(self).model_fields
        aliases = [field.alias for field in known.values() if field.alias is not None]
        require_known(type(self).__name__, fields, [*known, *aliases])
        with naming_faults():
            super().__init__(**fields)
        _ = self.by_sentence
        self._writing({})

    @classmethod
    def from_model(cls, language_model: LanguageModel, /, **fields: Any) -> Self:
        """A model for weights that are loaded already; `fields` are the constructor's, except those for loading.

        Raises:
            InputError: a field for loading, or no LanguageModel.
        """
        if not isinstance(cast("object", language_model), LanguageModel):
            raise InputError(f"from_model takes a LanguageModel that is loaded, not {language_model!r:.60}")
        if loading := sorted({"model", "thinking", *_LOADING} & set(fields)):
            raise InputError(f"the model is loaded already: set {', '.join(loading)} on the LanguageModel instead")
        made = cls(model=language_model.name, revision=language_model.revision, **fields)
        made._weights = Weights(language_model, _key_of(_loading(made)), is_named=False)
        return made

    @field_validator("max_tokens", "stop", mode="before")
    @classmethod
    def _default(cls, value: Any, info: ValidationInfo) -> Any:
        return getattr(AnswerOptions, str(info.field_name)) if value is None else value

    @property
    def language_model(self) -> LanguageModel:
        """The model itself, loaded now if it was not."""
        loading = _loading(self)
        if self._weights is None or self._weights.key != _key_of(loading):
            self._weights = Weights.named(loading)
        return self._weights.model

    @property
    def by_sentence(self) -> OnDoubt | None:
        """The action at a doubtful sentence; None: whole answers have a score."""
        return judged_by(None, self.by, self.on_doubt)

    def _writing(self, call: Mapping[str, Any], *, also: frozenset[str] = frozenset()) -> GenerationOptions:
        """How to write one answer: the fields, replaced by the call's own options; `also` are further names of these.

        A `max_tokens` of None means `GenerationOptions`' own limit.

        Raises:
            InputError: the call has an unknown option, or a value is out of range.
        """
        require_known(f"a call of {type(self).__name__}", call, DECODING | also)
        chosen = {name: call.get(name, getattr(self, name)) for name in DECODING}
        longest, stop = chosen.pop("max_tokens"), chosen.pop("stop")
        limits: dict[str, Any] = {} if longest is None else {"max_tokens": longest}
        return GenerationOptions(**limits, **chosen, stop=() if stop is None else stop)

    def _answerer(self, options: GenerationOptions, policy: Policy | None = None) -> Answerer:
        """Answers by these options; where no estimator was chosen, scores are as in the policy's calibration."""
        calibration = None if policy is None or "estimator" in self.model_fields_set else policy.calibration
        estimator = self.estimator if calibration is None else estimator_of(calibration)
        by_sentence = judged_by(calibration, self.by, self.on_doubt)
        return Answerer(self.language_model, estimator, options, self.prompt_template, by_sentence=by_sentence)

    def _assessed(self, evidence: Evidence, policy: Policy | None) -> Verdict:
        """The undecided verdict on a text of any author, as an answer by these fields."""
        return self._answerer(self._writing({}), policy).assessed(evidence, evidence.text)

    def _answering(
        self,
        shown: Callable[[], Conversation],
        form: AnswerForm,
        writing: GenerationOptions,
        drafted: Callable[[Draft[Generation], Estimator], Draft[A]],
        *,
        terms: Terms | None,
        policy: Policy | None,
        is_live: bool,
        is_scored: bool = True,
    ) -> StreamSteps[Piece, Draft[A]]:
        """The steps of an answer: read, written and scored in the model's thread, and there made the frontend's draft.

        Its pieces come where they are wanted (`is_live`) and may leave before the decision.
        """
        is_live = is_live and (terms is None or not terms.withholds or terms.delivers_early)

        def submit(on_piece: Callable[[Piece], None]) -> Ticket[Draft[A]]:
            answerer = self._answerer(replace(writing, grammar=form.grammar(self.language_model)), policy)
            request = answerer.request(
                shown(),
                on_piece=on_piece if is_live else None,
                template_options=form.template_options,
                terms=terms,
                structure=form.structure if is_scored else None,
            )
            if not is_scored:
                request = replace(request, finish=_unscored)
            return self.language_model.submit(request.then(lambda draft: drafted(draft, answerer.estimator)))

        return answer_steps(submit)

    @property
    def reading_prompt(self) -> str:
        """A prompt for answering from a passage that this model reads well, with {context} and {question} in it."""
        return reading_prompt(self.model)


def _unscored(found: list[Generation]) -> Draft[Generation]:
    verdict = unscored(found[0].text, reason="a helper's answer has no score")
    return Draft(verdict, found[0], found[0].prompt.form)


def _loading(fields: Any) -> dict[str, Any]:
    given = {name: getattr(fields, name) for name in _LOADING}
    given["template_options"] = template_options_of(given["template_options"], fields.thinking) or None
    return {"name_or_path": fields.model, **given}


def _key_of(settings: dict[str, Any]) -> str:
    return repr(sorted(settings.items()))


def read_json(name_or_path: str, file: str, revision: str | None) -> dict[str, Any] | None:
    """A file of a model; None where it is not on this disk."""
    text = _read(name_or_path, file, revision)
    return None if text is None else json.loads(text)


def template_calls_tools(name_or_path: str, revision: str | None, options: Mapping[str, Any] | None) -> bool | None:
    """Whether a model's chat template writes calls of tools in a form that can be read; None where it is not here."""
    if read_json(name_or_path, "config.json", revision) is None:
        return None
    tokenizer = read_json(name_or_path, "tokenizer_config.json", revision) or {}
    apart = _read(name_or_path, "chat_template.jinja", revision)
    template = (options or {}).get("chat_template") or apart or tokenizer.get("chat_template") or ""
    if isinstance(template, list):  # several named ones
        template = "\n".join(named["template"] for named in cast("list[dict[str, str]]", template))
    return known_form(template) is not None or ("tools" in template and bool(tokenizer.get("response_template")))


def _read(name_or_path: str, file: str, revision: str | None) -> str | None:
    try:
        folder = folder_of(name_or_path) or Path(name_or_path)
    except ModelNotFoundError:
        return None
    if folder.is_dir():
        path = folder / file
        return path.read_text() if path.is_file() else None
    if name_or_path.count("/") > 1 or name_or_path.startswith((".", "/", "~")):
        return None
    cached = try_to_load_from_cache(name_or_path, file, revision=revision)
    return Path(cached).read_text() if isinstance(cached, str) else None
