"""Answers as they come: resumable runs of a model over questions, and the records they leave behind."""
