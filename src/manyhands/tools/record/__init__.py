"""Write a run's values, one line for each step, and read them back as one run.

    _record.py   sources, numbers and tensors → lines of a file, without waiting for a GPU
    _run.py      a file, perhaps of several starts → one run; whether its process still runs

A record is a text file of JSON lines. A header says what the file is; each further line is one
optimizer step:

    {"manyhands": {"version": 1, "name": "AdaScale x32", "date": "2026-02-03T04:05:06+01:00", ...}}
    {"step": 1, "time": 0.41, "progress": 3.2, "gain": 3.2, "lr": [0.1], ..., "loss": 2.30}
    {"step": 2, "time": 0.80, "progress": 6.3, "gain": 3.1, "lr": [0.1], ..., "loss": 2.21}

Three rules keep a file whole and let a run be resumed:

- A line is one write to a descriptor opened for appending, so a crash leaves complete lines. At
  most the last one is cut off; readers ignore it, and a resumed run removes it.
- Opening an existing record writes another header. The lines after it go on from there. Closing it
  writes the header once more, with the date of the end and the error, if there was one.
- A line supersedes the earlier lines of its own and of later steps: a run that reached step 100
  and was resumed from step 90 reads as one run, with one line for each step.

JSON has no numbers that are not finite. They are the strings "nan", "inf" and "-inf"
in the file, and floats again when it is read.
"""

from manyhands.tools.record._record import Record, StepTiming
from manyhands.tools.record._run import Run, read_record

__all__ = ["Record", "Run", "StepTiming", "read_record"]

Run.__module__ = __name__  # what tracebacks and help() show
