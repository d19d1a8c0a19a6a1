"""Programs that inspect a training job. No other package imports this package.

check/    compares training on several ranks with training in a single process
plan/     memory, communication and checkpoint size of each sharding
record/   the run log: a line per step
report/   an HTML page with figures of recorded runs
cli/      the program `manyhands`

_interpreters.py  Python processes that fork ranks for a check
"""
