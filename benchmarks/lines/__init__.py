"""Training over a line until a loss is reached.

ways.py      the ways to train that are compared, and the lines
training.py  one rank that trains in one of the ways, on a clock that stops for evaluations
"""
