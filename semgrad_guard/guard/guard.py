"""`Guard`: where model, estimator and policy meet. Every answer gets a verdict, and the flow carries it out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, cast

from semgrad_guard.calibration import Binding, Calibration
from semgrad_guard.decision_log.entries import Feedback
from semgrad_guard.engine.answers.answer import Generation
from semgrad_guard.engine.answers.options import GenerationOptions, knows_its_options
from semgrad_guard.engine.answers.writing import Piece
from semgrad_guard.engine.language_model import LanguageModel
from semgrad_guard.errors import CalibrationError, InputError
from semgrad_guard.estimators import KIND_OF, Estimator, HybridGrad
from semgrad_guard.estimators.learned import FusedStates
from semgrad_guard.estimators.own_tokens import ReplayEstimator
from semgrad_guard.guard.answering import Answerer
from semgrad_guard.guard.flow import Outcome, Reply, SentencePiece, TargetReply, answers, one, streamed
from semgrad_guard.guard.policy import Policy, Promise, combined_promise, judged_by
from semgrad_guard.guard.question import Router
from semgrad_guard.guard.steps import Steps, StreamSteps, Work, adrive, arun_stream, drive, run_stream, sealing
from semgrad_guard.named import did_you_mean
from semgrad_guard.records import Conversation, SentenceVerdict, Verdict
from semgrad_guard.settings import JudgedBy, OnDoubt

Answer = str | Verdict
Target = Callable[[Conversation], Answer | Awaitable[Answer]]
"""Answers escalated conversations: another guard, a function or a coroutine function."""
Tools = Sequence[Mapping[str, Any]]
"""Descriptions of tools, as chat templates take them (OpenAI's form)."""

_Reply = TargetReply[Generation]


@knows_its_options
class Guard:
    """Answers, scores and decides: `Guard(model, policy)(conversation) -> Verdict`.

    Args:
        model: the language model that answers.
        router: a policy (which scores to let through), or a `Router` that adds how decisions are carried out: the
            target, the mode, the words of an abstention, deadlines, a log. Every answer's own record is checked against
            a calibrated policy's binding. A target gets the original conversation. Another `Guard` scores and decides
            for itself: its calibration must have been made on the questions that this one did not let through. The
            answers of any other callable are unscored and outside the promise.
        estimator: an object or a name; by default the one that the policy was calibrated with, or else HybridGrad.
        by: "sentence" scores every sentence, given everything before it, and delivers those that are let through
            (`verdict.sentences`); "answer" judges the whole. Default: as the policy was calibrated, or the whole.
        on_doubt: at a doubtful sentence "stop" (the default without a calibration) ends the answer before it, "drop"
            leaves it out with those that lean on it.
        prompt_template: a name for the form of the prompts; a calibration for another form is refused.
        options: how to generate; greedy by default.

    Raises:
        BindingMismatchError: at the first answer, if the policy was calibrated for something else.
        LowConfidenceError: at an answer, in mode "raise".
        DeadlineExceededError: at an answer that takes longer than the router's `timeout`, where `on_error` is "raise".
    """

    def __init__(
        self,
        model: LanguageModel,
        router: Router | Policy,
        *,
        estimator: Estimator | str | None = None,
        by: JudgedBy | None = None,
        on_doubt: OnDoubt | None = None,
        prompt_template: str = "chat",
        options: GenerationOptions | None = None,
    ) -> None:
        router = router if isinstance(router, Router) else Router(router)
        if router.escalate_to is not None and not callable(router.escalate_to):
            given = type(router.escalate_to).__name__
            raise InputError(f"escalate_to must be a Guard or a function of the conversation, not a {given}")
        self.terms = router.terms
        self._answerer = Answerer(
            model,
            estimator_of(self.policy.calibration) if estimator is None else as_estimator(estimator),
            options=options or GenerationOptions(),
            prompt_template=prompt_template,
            by_sentence=judged_by(self.policy.calibration, by, on_doubt),
        )
        self.escalate_to = router.escalate_to

    @property
    def model(self) -> LanguageModel:
        """The model that answers."""
        return self._answerer.model

    @property
    def estimator(self) -> Estimator:
        """The estimator that scores its answers."""
        return self._answerer.estimator

    @property
    def policy(self) -> Policy:
        """Which scores are let through."""
        return self.terms.policy

    @property
    def promise(self) -> Promise | None:
        """The promise for all answers that this guard and its targets deliver, or for the promised ones (`covers`).

        None where a stage is uncalibrated or unscored, or found no threshold.
        """
        stages: list[Guard] = []
        target: Any = self
        while isinstance(target, Guard):
            stages.append(target)
            target = target.escalate_to
        if target is not None:
            return None
        enforced = all(stage.terms.withholds for stage in stages)
        return combined_promise([stage.policy for stage in stages], enforced=enforced)

    @property
    def binding(self) -> Binding:
        """The binding for a calibration of this guard (pass it to `calibrate`, with a grader)."""
        return self._answerer.binding().model_copy(update={"on_cut": self.terms.policy.on_cut})

    def __call__(self, conversation: Conversation, *, tools: Tools | None = None) -> Verdict:
        """Answer one conversation and decide. The model's calls of `tools` are in `verdict.tool_calls`."""
        return self.batch([conversation], tools=tools)[0]

    async def acall(self, conversation: Conversation, *, tools: Tools | None = None) -> Verdict:
        """Like a call, without blocking the event loop; cancelling the task stops the model."""
        return (await self.abatch([conversation], tools=tools))[0]

    def batch(self, conversations: Sequence[Conversation], *, tools: Tools | None = None) -> list[Verdict]:
        """Answer several conversations at once, next to other callers, then escalate those that need it together.

        Raises:
            Exception: the first in an answer's place, after all conversations have been answered.
        """
        return [one([outcome]).verdict for outcome in drive(sealing(self._answers(conversations, tools)))]

    async def abatch(self, conversations: Sequence[Conversation], *, tools: Tools | None = None) -> list[Verdict]:
        """Like `batch`, without blocking the event loop."""
        return [one([outcome]).verdict for outcome in await adrive(sealing(self._answers(conversations, tools)))]

    def stream(self, conversation: Conversation, *, tools: Tools | None = None) -> GuardedStream:
        """Answer piece by piece, the verdict at the end.

        Where the answer may be withheld, it comes in one piece; by="sentence" in sentences, as they are let through.
        """
        return GuardedStream(self._streamed(conversation, tools))

    def astream(self, conversation: Conversation, *, tools: Tools | None = None) -> AsyncGuardedStream:
        """Like `stream`, without blocking the event loop."""
        return AsyncGuardedStream(self._streamed(conversation, tools))

    def drafts(self, conversations: Sequence[Conversation], *, tools: Tools | None = None) -> list[Verdict]:
        """Answers with their scores and without a decision, for a calibration to grade."""
        drafts = self._answerer.drafting(conversations, template_options=_template_options(tools)).call()
        return [draft.verdict for draft in drafts]

    def feedback(self, decision_id: str, correct: bool, *, grader: str | None = None) -> Feedback:
        """Tell the decision log whether a delivered answer (`verdict.decision_id`) was correct.

        Only grades of answers that the log has drawn (`semgrad-guard sample`) count for the promise, of each the first.

        Args:
            decision_id: the answer's decision.
            correct: whether it was correct.
            grader: the name of the person or the program that graded it.

        Raises:
            InputError: the guard has no log, or the log no such decision.
            DecisionLogError: the feedback cannot be written.
        """
        log: Any = self.terms.log
        if not hasattr(log, "feedback"):
            raise InputError(
                "feedback goes into the decision log, and this guard has none: Router(policy, log=DecisionLog(path))"
            )
        made = self.policy.calibration
        return log.feedback(decision_id, right=correct, grader=grader, current=() if made is None else (made.id,))

    def _answers(
        self, conversations: Sequence[Conversation], tools: Tools | None
    ) -> Steps[list[Outcome[Generation] | Exception]]:
        draft = self._answerer.drafting(conversations, template_options=_template_options(tools))
        return answers(
            self.terms, draft, lambda places: self._asking(places, conversations, tools), count=len(conversations)
        )

    def _streamed(self, conversation: Conversation, tools: Tools | None) -> StreamSteps[Any, None]:
        live = self._answerer.live(conversation, terms=self.terms, template_options=_template_options(tools))
        return streamed(self.terms, live, lambda places: self._asking(places, [conversation], tools))

    def _asking(self, places: Sequence[int], conversations: Sequence[Conversation], tools: Tools | None) -> Work:
        """The work of the target on these conversations."""
        target: Any = self.escalate_to
        escalated = [conversations[place] for place in places]
        if isinstance(target, Guard):

            def replies() -> Steps[list[_Reply]]:
                outcomes = yield from target._answers(escalated, tools)
                return [outcome if isinstance(outcome, Exception) else Reply(outcome.verdict) for outcome in outcomes]

            return Work.of(replies)
        work = [Work.calling(target, conversation, instead="acall, abatch or astream") for conversation in escalated]

        def call() -> list[_Reply]:
            return [_replied(calling.call) for calling in work]

        async def coroutine() -> list[_Reply]:
            tasks = [asyncio.ensure_future(calling.begin()) for calling in work]
            await asyncio.gather(*tasks, return_exceptions=True)
            return [_replied(task.result) for task in tasks]

        return Work(call, coroutine)


class _Stream:
    """The text and the sentences that a stream has shown, and its verdict once it has ended."""

    def __init__(self) -> None:
        self._text, self._whole = "", cast("Verdict | None", None)
        self._sentences: tuple[SentenceVerdict, ...] = ()

    @property
    def sentences(self) -> tuple[SentenceVerdict, ...]:
        """The verdicts on the sentences that were handed out; once the answer has ended, on all of them."""
        return self._sentences

    def _shown(self, step: Piece | SentencePiece | Outcome[Generation]) -> str:
        """The text to show for a step; of an outcome, the text that has not been shown."""
        if isinstance(step, SentencePiece):
            self._sentences += (step.sentence,)
            step = step.text
        if isinstance(step, Outcome):
            self._whole, self._sentences = step.verdict, step.verdict.sentences
            return step.verdict.text.removeprefix(self._text) if step.verdict.text.startswith(self._text) else ""
        if isinstance(step, str):
            self._text += step
            return step
        return ""

    def _verdict(self) -> Verdict:
        if self._whole is None:
            raise InputError(
                "the stream was closed before its answer was complete; there is no verdict on a part of it"
            )
        return self._whole


class GuardedStream(_Stream, Iterator[str]):
    """Pieces of a guarded answer; joined, they are `verdict.text`. Closing it early stops the model."""

    def __init__(self, steps: StreamSteps[Any, None]) -> None:
        super().__init__()
        self._steps = run_stream(steps)

    def __next__(self) -> str:
        for step in self._steps:
            if text := self._shown(step):
                return text
        raise StopIteration

    @property
    def verdict(self) -> Verdict:
        """The verdict on the whole answer. Consumes what is left of the stream.

        Raises:
            InputError: the stream was closed before its end.
        """
        for _ in self:
            pass
        return self._verdict()

    def close(self) -> None:
        """Stop the model; harmless at any time."""
        self._steps.close()


class AsyncGuardedStream(_Stream, AsyncIterator[str]):
    """Like `GuardedStream`, on the event loop: `async for`, then `await stream.verdict()`."""

    def __init__(self, steps: StreamSteps[Any, None]) -> None:
        super().__init__()
        self._steps = arun_stream(steps)

    async def __anext__(self) -> str:
        async for step in self._steps:
            if text := self._shown(step):
                return text
        raise StopAsyncIteration

    async def verdict(self) -> Verdict:
        """As `GuardedStream.verdict`."""
        async for _ in self:
            pass
        return self._verdict()

    async def aclose(self) -> None:
        """Stop the model; harmless at any time."""
        await self._steps.aclose()


def _template_options(tools: Tools | None) -> Mapping[str, Any] | None:
    return {"tools": list(tools)} if tools else None


def _replied(ask: Callable[[], Any]) -> _Reply:
    try:
        answer = ask()
    except Exception as error:  # noqa: BLE001 - the target's; `on_error` decides
        return error
    if isinstance(answer, str | Verdict):
        return Reply(answer)
    return InputError(f"the escalation target returned a {type(answer).__name__}; it must return a text or a Verdict")


# The estimators of guards.


def estimator_of(calibration: Calibration | None) -> Estimator:
    """The estimator that a calibration was made for, fitted weights and settings included; HybridGrad without one.

    Raises:
        CalibrationError: the calibration names an estimator that is not known here, or one whose settings (a model of
            its own, say) cannot be read back from the file.
    """
    if calibration is None or calibration.binding is None:
        return HybridGrad()
    name, settings = calibration.binding.estimator, calibration.binding.settings or {}
    if name not in KIND_OF:
        raise CalibrationError(
            f"The calibration was made for the estimator {name!r}, which is not known here. Known are "
            f"{', '.join(KIND_OF)}. Pass the estimator itself, or calibrate again."
        )
    kind: Any = KIND_OF[name]
    given: dict[str, Any] = {
        field.name: tuple(value) if isinstance(value := settings[field.name], list) else value
        for field in fields(kind)
        if field.name in settings
    }
    if issubclass(kind, FusedStates):
        if calibration.choice is None or calibration.choice.weights is None:
            raise CalibrationError(f"The calibration was made for {kind.title} and holds no weights. Calibrate again.")
        given["weights"] = calibration.choice.weights
    found: Estimator = kind(**given) if issubclass(kind, ReplayEstimator | FusedStates) else kind()
    own = found.settings()
    if own != {key: settings.get(key, value) for key, value in own.items()}:
        raise CalibrationError(
            f"The calibration was made for {name} with settings that cannot be made again from the file alone. "
            "Pass the estimator itself."
        )
    return found


def as_estimator(given: Estimator | str) -> Estimator:
    """An estimator as it is, or by its name.

    Raises:
        InputError: there is none of that name, it is none, it is a class, or it needs to be fitted first.
    """
    if isinstance(given, type):
        raise InputError(f"{given.__name__} is a class: pass an object, {given.__name__}(), or its name")
    if isinstance(given, str):
        given = named_estimator(given)
    if not callable(given) or not hasattr(given, "objective"):
        raise InputError(f"{given!r:.60} is no estimator; give one's name, or an object such as HybridGrad()")
    if isinstance(given, FusedStates) and given.weights is None:
        raise InputError(
            f"{given.title} learns from graded answers first: calibrate with estimator={given.name!r}, and give a "
            "policy with that calibration"
        )
    return given


def named_estimator(name: str) -> Estimator:
    """The estimator of that name, with its default settings.

    Raises:
        InputError: there is none.
    """
    if name not in KIND_OF:
        raise InputError(
            f"{name!r} is no estimator; there are {', '.join(KIND_OF)}.{did_you_mean(name, tuple(KIND_OF))}"
        ).about("estimator")
    return KIND_OF[name]()
