"""Check whether a training script trains on several ranks what it trains on one.

_judge.py                   the runs, in their order, and the verdict
_processes.py _machine.py   fork the script's processes; what stands in for a GPU in them
_files.py                   put back the files that they change
_recorder.py _feed.py       note what each step does; give one process the ranks' batches
_compare.py _causes.py      how far two runs are apart; hypotheses, one function each
_report.py                  the verdict as text and as JSON
"""

from manyhands.tools.check._judge import check_script as check_script
from manyhands.tools.check._report import Verdict as Verdict
