"""Elastic membership: workers that join, leave, stall and die, and agree on every sync round.

In the order in which a worker meets them:

_launcher.py       `manyhands run`: start workers, and start again those that die
_processes.py      the launcher forwards what workers print, and leaves none behind
_membership.py     a crew as the blocks see it; state transfer to joiners
_crew.py           `Crew`: join, settle rounds, regroup, leave
_enrollment.py     what a worker must have in common with the others, and how it gets in
_roster.py         the roster as a value: who takes part, and every way it may change
_shared_roster.py  the roster in the store: read, changed, repaired; heartbeats; late members
_store.py          the store: calls that cannot hang, signed values
_transport.py      the gloo group of a generation, which can be aborted
"""
