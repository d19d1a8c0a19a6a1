"""A crew whose workers are killed and stopped while it trains, for `blocks_faults.py`.

worker.py  what each worker runs: an ordinary training script that keeps a log
harm.py    starts a run with `manyhands run`, and harms it at set times
strangers.py, link.py    who is no member, and a line between two hosts that can be cut
tally.py   what the log of a run and the list of its faults say, in numbers
page.py    the table, the verdicts and the page
"""
