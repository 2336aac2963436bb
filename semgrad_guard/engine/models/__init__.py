"""Loading: checkpoints, the hub, and what an architecture looks like."""
