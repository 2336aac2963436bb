"""From a replay to numbers: the output head, gradients, segments, and the check that they are exact."""
