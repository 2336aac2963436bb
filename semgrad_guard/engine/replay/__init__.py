"""The upper layers again, with a gradient: from states captured while generating, on shared weights."""
