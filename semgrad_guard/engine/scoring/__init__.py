"""From a replay to numbers: the output head, gradients, and the check that they are exact."""
