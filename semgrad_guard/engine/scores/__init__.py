"""From a replay, or the ordinary call, to numbers."""
