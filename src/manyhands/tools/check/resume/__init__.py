"""Check whether a script, killed after a checkpoint, resumes like an uninterrupted run.

_judge.py             make three runs, and compare
_runs.py              run the ranks until all ranks stop
_report.py            the verdict as text

In each process:
_meeting.py           stop the ranks of a run before a common step
_checkpoints.py       detect complete checkpoints, and files that the process reads
_history.py           record samples, learning rates, gradients and parameters of each step
_state.py             digests of the state before a step
_averages.py          find copies of the weights in the script's variables
_samples.py           find the samples of a pass

Between runs:
_records.py           the record of a process
_case.py              the records for hypotheses
_state_causes.py      hypotheses about state that was not restored
_data_causes.py       hypotheses about samples
_rate_causes.py       hypotheses about learning rates
_run_causes.py        hypotheses about random numbers and step counts
"""

from manyhands.tools.check.resume._judge import ResumeRequest as ResumeRequest
from manyhands.tools.check.resume._judge import check_resume as check_resume
from manyhands.tools.check.resume._report import ResumeVerdict as ResumeVerdict
