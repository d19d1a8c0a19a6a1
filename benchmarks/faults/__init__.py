"""A crew whose workers are killed and stopped while it trains, for `blocks_faults.py`.

worker.py  what each worker runs: an ordinary training script that keeps a log
harm.py    starts a run with `manyhands run`, and harms it at set times
strangers.py, link.py    processes that are no members, and a line between two hosts that can be cut
tally.py   the figures of a run, from its log and the list of its faults
page.py    the table, the verdicts and the page
"""
