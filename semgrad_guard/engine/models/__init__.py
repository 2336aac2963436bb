"""Loading: checkpoints, the hub, and the layout of an architecture."""
