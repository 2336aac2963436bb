"""Evaluating: from question files to the risk-coverage picture, one folder for each step on the way.

`questions` are asked in resumable `runs`, and `graders` judge the answers. What was found (`graded`) is measured by
`metrics` and presented in a `report`. `calibrating` makes a threshold of it, and
`probing` chooses a prompt token. Import what you need from the modules themselves; torch is needed only where a model
is asked, matplotlib only where a figure is drawn.
"""
