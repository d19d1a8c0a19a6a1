"""Programs that inspect a job. No other package imports this one.

check/    test whether a script trains the same on several ranks as on a single process
plan/     bytes that each sharding holds, sends and saves
record/   the run log: a line per step
report/   records as a page with figures
cli/      the program `manyhands`
"""
