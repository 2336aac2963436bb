"""Model, estimator and policy together: what is delivered, and what the verdict records of it."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import langchain_semgrad_guard as langchain
import llama_index_semgrad_guard as llama_index
from semgrad_guard import (
    Calibration,
    DriftMonitor,
    GenerationOptions,
    Guard,
    HybridGrad,
    LanguageModel,
    Message,
    Policy,
    Router,
    SemGrad,
    Verdict,
    calibrate,
)
from semgrad_guard.decision_log.decision_log import DecisionLog
from semgrad_guard.engine.answers.options import Sampling
from semgrad_guard.errors import BindingMismatchError, InputError
from semgrad_guard.estimators import SemanticEntropy
from semgrad_guard.estimators.base import Estimator
from semgrad_guard.guard.decision import unscored
from tests.engine.chat_templates import template

from .routed import routed

Make = Callable[..., LanguageModel]
OPTIONS = GenerationOptions(max_tokens=4)
QUESTIONS = [f"question {i}" for i in range(6)]
ALL, NONE = Policy(threshold=1e9, on_cut="score"), Policy(threshold=-1.0, on_cut="score")


def guard(model: LanguageModel, policy: Policy, **changes: object) -> Guard:
    return routed(model, policy, estimator=HybridGrad(), options=OPTIONS, **changes)


def calibrated(
    base: Guard, *, upstream: str | None = None, alpha: float = 0.2, delta: float = 0.05, scale: float = 1.0
) -> Calibration:
    """A calibration bound to `base`, on the prompt "q" and made-up scores, of which the low ones are right."""
    scores = [scale * i / 300 for i in range(300)]
    binding = base.binding.model_copy(update={"grader": "exact", "upstream": upstream})
    right = [s < 0.7 * scale for s in scores]
    prompts = [base.model.render("q").form] * len(scores)
    return calibrate(scores, right, alpha=alpha, delta=delta, binding=binding, prompts=prompts)


def test_an_answer_let_through(language_model: LanguageModel) -> None:
    verdict = guard(language_model, ALL)("q")
    direct = language_model.generate("q", OPTIONS)
    assert verdict.action == "answer"
    assert verdict.status == "scored"
    assert verdict.text == direct.text
    assert verdict.uncertainty == direct.evidence.gradients().scores.hybridgrad
    assert verdict.details.calibration_id is None
    assert verdict.confidence is None
    assert not verdict.promised
    assert verdict.details.semantic_token == direct.prompt.semantic_token.offset


def test_an_abstention_keeps_score_and_draft(language_model: LanguageModel) -> None:
    answered, withheld = guard(language_model, ALL)("q"), guard(language_model, NONE, abstain_message="No idea.")("q")
    assert withheld.action == "abstain"
    assert withheld.text == "No idea."
    assert withheld.draft == answered.text
    assert withheld.uncertainty == answered.uncertainty
    assert "above the threshold" in withheld.reason


def test_a_batch_decides_row_by_row(language_model: LanguageModel) -> None:
    drafts = guard(language_model, ALL).drafts(QUESTIONS)
    middle = sorted(d.uncertainty for d in drafts)[len(drafts) // 2 - 1]
    verdicts = guard(
        language_model, Policy(threshold=middle, on_cut="score"), escalate_to=lambda c: f"looked up {c}"
    ).batch(QUESTIONS)
    assert {v.action for v in verdicts} == {"answer", "escalate"}
    for question, draft, verdict in zip(QUESTIONS, drafts, verdicts, strict=True):
        assert verdict.text == (draft.text if draft.uncertainty <= middle else f"looked up {question}")


def test_an_unscored_target_is_passed_on_outside_the_promise(language_model: LanguageModel) -> None:
    strict = calibrated(guard(language_model, ALL), scale=1e-9)
    policy = Policy.from_calibration(strict)
    chain = guard(language_model, policy, escalate_to=lambda _: "From a person.")
    verdict = chain("q")
    assert verdict.action == "escalate"
    assert verdict.text == "From a person."
    assert verdict.escalated.status == "unscored"
    assert not verdict.promised
    assert chain.promise is None


def test_a_scored_target_decides_for_itself(language_model: LanguageModel, make_language_model: Make) -> None:
    other = make_language_model(seed=9)
    sure = guard(language_model, NONE, escalate_to=guard(other, ALL))("q")
    assert (sure.action, sure.escalated.action) == ("escalate", "answer")
    assert sure.text == other.generate("q", OPTIONS).text
    notified = list[Any]()
    log = SimpleNamespace(write=lambda verdict, **_: notified.append(verdict))
    unsure = guard(language_model, NONE, escalate_to=guard(other, NONE), notify=notified.append, log=log)("q")
    assert (unsure.action, unsure.escalated.action) == ("escalate", "abstain")
    assert unsure.text == "I don't know."
    assert [(one.draft, one.escalated.draft) for one in notified] == [("", None), (None, None)]


def test_a_calibrated_guard_promises(language_model: LanguageModel) -> None:
    base = guard(language_model, ALL)
    calibration = calibrated(base)
    policy = Policy.from_calibration(calibration)
    chain = guard(language_model, policy)
    verdict = chain("q")
    assert verdict.details.calibration_id == calibration.id
    assert verdict.threshold == calibration.threshold
    assert 0 <= verdict.confidence <= 1
    assert verdict.details.familiar
    assert verdict.promised == (verdict.action == "answer")
    assert (chain.promise.alpha, chain.promise.delta) == (0.2, 0.05)


def test_two_calibrated_stages_share_the_promise(language_model: LanguageModel) -> None:
    base = guard(language_model, ALL)
    first = calibrated(base)
    reader = guard(language_model, ALL, prompt_template="reading")
    second = calibrated(reader, upstream=first.id, alpha=0.1)
    target = guard(language_model, Policy.from_calibration(second), prompt_template="reading")
    chain = guard(language_model, Policy.from_calibration(first), escalate_to=target)
    assert chain.promise.alpha == 0.2
    assert chain.promise.delta == pytest.approx(0.1)
    on_all_questions = Policy.from_calibration(calibrated(reader))
    chain, engine = langchain.UncertaintyRouterCallback, llama_index.UncertaintyRouterCallback
    chat = langchain.ChatSemGrad.from_model(language_model, router=chain(on_all_questions))
    llm = llama_index.SemGradLLM.from_model(language_model, router=engine(on_all_questions))
    own = guard(language_model, on_all_questions, prompt_template="reading")
    for router, target in ((Router, own), (chain, chat.bind(stop=["x"])), (engine, llm)):
        with pytest.raises(BindingMismatchError, match="harder than all questions"):
            router(Policy.from_calibration(first), target)


@pytest.mark.parametrize("what", ["model", "estimator", "settings", "template", "decoding"])
def test_a_calibration_for_something_else_is_refused(
    language_model: LanguageModel, make_language_model: Make, what: str
) -> None:
    policy = Policy.from_calibration(calibrated(guard(language_model, ALL)))
    changed = {
        "model": lambda: Guard(make_language_model(seed=5), policy, estimator=HybridGrad(), options=OPTIONS),
        "estimator": lambda: Guard(language_model, policy, estimator=SemGrad(), options=OPTIONS),
        "settings": lambda: Guard(language_model, policy, estimator=HybridGrad(tau=2.0), options=OPTIONS),
        "template": lambda: Guard(
            make_language_model(chat_template=language_model.tokenizer.chat_template.replace("assistant", "model")),
            policy,
            estimator=HybridGrad(),
            options=OPTIONS,
        ),
        "decoding": lambda: Guard(
            language_model, policy, estimator=HybridGrad(), options=GenerationOptions(max_tokens=4, temperature=0.5)
        ),
    }[what]()
    with pytest.raises(BindingMismatchError):
        changed("q")
    assert guard(language_model, policy)("q")


@pytest.mark.parametrize("where", ["nowhere", "generation config", "tokenizer"])
def test_answers_that_end_at_other_tokens_are_promised_nothing(
    language_model: LanguageModel, make_language_model: Make, where: str
) -> None:
    policy, other = Policy.from_calibration(calibrated(guard(language_model, ALL))), make_language_model()
    if where == "tokenizer":
        other.tokenizer.eos_token = other.tokenizer.convert_ids_to_tokens(7)
    elif where == "generation config":
        other._model.generation_config.eos_token_id = [7]
    with nullcontext() if where == "nowhere" else pytest.raises(BindingMismatchError, match="end_tokens"):
        assert guard(other, policy)("q").details.familiar


def test_a_name_for_the_prompts_binds_only_where_their_shape_is_not_known(language_model: LanguageModel) -> None:
    known = calibrated(guard(language_model, ALL))
    content = {name: value for name, value in known if name not in ("id", "schema_version", "shape")}
    old = Calibration.seal(**content)
    renamed = guard(language_model, Policy.from_calibration(known), prompt_template="rag")
    assert renamed("q").details.familiar
    assert not renamed([Message("system", "Be brief."), Message("user", "q")]).promised
    with pytest.raises(BindingMismatchError, match="prompt_template"):
        guard(language_model, Policy.from_calibration(old), prompt_template="rag")("q")


@pytest.mark.parametrize(
    ("on_unscored", "action"), [("abstain", "abstain"), ("answer", "answer"), ("escalate", "escalate")]
)
def test_an_answer_without_a_score_has_a_policy_of_its_own(
    make_language_model: Make, on_unscored: str, action: str
) -> None:
    model = make_language_model(seed=1)
    with torch.no_grad():
        model._model.model.norm.weight[:] = float("nan")
    policy = Policy(threshold=1e9, on_unscored=on_unscored)  # type: ignore[arg-type]
    verdict = guard(model, policy, escalate_to=lambda _: "elsewhere")("q")
    assert verdict.status == "failed"
    assert verdict.uncertainty is None
    assert verdict.action == action
    assert "not finite" in verdict.reason
    json.loads(verdict.model_dump_json())


def test_the_record_is_plain_json_and_hides_the_draft(language_model: LanguageModel) -> None:
    verdict = guard(language_model, NONE, escalate_to=guard(language_model, NONE))("q")
    record = verdict.metadata()
    assert json.loads(json.dumps(record)) == record
    assert record["schema"] == 2
    assert record["draft"] is None
    assert record["escalated"]["draft"] is None
    assert verdict.metadata(keep_draft=True)["draft"] == verdict.draft
    assert Verdict.model_validate_json(verdict.model_dump_json()) == verdict
    assert len(Verdict.model_fields) == len(record) == 18


def test_drift_shows_in_the_verdict(language_model: LanguageModel) -> None:
    base = guard(language_model, ALL)
    monitor = DriftMonitor(calibrated(base))
    watched = guard(language_model, Policy(threshold=1e9), monitor=monitor)
    verdicts = [watched("the same question") for _ in range(13)]
    assert verdicts[0].details.drift is False
    assert verdicts[-1].details.drift is True


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        *(({"policy": wrong}, "a guard needs a policy") for wrong in (None, "policy", 0.5, object())),
        ({"model": None}, "a guard needs a LanguageModel"),
        ({"model": "pocket"}, "not 'pocket'"),
        ({"model": object()}, "not a object"),
        ({"estimator": 3}, "is no estimator"),
        ({"options": {"max_tokens": 3}}, "options are GenerationOptions"),
        ({"prompt_template": 7}, "prompt_template is a name"),
        ({"by": "sentence", "on_doubt": "mark"}, "on_doubt must be one of 'stop', 'drop'"),
        ({"notify": "print"}, "notify must be a function"),
        ({"mode": "guess"}, "mode must be one of"),
        ({"on_error": "hope"}, "on_error must be one of"),
        ({"abstain_message": 7}, "abstain_message is a text"),
        ({"timeout": -1}, "timeout: -1.0 is out of range: it is above 0"),
        ({"monitor": 3}, "monitor must be a DriftMonitor"),
    ],
)
def test_what_is_of_another_kind_is_refused_at_once(
    language_model: LanguageModel, named: dict[str, Any], reason: str
) -> None:
    given = {"model": language_model, "policy": Policy(threshold=1.0), **named}
    with pytest.raises(InputError, match=reason):
        routed(given.pop("model"), given.pop("policy"), **given)


@pytest.mark.parametrize("given", [None, 3, "calibration.json"])
def test_policies_and_monitors_need_a_calibration(given: Any) -> None:
    with pytest.raises(InputError, match=r"Calibration\.load"):
        Policy.from_calibration(given)
    with pytest.raises(InputError, match=r"Calibration\.load"):
        DriftMonitor(given)


@pytest.mark.parametrize("held_by", ["the model", "a guard"])
def test_a_loaded_model_is_named_and_not_pickled(language_model: LanguageModel, held_by: str) -> None:
    holder = guard(language_model, ALL) if held_by == "a guard" else language_model
    with pytest.raises(InputError, match="Send its name and the policy"):
        pickle.dumps(holder)
    assert pickle.loads(pickle.dumps(ALL)) == ALL  # noqa: S301 - just written


def test_a_deep_copy_of_a_guard_shares_its_model(language_model: LanguageModel) -> None:
    base = guard(language_model, ALL)
    assert copy.deepcopy({"guard": base})["guard"](QUESTIONS[0]).text == base(QUESTIONS[0]).text
    assert copy.deepcopy(language_model) is language_model


def test_a_live_answer_shows_no_call_of_a_tool(make_language_model: Callable[..., LanguageModel]) -> None:
    call = '<tool_call>{"name": "paint", "arguments": {"colour": "red"}}</tool_call>'
    paint = {"type": "function", "function": {"name": "paint"}}
    model = make_language_model(chat_template=template("qwen2.5"), max_position_embeddings=8192)
    options = GenerationOptions(max_tokens=150, grammar=f"start: {json.dumps('Sure. ' + call)}")
    stream = routed(model, ALL, options=options, mode="annotate").stream("Paint it.", tools=[paint])
    assert "".join(stream) == "Sure."
    assert (stream.verdict.text, [one.name for one in stream.verdict.tool_calls]) == ("Sure.", ["paint"])


def test_a_router_goes_to_another_process_with_its_log_and_its_monitor(tmp_path: Path) -> None:
    """The log is opened there, and the monitor continues there."""
    calibration = calibrate([i / 99 for i in range(99)], [True] * 99, alpha=0.1, delta=0.1)
    with DecisionLog(tmp_path / "log.db") as log:
        monitor = DriftMonitor(calibration)
        monitor.add(0.5)
        router = Router(Policy.from_calibration(calibration), log=log, monitor=monitor)
        assert copy.deepcopy(router) is router
        other: Router = pickle.loads(pickle.dumps(router))  # noqa: S301 - our own
        assert other == router
        assert other.terms.log is not None
        assert other.terms.log.write(unscored("text", reason="none")) is not None
        assert log.flush()
        assert len(log.database.decisions()) == 1
        assert other.terms.monitor is not None
        assert other.terms.monitor.add(0.5).n == 2
        assert monitor.report().n == 1
        other.terms.log.close()  # type: ignore[attr-defined]


# An answer that there was no room to score is delivered by the policy for answers without a score.

ASKED = ["q", "another question", "why?"]


@contextmanager
def no_room(model: LanguageModel, when: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """A layer asks the allocator for more than there is, for some of the passes."""

    def hook(_: Any, args: tuple[torch.Tensor, ...]) -> None:
        if when(args[0]):
            torch.empty(1 << 52)

    handle = model._model.model.layers[3].register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def guard_of(model: LanguageModel, on_unscored: Any, estimator: Estimator | None = None) -> Guard:
    policy = Policy(threshold=1e308, on_unscored=on_unscored, on_cut="score")
    return Guard(model, Router(policy, lambda _: "elsewhere"), estimator=estimator, options=OPTIONS)


@pytest.mark.parametrize("way", ["batch", "abatch", "stream", "astream"])
@pytest.mark.parametrize("on_unscored", ["answer", "abstain", "escalate"])
def test_it_is_delivered_by_the_policy(on_unscored: str, way: str, language_model: LanguageModel) -> None:
    expected = [generation.text for generation in language_model.generate_batch(ASKED, OPTIONS)]
    guarded = guard_of(language_model, on_unscored)
    with no_room(language_model, lambda states: states.requires_grad):
        verdicts = verdicts_of(guarded, way)
    for verdict, text in zip(verdicts, expected, strict=True):
        assert verdict.text == {"answer": text, "abstain": "I don't know.", "escalate": "elsewhere"}[on_unscored]
        assert (verdict.action, verdict.status, verdict.uncertainty) == (on_unscored, "failed", None)
        assert "memory ran out" in str(verdict.reason)
        assert not verdict.promised
    assert [verdict.status for verdict in guarded.batch(ASKED)] == ["scored"] * 3


def verdicts_of(guarded: Guard, way: str) -> list[Any]:
    if way == "batch":
        return guarded.batch(ASKED)
    if way == "abatch":
        return asyncio.run(guarded.abatch(ASKED))
    if way == "stream":
        return [guarded.stream(question).verdict for question in ASKED]

    async def streamed() -> list[Any]:
        return [await guarded.astream(question).verdict() for question in ASKED]

    return asyncio.run(streamed())


def test_the_others_of_a_batch_have_their_scores(language_model: LanguageModel) -> None:
    guarded = guard_of(language_model, "answer")
    alone = [guarded(question).uncertainty for question in ASKED]
    with no_room(language_model, lambda states: states.requires_grad and len(states) > 1):
        verdicts = guarded.batch(ASKED)
    assert [verdict.uncertainty for verdict in verdicts] == pytest.approx(alone, rel=1e-9)


def test_methods_that_sample_are_tried_answer_by_answer_too(language_model: LanguageModel) -> None:
    estimator = SemanticEntropy(Sampling(count=3, max_tokens=4))
    guarded = guard_of(language_model, "answer", estimator)
    with no_room(language_model, lambda states: states.shape[0] > 3):  # the samples of one answer fit
        verdicts = guarded.batch(ASKED)
    assert [verdict.status for verdict in verdicts] == ["scored"] * 3
    with no_room(language_model, lambda states: states.shape[0] >= 3 and states.shape[1] == 1):
        verdict = guarded(ASKED[0])
    assert verdict.status == "failed"
    assert "memory ran out" in str(verdict.reason)
