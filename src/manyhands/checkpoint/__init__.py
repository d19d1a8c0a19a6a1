"""Checkpoints that load on any number of ranks, under any sharding.

A save meets the files in this order; a load goes through the same stages, from files to contents.

    _save_and_load.py         `mh.save` and `mh.load`: the arguments, and the thread of a save
    _writing.py  _reading.py  the steps of a save and of a load
    _ranks.py                 the ranks that save or load together
    _contents.py              everything that belongs to a run:
      _model.py                   tensors under the names of the plain model
      _optimizer.py               the optimizer's state by parameter name
      _blocks.py                  in blocks: replicas, which have a state each, and the outer state
      _values.py  _random.py      values as JSON, random generators
      _foreign.py                 check what foreign code is to load, and undo what it did
    _parts.py  _planner.py    this rank's slices of tensors, and which rank writes and reads which
    _storage.py               what torch's planners write to and read from
    _index.py                 the index, and the check of everything it says
    _safetensors.py           the files of tensors
    _folder.py                complete checkpoints, who may write, and how files are opened safely
    _consolidate.py           a checkpoint as plain files, for `manyhands checkpoint`

torch.distributed.checkpoint takes long to import, so it is imported when a checkpoint is first
saved or loaded. That is why _save_and_load.py is a file of its own: it must not import it.
"""

from manyhands.checkpoint._save_and_load import Saving, load, save

__all__ = ["Saving", "load", "save"]
