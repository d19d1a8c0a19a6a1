"""Check whether a script that is killed after a checkpoint resumes as if it had not been.

_judge.py             make the three runs, and collect the verdict
_runs.py              fork the ranks of a run, and kill them
_report.py            the verdict as text and as JSON

In each process:
_meeting.py           let the ranks of a run stop before the same step
_checkpoints.py       notice that a checkpoint is complete, and which files are read
_history.py           record samples, learning rates, gradients and parameters of each step
_state.py             digests of all state before a step
_averages.py          find copies of the weights in the script's variables
_samples.py           find the samples of a pass

Between runs:
_records.py           the record that a process writes
_case.py              the records that hypotheses about a difference look at
_state_causes.py      hypotheses about state that was not restored
_data_causes.py       hypotheses about samples
_rate_causes.py       hypotheses about learning rates
_run_causes.py        hypotheses about random numbers and the number of steps
"""

from manyhands.tools.check.resume._judge import ResumeRequest as ResumeRequest
from manyhands.tools.check.resume._judge import check_resume as check_resume
from manyhands.tools.check.resume._report import ResumeVerdict as ResumeVerdict
