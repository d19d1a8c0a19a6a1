"""For the reference page: doctests in docstrings become fenced code (see mkdocs.yml)."""

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Fences every paragraph that begins with `>>>`."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            fenced = DOCTEST.sub(lambda code: f"```pycon\n{code[0]}\n```", obj.docstring.value)
            obj.docstring.value = fenced
