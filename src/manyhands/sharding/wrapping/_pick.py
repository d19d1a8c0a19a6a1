"""Which modules of a model get a wrapper. A policy and a model in, a list of modules out.

Three walks over the model, none of which changes it:

    down    the policy says what is looked into; what is inside of all else stays as it is
    ways    how often each parameter is reached
    up      the policy says what is wrapped; parameters that are left count for the module around

A model need not be a tree: a module may stand at two places, and two modules may hold one
parameter. Such a parameter may go into a module's wrapper only if all of its places are inside of
that module, that is, if

    ways(root, parameter) = ways(root, module) * ways(module, parameter)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from torch import nn

from manyhands.sharding.wrapping._policies import ASKED, Policy


def picked(root: nn.Module, policy: Policy, wrappers: Iterable[nn.Module]) -> list[nn.Module]:
    """What to wrap, the innermost first. Modules in `wrappers` are so already."""
    wrappers = set(wrappers)
    held = {param for wrapper in wrappers for param in wrapper.parameters()}

    def ask(module: nn.Module, recurse: bool, params: set[nn.Parameter]) -> bool:
        number = sum(param.numel() for param in params - held)
        about = (module, recurse, number, module is root)
        return policy(**dict(zip(ASKED, about, strict=True)))

    ways = _Ways()
    looked_into = _looked_into(
        root, lambda m: m not in wrappers and ask(m, True, {*m.parameters()})
    )
    found = []
    left: dict[nn.Module, set[nn.Parameter]] = {wrapper: set() for wrapper in wrappers}

    def left_in(module: nn.Module) -> set[nn.Parameter]:
        """The parameters in it that are in no wrapper in it."""
        if module not in left:
            params = set(_own(module)).union(*(left_in(child) for _, child in children(module)))
            wanted = module in looked_into and ask(module, False, params)
            if wanted and all(ways.all_lead_through(module, param, root) for param in params):
                found.append(module)
                params = set()
            left[module] = params
        return left[module]

    left_in(root)
    return found


def children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """All of them; `named_children` leaves out the second name of one that has two."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def _own(module: nn.Module) -> list[nn.Parameter]:
    return [param for param in module._parameters.values() if param is not None]


def _looked_into(root: nn.Module, enters: Callable[[nn.Module], bool]) -> set[nn.Module]:
    entered: dict[nn.Module, bool] = {}
    sealed: set[nn.Module] = set()  # inside of one that is not, even if elsewhere too

    def walk(module: nn.Module) -> None:
        if module in entered:
            return
        entered[module] = enters(module)
        if entered[module]:
            for _, child in children(module):
                walk(child)
        else:
            sealed.update(inner for inner in module.modules() if inner is not module)

    walk(root)
    return {module for module, yes in entered.items() if yes} - sealed


class _Ways:
    """Counts the ways down from a module to the modules and parameters in it."""

    def __init__(self) -> None:
        self._known: dict[nn.Module, Counter[nn.Module | nn.Parameter]] = {}

    def down(self, module: nn.Module) -> Counter[nn.Module | nn.Parameter]:
        if module not in self._known:
            ways: Counter[nn.Module | nn.Parameter] = Counter([module, *_own(module)])
            for _, child in children(module):
                ways.update(self.down(child))
            self._known[module] = ways
        return self._known[module]

    def all_lead_through(self, module: nn.Module, param: nn.Parameter, root: nn.Module) -> bool:
        whole = self.down(root)
        return whole[param] == whole[module] * self.down(module)[param]
