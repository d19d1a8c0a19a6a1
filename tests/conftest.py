"""What every test shares. Ranks are forked (ranks.py), so the slow imports happen once, here."""

import faulthandler
import gc
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

import hypothesis
import pytest
import torch

from helpers import huge_pages
from helpers.lightning_runs import import_lightning
from manyhands import AdaScale  # noqa: F401  # with all names, so that no rank imports them
from manyhands.adaptdl import _adaptive_loader
from manyhands.engines._stopping import listener

if TYPE_CHECKING:
    from helpers.crew_workers import Store

# The same examples in every run, and as much time as a busy machine needs for one.
hypothesis.settings.register_profile("ours", deadline=None, derandomize=True)
# The first of these examples, for `make quick`; `make test` tries all of them.
hypothesis.settings.register_profile("quick", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("ours")

# As `manyhands run` sets it: an answer of a name server that is lost costs 1 second, not 5.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")
torch.set_num_threads(1)
# The first optimizer of a process imports half of torch (about a second); after this
# line the forked ranks have it already.
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
# What was imported so far stays for good. Without this, every garbage collection walks over all
# of torch (a third of a second), in the ranks too, and pytest makes several at the end.
gc.collect()
gc.freeze()
os.register_at_fork(before=huge_pages.before_fork)
# pytest has Python report a crash on a copy of stderr that it does not capture. Forked processes
# that a test lets crash report on stderr, which is shown if the test fails.
os.register_at_fork(after_in_child=partial(faulthandler.enable, 2))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, as ranks wait for each other now and then."""
    return (os.cpu_count() or 1) + 1


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "quick":
        hypothesis.settings.load_profile("quick")
    # On a machine with GPUs, autograd starts a thread for each of them, and a rank forked after
    # that cannot run backward(). So only the tests that ask for a GPU see one.
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        # The first backward counts the devices, and a FakeTensorMode (planning) makes a CUDA build
        # of torch count one that is not there, and start a thread for it.
        torch.zeros((), requires_grad=True).backward()
    if "coverage" in sys.modules:  # make test COVERAGE=1
        from helpers.measured_forks import MeasuredForks

        MeasuredForks.begin(config)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the variants that a test's `sample` does not list as long."""
    listed: set[tuple[str, str]] = set()
    found: set[tuple[str, str]] = set()
    for item in items:
        mark = item.get_closest_marker("sample")
        if mark is None:
            continue
        test, _, rest = item.nodeid.partition("[")
        variant = rest.removesuffix("]")
        listed.update((test, each) for each in mark.args)
        found.add((test, variant))
        if variant not in mark.args:
            item.add_marker(pytest.mark.long)
    is_complete = not any("::" in argument for argument in config.args)
    if is_complete and listed - found:
        missing = [f"{test}[{variant}]" for test, variant in sorted(listed - found)]
        raise pytest.UsageError(f"pytest.mark.sample lists unknown variants: {missing}")


def pytest_collection_finish() -> None:
    """Freeze the tests too, and what they have imported: as much again.

    Blocks look through all objects for the model of their parameters, each time they are made.
    """
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report each reason for skipped tests, and the number of tests, in a single line."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        if isinstance(report.longrepr, tuple):
            _, _, reason = report.longrepr
            reasons[reason.removeprefix("Skipped: ")] += 1
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """A test that listens to stop notices must not leave this process deaf to SIGTERM."""
    yield
    listener.stop()


@pytest.fixture(autouse=True)
def _epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs are counted for the process, as adaptdl does; a test begins with none."""
    monkeypatch.setattr(_adaptive_loader, "_epochs", _adaptive_loader._Epochs())


@pytest.fixture(scope="module")
def lightning() -> ModuleType:
    """Lightning, imported before the ranks are forked."""
    return import_lightning()


@pytest.fixture
def store() -> Iterator["Store"]:
    """The store of a crew, in a process of its own."""
    from helpers.crew_workers import Store  # which gives all processes a secret

    with Store() as store:
        yield store
