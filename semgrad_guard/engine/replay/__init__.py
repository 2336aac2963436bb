"""The upper layers of a few positions once more, with a gradient, from what earlier passes left."""
