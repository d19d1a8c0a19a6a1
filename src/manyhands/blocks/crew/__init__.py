"""Elastic membership: workers that join, leave, stall and die, and agree on every sync round.

In the order in which a worker meets the files:

_launcher.py       `manyhands run`: start workers, and restart workers that die
_fork_server.py    start replacement workers without importing torch again
_link.py           a launcher's connection to the store
_processes.py      forward output, and end all processes with the launcher
_crew.py           `Crew`: join, settle rounds, regroup, leave
_grace.py          how long to wait for late members
_enrollment.py     compare facts, and wait for the next generation
_roster.py         the roster: members, and every decision
_shared_roster.py  the roster, heartbeats and arrivals in the store
_transport.py      the gloo group of a generation
_store.py          signed values, and calls that cannot hang
"""
