"""Every public name: those of `manyhands`, and those that only a module beside it has."""

import importlib

import manyhands as mh

SIDE_DOORS = ("adaptdl", "fairscale", "fairseq", "blocks", "data", "tools.record", "scaling")
MODULES = {name: importlib.import_module(f"manyhands.{name}") for name in SIDE_DOORS}
FRONT = {name: getattr(mh, name) for name in mh.__all__}
BESIDE = {
    f"{module.__name__.removeprefix('manyhands.')}.{name}": getattr(module, name)
    for module in MODULES.values()
    for name in module.__all__
    if getattr(module, name).__module__ == module.__name__  # not the same object as elsewhere
}
PUBLIC = {**FRONT, **BESIDE}
