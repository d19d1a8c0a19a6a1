"""Two hosts on this machine, and a slow line between them.

hosts.py    two network namespaces, each with a network interface that a program stands behind
wire.py     when a packet arrives: a rate, a delay and a queue that overflows (numbers only)
relay.py    the process that carries packets from one interface to the other, as the wire says
probe.py    what a TCP connection over it really gets
"""
