"""The guard: policies, verdicts, and the flow from a scored draft to what is delivered.

Names load at their first use: a `Policy` needs neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from semgrad_guard.lazy import lazy_names

if TYPE_CHECKING:
    from semgrad_guard.decision_log.entries import DecisionSink as DecisionSink
    from semgrad_guard.engine.answers.writing import Piece as Piece
    from semgrad_guard.engine.answers.writing import ThoughtPiece as ThoughtPiece
    from semgrad_guard.engine.interruption import Stop as Stop
    from semgrad_guard.engine.prompts.thoughts import HeldText as HeldText
    from semgrad_guard.guard.answering import Answerer as Answerer
    from semgrad_guard.guard.answering import require_by_sentence as require_by_sentence
    from semgrad_guard.guard.answering import template_name as template_name
    from semgrad_guard.guard.decision import binding_of as binding_of
    from semgrad_guard.guard.decision import decide as decide
    from semgrad_guard.guard.decision import escalated as escalated
    from semgrad_guard.guard.decision import external as external
    from semgrad_guard.guard.decision import is_withheld as is_withheld
    from semgrad_guard.guard.decision import settle as settle
    from semgrad_guard.guard.decision import undecided as undecided
    from semgrad_guard.guard.decision import unscored as unscored
    from semgrad_guard.guard.flow import Ask as Ask
    from semgrad_guard.guard.flow import Draft as Draft
    from semgrad_guard.guard.flow import EarlySentences as EarlySentences
    from semgrad_guard.guard.flow import Outcome as Outcome
    from semgrad_guard.guard.flow import Paused as Paused
    from semgrad_guard.guard.flow import Reply as Reply
    from semgrad_guard.guard.flow import SentencePiece as SentencePiece
    from semgrad_guard.guard.flow import TargetReply as TargetReply
    from semgrad_guard.guard.flow import answered as answered
    from semgrad_guard.guard.flow import answers as answers
    from semgrad_guard.guard.flow import one as one
    from semgrad_guard.guard.flow import streamed as streamed
    from semgrad_guard.guard.guard import Guard as Guard
    from semgrad_guard.guard.guard import as_estimator as as_estimator
    from semgrad_guard.guard.guard import estimator_of as estimator_of
    from semgrad_guard.guard.parts import Structure as Structure
    from semgrad_guard.guard.parts import calibrate_fields as calibrate_fields
    from semgrad_guard.guard.parts import judged as judged
    from semgrad_guard.guard.policy import Policy as Policy
    from semgrad_guard.guard.policy import Promise as Promise
    from semgrad_guard.guard.policy import Terms as Terms
    from semgrad_guard.guard.policy import combined_promise as combined_promise
    from semgrad_guard.guard.policy import judged_by as judged_by
    from semgrad_guard.guard.policy import require_listener as require_listener
    from semgrad_guard.guard.policy import require_policy as require_policy
    from semgrad_guard.guard.policy import split_delta as split_delta
    from semgrad_guard.guard.policy import withholds as withholds
    from semgrad_guard.guard.question import Question as Question
    from semgrad_guard.guard.question import Router as Router
    from semgrad_guard.guard.question import RouterOptions as RouterOptions
    from semgrad_guard.guard.question import asking as asking
    from semgrad_guard.guard.question import escalating as escalating
    from semgrad_guard.guard.question import is_escalating as is_escalating
    from semgrad_guard.guard.question import question_of as question_of
    from semgrad_guard.guard.question import recording as recording
    from semgrad_guard.guard.reported import ReportedScorer as ReportedScorer
    from semgrad_guard.guard.reported import ReportedSentences as ReportedSentences
    from semgrad_guard.guard.reported import prompt_of as prompt_of
    from semgrad_guard.guard.steps import Iterated as Iterated
    from semgrad_guard.guard.steps import Live as Live
    from semgrad_guard.guard.steps import Steps as Steps
    from semgrad_guard.guard.steps import StreamSteps as StreamSteps
    from semgrad_guard.guard.steps import Work as Work
    from semgrad_guard.guard.steps import adrive as adrive
    from semgrad_guard.guard.steps import ain_time as ain_time
    from semgrad_guard.guard.steps import arun_stream as arun_stream
    from semgrad_guard.guard.steps import awaited_all as awaited_all
    from semgrad_guard.guard.steps import cancelling as cancelling
    from semgrad_guard.guard.steps import drive as drive
    from semgrad_guard.guard.steps import off_loop as off_loop
    from semgrad_guard.guard.steps import read_off_loop as read_off_loop
    from semgrad_guard.guard.steps import run_stream as run_stream
    from semgrad_guard.guard.steps import sealing as sealing
    from semgrad_guard.settings import JudgedBy as JudgedBy
    from semgrad_guard.settings import Mode as Mode
    from semgrad_guard.settings import OnDoubt as OnDoubt
    from semgrad_guard.settings import OnUnscored as OnUnscored
    from semgrad_guard.settings import Timeout as Timeout
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
