"""The contenders of `blocks_sync.py` and `blocks_slow_link.py`, and what they train.

model.py       10 M parameters in about 150 tensors, with gradients that need no computing
contenders.py  ways to synchronize, under their names
installed.py   those that are other libraries
syncing.py     a rank that synchronizes when it is asked to
learning.py    two tasks to learn, for the quality of training
short.py       ten short tasks, and the plain loop of 4 workers under many settings at once
"""
