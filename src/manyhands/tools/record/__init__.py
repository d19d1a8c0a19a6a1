"""Record the values of each step in a file, and read the file as a run.

    _record.py   write lines, without waiting for a GPU
    _run.py      read a run, and detect whether the writing process is alive

A record is a text file with a header and a JSON line per optimizer step:

    {"manyhands": {"version": 1, "name": "AdaScale x32", "date": "2026-02-03T04:05:06+01:00", ...}}
    {"step": 1, "time": 0.41, "progress": 3.2, "gain": 3.2, "lr": [0.1], ..., "loss": 2.30}
    {"step": 2, "time": 0.80, "progress": 6.3, "gain": 3.1, "lr": [0.1], ..., "loss": 2.21}

After a crash or a resume, a file remains valid:

- Each line is a single write in append mode, so only the last line can be incomplete. Readers
  ignore incomplete lines. A resumed run removes them.
- Opening an existing record appends a header. Closing appends a header with the date and any error.
- A line supersedes earlier lines with an equal or larger step, so a run resumed from step 90 after
  step 100 reads as a single run.

JSON lacks NaN and infinities: they are the strings "nan", "inf" and "-inf".
"""

from manyhands.tools.record._run import Run, read_record

__all__ = ["Run", "read_record"]

Run.__module__ = __name__  # shown by tracebacks and help()
