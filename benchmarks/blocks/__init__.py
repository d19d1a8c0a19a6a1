"""The contenders of `blocks_sync.py` and `blocks_slow_link.py`, and how a rank measures itself.

model.py       10 M parameters in about 150 tensors, with gradients that need no computing
recurrence.py  block momentum as fairseq has it: one all-reduce for each tensor
ours.py        manyhands' ways to synchronise, the only file that knows their arguments
contenders.py  all of them under their names
syncing.py     a rank that synchronises when it is asked to
stepping.py    a rank that trains on a slow line
"""
