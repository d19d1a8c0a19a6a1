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


class Doctests(griffe.Extension):
    """Fences every paragraph that begins with `>>>`, and takes FSDP's options at run time."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        # The signature and the "Args" of FSDP are made at import, from FSDPOptions.
        if obj.path.endswith("._wrapper.FullyShardedDataParallel") and obj.docstring is not None:
            obj.docstring.value = inspect.getdoc(manyhands.FSDP) or obj.docstring.value
        if obj.path.endswith("._wrapper.FullyShardedDataParallel.__init__"):
            assert isinstance(obj, griffe.Function)
            obj.parameters = fsdp_parameters()
        if obj.docstring is not None:
            fenced = DOCTEST.sub(lambda code: f"```pycon\n{code[0]}\n```", obj.docstring.value)
            obj.docstring.value = fenced


def fsdp_parameters() -> griffe.Parameters:
    """Return the parameters that FSDP's constructor has at run time."""
    return griffe.Parameters(
        *(
            griffe.Parameter(
                name,
                annotation=None if name == "self" else str(parameter.annotation),
                kind=KINDS[parameter.kind],
                default=None if parameter.default is parameter.empty else repr(parameter.default),
            )
            for name, parameter in inspect.signature(manyhands.FSDP.__init__).parameters.items()
        )
    )
