"""Torch and transformers live here: loading, generating, and the gradient scores of answers."""
