"""The public surface: what is exported, that it is documented and typed, that its examples run."""

import doctest
import inspect
import subprocess
import sys

import pytest
import torch

import manyhands as mh
from helpers.public import FRONT, MODULES, PUBLIC
from manyhands import fairscale


def test_all_lists_the_public_names_once():
    assert len(set(mh.__all__)) == len(mh.__all__)
    public = {n for n, v in vars(mh).items() if n[0] != "_" and not inspect.ismodule(v)}
    assert public == set(mh.__all__)


def test_the_front_door_has_at_most_40_names():
    assert len(mh.__all__) <= 40


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_a_name_of_a_module_beside_is_listed_once_and_is_the_same_object_everywhere(module):
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        thing = getattr(module, name)
        front = FRONT.get(name, thing)
        # fairscale's classes may accept more arguments than those of `manyhands`.
        assert thing is front or (module is fairscale and issubclass(thing, front))
        assert thing in PUBLIC.values()  # it shows the module that it is listed in


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_says_where_it_lives_and_what_it_does(name):
    thing = PUBLIC[name]
    assert thing.__module__ == ".".join(["manyhands", *name.split(".")[:-1]])
    assert thing.__doc__
    for method_name, method in inspect.getmembers(thing, inspect.isfunction):
        if method_name[0] != "_" and method.__module__.startswith("manyhands"):
            documented = getattr(thing, method_name)  # an override may inherit its text
            assert inspect.getdoc(documented), f"{name}.{method_name} has no docstring"
            parameters = [p for p in inspect.signature(method).parameters.values()][1:]
            assert all(p.annotation is not p.empty for p in parameters), f"{name}.{method_name}"


@pytest.mark.parametrize("name", PUBLIC)
def test_the_examples_in_its_docstring_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    finder = doctest.DocTestFinder(recurse=True, exclude_empty=True)
    for test in finder.find(PUBLIC[name], name, module=False, globs={}):
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


@pytest.mark.parametrize("name", ["scaling._noise", "scaling._rules", "sharding.zero._layout"])
def test_examples_of_the_formulas_run(name):
    module = __import__(f"manyhands.{name}", fromlist=["_"])
    assert doctest.testmod(module).failed == 0


def test_importing_needs_only_torch_prints_nothing_and_is_quick():
    script = """
import sys, time
import torch
before, start = set(sys.modules), time.process_time()
import manyhands
manyhands.AdaScale  # imports all names
elapsed = time.process_time() - start
import manyhands.adaptdl, manyhands.fairscale, manyhands.fairseq
new = {name.split(".")[0] for name in set(sys.modules) - before}
outside = new - {"manyhands", "torch"} - set(sys.stdlib_module_names)
assert not outside, outside
assert elapsed < 1.0, elapsed  # 0.2 s on a quiet machine
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
