"""Calibrating: thresholds that keep a promise, P(correct) and drift. Imports neither torch nor transformers."""

from semgrad_guard.calibration.binding import Binding as Binding
from semgrad_guard.calibration.binding import EstimatorChoice as EstimatorChoice
from semgrad_guard.calibration.calibrating import calibrate as calibrate
from semgrad_guard.calibration.calibrating import calibrate_runs as calibrate_runs
from semgrad_guard.calibration.calibrating import calibrate_sentences as calibrate_sentences
from semgrad_guard.calibration.calibration_record import Calibration as Calibration
from semgrad_guard.calibration.monitors import Drift as Drift
from semgrad_guard.calibration.monitors import DriftMonitor as DriftMonitor
from semgrad_guard.calibration.planning import HandGrades as HandGrades
from semgrad_guard.calibration.planning import Plan as Plan
from semgrad_guard.calibration.planning import plan as plan
from semgrad_guard.calibration.planning import rows_to_grade as rows_to_grade
from semgrad_guard.calibration.sentence_gates import AnswerSentences as AnswerSentences
