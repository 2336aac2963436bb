"""Torch and transformers live here: loading, generating, and the gradient scores of what was generated."""
