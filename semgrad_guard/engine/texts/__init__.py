"""Models and measures that compare texts: entailment, similarity, shared words."""
