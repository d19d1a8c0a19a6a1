"""The parts of `benchmarks/quality.py`, in the order in which a run goes through them.

workloads   data, model, base batch, base learning rate, length at scale 1
plan        which runs there are: method x scale x budget x seed
training    one run
store       one line of JSON per finished run, so that an interrupted benchmark continues
tables      runs -> mean and spread -> Markdown
figures     runs -> pictures
check       the library's fixed rules against a plain torch loop
"""
