"""Evaluating: from question files to the risk-coverage picture, a file or a folder for each step on the way.

A model answers `questions` in resumable `runs`, and `graders` judge the answers. The `graded` answers are measured by
`metrics` and presented in a `report`. `calibrating` makes a threshold of it, and `probe` chooses a prompt token. Import
what you need from the modules themselves; torch is imported only when a model runs, matplotlib only when a figure is
drawn.
"""
