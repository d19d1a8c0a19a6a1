"""The public names of the originals: read from their sources, and kept in originals.json.

    python tests/helpers/originals.py FOLDER ...     write the file again, from folders of packages

A class's names are its methods and properties with their arguments, what its body sets, and what a
method sets on an instance (`self.name = ...`).
A package's are the classes and functions that it exports. All is read as text, so that no original
has to be imported: fairseq and adaptdl ask for other versions than the library is tested with.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
VERSIONS = {"fairscale": "0.4.13", "adaptdl": "0.2.11", "fairseq": "0.12.2"}
CLASSES = {  # by the module that defines them
    "fairscale.optim.adascale": ("AdaScale", "AdaScaleWrapper"),
    "fairscale.optim.oss": ("OSS",),
    "fairscale.optim.grad_scaler": ("ShardedGradScaler",),
    "fairscale.nn.data_parallel.sharded_ddp": ("ShardedDataParallel",),
    "fairscale.nn.data_parallel.fully_sharded_data_parallel": ("FullyShardedDataParallel",),
    "fairscale.fair_dev.testing.testing": ("DummyProcessGroup",),
    "adaptdl.torch.scaling_rules": (
        *("ScalingRuleBase", "AdaScale", "AdamScale", "LinearScale", "SqrtScale", "LEGWScale"),
    ),
    "adaptdl.torch.parallel": ("AdaptiveDataParallel",),
    "adaptdl.torch.data": ("AdaptiveDataLoaderMixin", "AdaptiveDataLoader"),
    "adaptdl.torch.gradient_noise_scale": ("GradientNoiseScale", "AdamGradientNoiseScale"),
    "fairseq.optim.fairseq_optimizer": ("FairseqOptimizer",),
    "fairseq.optim.bmuf": ("FairseqBMUF",),
    "fairseq.dataclass.configs": ("FairseqBMUFConfig",),
}
FUNCTIONS = {
    "fairscale.nn.wrap.auto_wrap": (
        *("auto_wrap", "wrap", "enable_wrap"),
        *("default_auto_wrap_policy", "config_auto_wrap_policy"),
    ),
    "fairscale.nn.data_parallel.fully_sharded_data_parallel": (
        *("auto_wrap_bn", "get_fsdp_instances", "no_pre_load_state_dict_hook"),
    ),
    "adaptdl.torch.epoch": ("remaining_epochs_until",),
}
BASES = (  # whose names others have too
    "fairseq.optim.fairseq_optimizer.FairseqOptimizer",
    "adaptdl.torch.data.AdaptiveDataLoaderMixin",
)
PACKAGES = (
    *("fairscale.optim", "fairscale.optim.oss", "fairscale.optim.adascale"),
    *("fairscale.optim.grad_scaler", "fairscale.nn", "fairscale.nn.wrap"),
    *("fairscale.nn.data_parallel", "adaptdl.torch", "adaptdl.torch.scaling_rules"),
    "adaptdl.torch.gradient_noise_scale",
)


def stored() -> dict[str, Any]:
    """What the originals have, by their modules' names."""
    names: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return names


