"""How the pocket model learns to read: a small network of a Llama's parts, trained alone and written into a Llama."""
