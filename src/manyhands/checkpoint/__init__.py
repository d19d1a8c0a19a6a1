"""Checkpoints that fit any number of ranks, and any sharding.

    _save.py  _load.py    `mh.save` and `mh.load`
    _writing.py  _reading.py   their steps: these import torch.distributed.checkpoint
    _contents.py          everything that belongs to a run:
      _names.py  _model.py         the model's tensors under their plain names
      _optimizer.py  _shares.py    the optimizer's state, and the part of it that is on this rank
      _blocks_state.py  _replicas.py   the outer state of blocks, and inner state per replica
      _unwrap.py                   the layers around an optimizer
      _values.py  _random.py       values as JSON, random generators
      _undo.py                     undo what a user's load_state_dict did, if the load fails
    _planner.py  _parts.py  which rank reads and writes which part of which tensor
    _storage.py  _index.py  _schema.py  _safetensors.py   the files
    _folder.py  _files.py   complete checkpoints, the newest one, the lock
    _ranks.py             the ranks that save or load together

torch.distributed.checkpoint is imported when a checkpoint is first saved or loaded.
"""

from manyhands.checkpoint._load import load
from manyhands.checkpoint._save import Saving, save

__all__ = ["Saving", "load", "save"]