def read(folder: Path, package: str) -> dict[str, Any]:
    """The public names of one original, from the folder that its package lies in."""

    def of(name: str) -> ast.Module:
        path = folder.joinpath(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        return ast.parse(path.read_text(encoding="utf-8"))

    mine = {name: kinds for name, kinds in CLASSES.items() if name.startswith(f"{package}.")}
    classes = {
        f"{name}.{node.name}": node
        for name, kinds in mine.items()
        for node in of(name).body
        if isinstance(node, ast.ClassDef) and node.name in kinds
    }
    members = {name: _members(node) for name, node in classes.items()}
    for name, node in classes.items():
        for base in (one for one in BASES if one.rpartition(".")[2] in map(_last, node.bases)):
            members[name] = {**members[base], **members[name]}
    exports = {
        name: sorted(set(_exports(name, of(name), folder.joinpath(*name.split(".")).is_dir())))
        for name in PACKAGES
        if name.startswith(f"{package}.")
    }
    functions = {
        f"{name}.{node.name}": _arguments(node, method=False)
        for name, chosen in FUNCTIONS.items()
        if name.startswith(f"{package}.")
        for node in of(name).body
        if isinstance(node, ast.FunctionDef) and node.name in chosen
    }
    defaults = {
        f"{name}.{part.name}": given
        for name, node in classes.items()
        for part in node.body
        if isinstance(part, ast.FunctionDef)
        and (part.name == "__init__" or not part.name.startswith("_"))
        and (given := _defaults(part))
    }
    defaults |= {
        f"{name}.{node.name}": given
        for name, chosen in FUNCTIONS.items()
        if name.startswith(f"{package}.")
        for node in of(name).body
        if isinstance(node, ast.FunctionDef) and node.name in chosen and (given := _defaults(node))
    }
    found = {"exports": exports, "functions": functions, "defaults": defaults}
    return {**found, "members": {n: m for n, m in members.items() if n not in BASES}}


def installed(package: str) -> Path | None:
    """The folder that a package lies in, without importing it."""
    spec = importlib.util.find_spec(package)
    where = None if spec is None else next(iter(spec.submodule_search_locations or ()), None)
    return None if where is None else Path(where).parent


def _last(base: ast.expr) -> str:
    return base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")


def _members(node: ast.ClassDef) -> dict[str, str | None]:
    """A class's public names; those of functions with their arguments, in order."""
    found: dict[str, str | None] = {}
    for part in node.body:
        if isinstance(part, ast.FunctionDef):
            plain = any(_last(mark) in ("property", "setter") for mark in part.decorator_list)
            found[part.name] = None if plain else _arguments(part)
            for inner in ast.walk(part):
                if (
                    isinstance(inner, ast.Attribute)
                    and isinstance(inner.ctx, ast.Store)
                    and isinstance(inner.value, ast.Name)
                    and inner.value.id == "self"
                ):
                    found.setdefault(inner.attr, None)
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            found.setdefault(part.target.id, None)
        elif isinstance(part, ast.Assign):
            for target in part.targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, None)
    return {k: v for k, v in sorted(found.items()) if k == "__init__" or not k.startswith("_")}


def _arguments(function: ast.FunctionDef, method: bool = True) -> str:
    """As `a, b, *, c, **more`: what comes after the star is given by name only."""
    given = function.args
    static = not method or any(_last(m) == "staticmethod" for m in function.decorator_list)
    names = [argument.arg for argument in [*given.posonlyargs, *given.args]]
    names = names if static else names[1:]
    if given.vararg is not None or given.kwonlyargs:
        names.append("*" + (given.vararg.arg if given.vararg else ""))
    names += [argument.arg for argument in given.kwonlyargs]
    return ", ".join([*names, *([f"**{given.kwarg.arg}"] if given.kwarg is not None else [])])


def _defaults(function: ast.FunctionDef) -> dict[str, str]:
    """The arguments that may be left out, with their defaults as they are written."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    pairs = [
        *zip(positional[len(positional) - len(given.defaults) :], given.defaults, strict=True),
        *zip(given.kwonlyargs, given.kw_defaults, strict=True),
    ]
    return {argument.arg: ast.unparse(value) for argument, value in pairs if value is not None}


def _exports(name: str, module: ast.AST, is_package: bool) -> Iterator[str]:
    """The public classes and functions of a module, and what a package imports from its own.

    (Some of them under a condition, or where something else is installed.)
    """
    for part in [*getattr(module, "body", []), *getattr(module, "orelse", [])]:
        if isinstance(part, ast.ClassDef | ast.FunctionDef) and not part.name.startswith("_"):
            yield part.name
        elif isinstance(part, ast.ImportFrom) and is_package:
            if part.level or (part.module or "").startswith(f"{name}."):
                yield from (each.asname or each.name for each in part.names)
        elif isinstance(part, ast.If | ast.Try):
            yield from _exports(name, part, is_package)


def write(folders: Sequence[Path]) -> None:
    found = {
        package: read(next(f for f in folders if (f / package).is_dir()), package)
        for package in VERSIONS
    }
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write([Path(argument) for argument in sys.argv[1:]])
