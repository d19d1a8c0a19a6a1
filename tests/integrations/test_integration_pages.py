"""The pages and docstrings of integrations and engines, beside the real packages."""

import doctest
import importlib
import importlib.util
import multiprocessing
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor

import pytest

from helpers.pages import ROOT, has_examples, launch, run_page
from helpers.rays import variables_of_ray

OF_THEIR_OWN = {"fabric.md", "lightning.md"}  # test_lightning.py, test_lightning_scaling.py
PAGES = [
    page
    for folder in ("integrations", "engines")
    for page in sorted((ROOT / "docs" / folder).glob("*.md"))
    if page.name not in OF_THEIR_OWN and has_examples(page)
]
MODULES = sorted(
    path.stem
    for path in (ROOT / "src" / "manyhands" / "integrations").iterdir()
    if path.stem[0] != "_"
)
# What a page's scripts import is imported once, before they are forked. What starts threads at
# import, as Ray does, must not be.
BEFORE_FORKS = {
    "accelerate.md": ["accelerate.checkpointing", "manyhands.integrations.accelerate"],
    "transformers.md": ["transformers.trainer"],
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_page_runs_from_top_to_bottom(page, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in BEFORE_FORKS.get(page.name, []):
            importlib.import_module(module)
    run_page(page, in_folder=tmp_path)


@pytest.mark.parametrize("name", MODULES)
def test_what_an_integration_offers_is_documented_and_its_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name == "ray":  # which starts threads: this process would not be able to fork any more
        spawn = multiprocessing.get_context("spawn")
        with variables_of_ray() as variables, monkeypatch.context() as environment:
            for variable, text in variables.items():
                environment.setenv(variable, text)
            with ProcessPoolExecutor(1, mp_context=spawn) as other:
                other.submit(check_documented, name).result()
    else:
        check_documented(name)


def check_documented(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module(f"manyhands.integrations.{name}")
        reference = (ROOT / "docs" / "api.md").read_text()
        options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        finder, runner = (
            doctest.DocTestFinder(recurse=True),
            doctest.DocTestRunner(optionflags=options),
        )
        for public in module.__all__:
            line = f"::: manyhands.integrations.{name}.{public}\n"
            assert reference.count(line) == 1, f"docs/api.md should have the line {line!r} once"
            found = finder.find(getattr(module, public), public, module=False, globs={})
            assert found[0].examples, f"{public} has no example"
            for test in found:
                runner.run(test)
        assert runner.summarize(verbose=False).failed == 0


def test_the_package_imports_none_of_them(tmp_path):
    """`import manyhands.integrations` needs only torch; each file is imported by its name."""
    libraries = [name for name in MODULES if importlib.util.find_spec(name) is not None]
    code = f"import manyhands.integrations, sys; print({{*{libraries}}} & {{*sys.modules}})"
    done = launch([sys.executable, "-c", code], tmp_path)
    assert done.stdout == "set()\n", done.stderr
