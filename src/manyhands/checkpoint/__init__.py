"""Checkpoints that fit any number of workers, and any sharding.

    _save.py  _writing.py        the steps of a save
    _load.py  _reading.py        the steps of a load
    _contents.py                 all that belongs to a run:
      _names.py  _model.py         the model's tensors, under their plain names
      _optimizer.py  _shares.py    the optimizer's state, and which part of it is here
      _blocks.py  _replicas.py     blocks: the outer state, and who has an inner one of its own
      _unwrap.py                   what is around an optimizer
      _values.py  _random.py       values as JSON; random generators
    _plan.py  _boxes.py  _ranges.py   who writes and reads what: torch's planners, and runs as boxes
    _storage.py  _index.py  _safetensors.py   files
    _folder.py                   complete ones, the newest, the lock
    _team.py                     the workers, who agree

torch.distributed.checkpoint is imported when a checkpoint is first saved or loaded.
"""

from manyhands.checkpoint._load import load
from manyhands.checkpoint._save import Saving, save

__all__ = ["Saving", "load", "save"]
