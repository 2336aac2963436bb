"""`assess`: the score of an answer, and everything that it is bound to, before anything is decided about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Any

from semgrad_guard.engine.generation.generation import Evidence
from semgrad_guard.engine.generation.options import GenerationOptions
from semgrad_guard.engine.generation.sentence_scoring import EndedSentences
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.engine.replay.batch import OUT_OF_MEMORY, give_back_memory, is_out_of_memory
from semgrad_guard.estimators import Estimator
from semgrad_guard.guard.sentences import WITH_CALLS, scored_as_they_end, scored_sentences
from semgrad_guard.guard.verdicts import RecordedScore, current_recorder
from semgrad_guard.records import Score, SentenceVerdict, Status, ToolCall, Verdict, digest_of
from semgrad_guard.settings import OnDoubt


def assess(
    model: LanguageModel,
    estimator: Estimator,
    evidence: Evidence,
    *,
    text: str,
    options: GenerationOptions | None = None,
    prompt_template: str = "chat",
    template_options: Mapping[str, Any] | None = None,
    tool_calls: Sequence[ToolCall] = (),
    served: bool = False,
    by_sentence: OnDoubt | None = None,
    known: Verdict | None = None,
    ended: EndedSentences | None = None,
) -> Verdict:
    """Score an answer: an undecided verdict, for `decide` to judge.

    `options` and `template_options` (tools, for example) are those the answer was made with: calibrations are bound to
    them. `served`: another server's model wrote it. `by_sentence`: every sentence has a score of its own, and the
    answer that of its most doubtful one; `known` is the verdict on a beginning that was scored while the answer was
    written, `ended` are the sentences that have ended in one that still is.
    """
    recorder, options = current_recorder(), options or GenerationOptions()
    with model.turn:  # the score and the identity with it are of one state of the model
        # A score with gradients frees the states that the others and the thought are read off.
        thought = {} if ended else _thought(evidence)
        others = {
            other.name: (
                _by_sentence(model, other, evidence, tool_calls)[1] if by_sentence else _score(other, evidence),
                scoring_settings(model, other, options, served=served, by_sentence=by_sentence),
            )
            for other in (() if recorder is None else recorder.estimators)
        }
        sentences, score = (), None
        if by_sentence:
            sentences, score = (
                scored_as_they_end(partial(_score, estimator), ended, known)
                if ended
                else _by_sentence(model, estimator, evidence, tool_calls, known)
            )
        score, identity = score or _score(estimator, evidence), model.identity
        settings = scoring_settings(model, estimator, options, served=served, by_sentence=by_sentence)
        template = template_name(model, prompt_template, template_options)
    token = evidence.prompt.semantic_token
    status: Status = "scored" if score.uncertainty is not None else "failed" if evidence.response_ids else "unscored"
    verdict = Verdict(
        status=status,
        action="answer",
        text=text,
        tool_calls=tuple(tool_calls),
        estimator=estimator.name,
        uncertainty=score.uncertainty,
        model=identity.name,
        revision=identity.revision,
        fingerprint=identity.fingerprint,
        settings=settings,
        prompt_template=template,
        prompt=digest_of(evidence.prompt.text),
        semantic_token=token.offset,
        semantic_token_source=token.source,
        cut=evidence.cut,
        reason=score.reason,
        sentences=sentences,
        **thought,
        **(score.details or {}),
    )
    if recorder is not None:
        recorder.note(
            verdict,
            {
                name: RecordedScore(
                    uncertainty=one.uncertainty,
                    settings=bound,
                    features=None if one.features is None else dict(one.features),
                )
                for name, (one, bound) in others.items()
            },
        )
    return verdict


def _by_sentence(
    model: LanguageModel,
    estimator: Estimator,
    evidence: Evidence,
    tool_calls: Sequence[ToolCall],
    known: Verdict | None = None,
) -> tuple[tuple[SentenceVerdict, ...], Score]:
    if tool_calls:
        return (), Score(None, WITH_CALLS)
    return scored_sentences(model, partial(_score, estimator), evidence, known)


def _thought(evidence: Evidence) -> dict[str, Any]:
    """A verdict's fields about the thought before its answer."""
    if evidence.reasoning is None or not evidence.reasoning.text:
        return {}
    try:
        seen = evidence.thought()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        give_back_memory()
        seen = None
    begin, end = evidence.reasoning.span
    fields: dict[str, Any] = {"reasoning": evidence.reasoning.text, "reasoning_tokens": end - begin or None}
    if seen is not None and seen.entropies:
        fields |= {"reasoning_entropy": seen.mean_entropy, "reasoning_peak": max(seen.entropies)}
    return fields


def _score(estimator: Estimator, evidence: Evidence) -> Score:
    """The estimator's score; none, with the reason, where memory runs out even for this answer by itself."""
    for tried in (lambda: evidence, evidence.alone):
        try:
            return estimator(tried())
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        give_back_memory()
    return Score(None, OUT_OF_MEMORY)


def scoring_settings(
    model: LanguageModel,
    estimator: Estimator,
    options: GenerationOptions,
    *,
    served: bool = False,
    by_sentence: OnDoubt | None = None,
) -> dict[str, Any]:
    """Everything but the weights that moves scores: the estimator's settings, the dtype, an own t* and the decoding."""
    decoding = {"temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k}
    sampled = {} if options.temperature == 0 else decoding
    grammar = {} if options.grammar is None else {"grammar": sha256(options.grammar.encode()).hexdigest()[:12]}
    elsewhere = {"served": True} if served else {}
    unit = {} if by_sentence is None else {"by": "sentence", "on_doubt": by_sentence}
    if by_sentence is not None and estimator.objective.gradients:
        unit["earlier"] = estimator.objective.earlier
    thoughts = {} if options.max_thinking_tokens is None else {"max_thinking_tokens": options.max_thinking_tokens}
    return {
        **estimator.settings(),
        "dtype": model.identity.dtype,
        **model.departures,
        **sampled,
        **grammar,
        **thoughts,
        **elsewhere,
        **unit,
    }


def template_name(model: LanguageModel, name: str, template_options: Mapping[str, Any] | None = None) -> str:
    """A prompt form's full name: the caller's name for it, and the fingerprint of the chat template and its options."""
    return f"{name}@{model.template_fingerprint(template_options) if template_options else model.identity.template}"
