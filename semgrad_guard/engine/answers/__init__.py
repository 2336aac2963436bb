"""Answers: how they are written, alone or together, and what is known of each."""
