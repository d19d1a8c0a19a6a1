"""Elastic membership: workers that join, leave, stall and die, and agree on every sync round.

In the order in which a worker meets them:

_launcher.py    `manyhands run`: start workers, and start again those that die
_kept.py        a worker in place of one that died, forked without importing torch again
_link.py        the launcher's entry in the roster, and its way back to the store after a cut
_processes.py   the launcher forwards what workers print, and leaves none behind
_crew.py        `Crew`: join, settle rounds, regroup, leave; how long to wait for the late
_enrollment.py  what a worker must have in common with the others, and how it gets in
_roster.py      the roster as a value: who takes part, and every way it may change
_store.py       the store: calls that cannot hang, signed values, heartbeats, the roster in it
_transport.py   the gloo group of a generation, which can be aborted
"""
