"""Elastic membership: workers that join, leave, stall and die, and agree on every sync round.

In the order in which a worker meets them:

_launcher.py       `manyhands run`: start workers, and start again those that die
_processes.py      the launcher forwards what workers print, and leaves none behind
_guard.py          the process that kills the workers if the launcher is killed
_membership.py     fixed members (a process group) or elastic ones (a crew), behind one interface;
                   state transfer to joiners
_crew.py           `Crew`: join, settle rounds, regroup, leave
_enrollment.py     one process's way into the next generation
_terms.py          what a worker must have in common with the others
_roster.py         the roster as a value: who takes part, and every way it may change
_shared_roster.py  the roster in the store: read, changed, repaired; heartbeats; arrivals
_heartbeat.py      which processes have no heartbeat any more
_store.py          the store: calls that cannot hang, signed values
_transport.py      what both kinds of crew have in common: the members, and their gloo group, which
                   can be aborted
_torchft.py        `TorchftCrew`: torchft's lighthouse in place of store and roster
"""
