"""For the reference page: doctests in docstrings become fenced code (see mkdocs.yml)."""

import inspect
import re
from typing import Any

import griffe

import manyhands

DOCTEST = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Fences every paragraph that begins with `>>>`."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.name == "FullyShardedDataParallel" and obj.is_class and obj.docstring is not None:
            # Its "Args" are added at import, from FSDPOptions; griffe only reads the source.
            obj.docstring.value = inspect.getdoc(manyhands.FSDP) or obj.docstring.value
        if obj.docstring is not None:
            fenced = DOCTEST.sub(lambda code: f"```pycon\n{code[0]}\n```", obj.docstring.value)
            obj.docstring.value = fenced
