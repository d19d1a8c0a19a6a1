"""Record the values of each step in a file, and read the file as a run.

    _record.py   sources, numbers and tensors → lines of a file, without waiting for a GPU
    _run.py      a file from one or more starts → a run; the state of the writing process

A record is a text file of JSON lines: a header, and a line per optimizer step:

    {"manyhands": {"version": 1, "name": "AdaScale x32", "date": "2026-02-03T04:05:06+01:00", ...}}
    {"step": 1, "time": 0.41, "progress": 3.2, "gain": 3.2, "lr": [0.1], ..., "loss": 2.30}
    {"step": 2, "time": 0.80, "progress": 6.3, "gain": 3.1, "lr": [0.1], ..., "loss": 2.21}

Three rules make files valid after a crash and after a resume:

- Each line is a single write to a descriptor opened for appending, so only the last line can be
  incomplete. Readers ignore an incomplete line, and a resumed run removes it.
- Opening an existing record appends a header. Closing a record appends a header with the date of
  the end, and with the error if there was one.
- A line supersedes earlier lines with an equal or larger step. A run that reached step 100 and
  resumed from step 90 therefore reads as a single run.

JSON has no infinities and no NaN. The file contains the strings "nan", "inf" and "-inf".
"""

from manyhands.tools.record._record import Record, StepTiming
from manyhands.tools.record._run import Run, read_record

__all__ = ["Record", "Run", "StepTiming", "read_record"]

Run.__module__ = __name__  # what tracebacks and help() show
