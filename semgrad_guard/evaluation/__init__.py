"""Evaluating: question files, graders, metrics, resumable runs and the risk-coverage picture.

Import what you need from the modules themselves; only `run` needs torch, and only `plots` needs matplotlib.
"""
