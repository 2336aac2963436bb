"""From graded answers to a calibration: graded and bound, with an estimator that may be chosen or fitted first."""
