"""The Hugging Face Trainer: a scaling rule, `Ramp`, sharding and blocks in its loop.

_checks.py      what a Trainer's arguments and its optimizer cannot do: errors before the first step
_attachment.py  `attach`, and `Attachment`: what Trainer's loop is made to do
"""

from manyhands.integrations.transformers._attachment import Attachment, attach

__all__ = ["Attachment", "attach"]

for _name in __all__:  # tracebacks and help() show where a name is imported from
    globals()[_name].__module__ = __name__
del _name
