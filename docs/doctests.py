"""For the reference page: what griffe, which only reads the source, cannot see (see mkdocs.yml)."""

import inspect
import re
from typing import Any

import griffe

import manyhands

DOCTEST = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)
KINDS = {
    inspect.Parameter.POSITIONAL_OR_KEYWORD: griffe.ParameterKind.positional_or_keyword,
    inspect.Parameter.KEYWORD_ONLY: griffe.ParameterKind.keyword_only,
}


# The signature and "Args" are made at import, from FSDPOptions.
MADE_AT_IMPORT = {
    "manyhands.sharding.fsdp._wrapper.FullyShardedDataParallel": manyhands.FSDP,
}


class Doctests(griffe.Extension):
    """Fences every paragraph that begins with `>>>`, and takes options at run time."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if (cls := MADE_AT_IMPORT.get(obj.path)) and obj.docstring is not None:
            obj.docstring.value = inspect.getdoc(cls) or obj.docstring.value
        cls = MADE_AT_IMPORT.get(obj.path.removesuffix(".__init__"))
        if cls and isinstance(obj, griffe.Function):
            obj.parameters = parameters_of(cls)
        if obj.docstring is not None:
            fenced = DOCTEST.sub(lambda code: f"```pycon\n{code[0]}\n```", obj.docstring.value)
            obj.docstring.value = fenced


def parameters_of(cls: type) -> griffe.Parameters:
    """Return the parameters that a constructor has at run time."""
    return griffe.Parameters(
        *(
            griffe.Parameter(
                name,
                annotation=None if name == "self" else str(parameter.annotation),
                kind=KINDS[parameter.kind],
                default=None if parameter.default is parameter.empty else repr(parameter.default),
            )
            for name, parameter in inspect.signature(cls.__init__).parameters.items()
        )
    )
