"""Our numbers beside the originals', as a table of the largest relative differences.

    python benchmarks/parity.py --reference FOLDER     a minute; writes docs/benchmarks/parity.md

FOLDER holds values recorded by running adaptdl and fairscale (noise_and_gain.json, rules.json).
The training is that of tests/scaling/test_reference.py, which asserts what is shown here; this
needs its environment (torch, pytest).
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pages

QUANTITIES = {
    "squared norm": ("raw_sqr", "sqr"),
    "variance": ("raw_var", "var"),
    "gain": ("gain",),
    "factors": ("factor",),
    "progress": ("progress",),
    "smoothing": ("smoothing",),
    "parameters": ("params",),
}
Steps = list[dict[str, Any]]


def reference(folder: Path) -> Any:
    """The test module, reading its tables from `folder`."""
    if not (folder / "noise_and_gain.json").exists() or not (folder / "rules.json").exists():
        sys.exit(f"{folder} must hold noise_and_gain.json and rules.json.")
    os.environ["MANYHANDS_REFERENCE"] = str(folder)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP's advice on unused parameters
    sys.path[:0] = [str(pages.ROOT / part) for part in ("src", "tests", "tests/scaling")]
    return importlib.import_module("test_reference")


def numbers(value: Any) -> Iterator[float]:
    """All numbers in nested lists, in order; what is None (no gradient) is left out."""
    if isinstance(value, list | tuple):
        for part in value:
            yield from numbers(part)
    elif value is not None:
        yield float(value)


def difference(ours: Any, theirs: Any) -> float:
    """The largest |ours - theirs| / |theirs|.

    Values below a hundredth of the largest are compared relative to that: a variance of zero
    has no relative difference.
    """
    mine, wanted = list(numbers(ours)), list(numbers(theirs))
    assert len(mine) == len(wanted)
    least = max((abs(b) for b in wanted if math.isfinite(b)), default=0.0) / 100
    return max((_apart(a, b, least) for a, b in zip(mine, wanted, strict=True)), default=0.0)


def _apart(a: float, b: float, least: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    size = max(abs(b), least)
    return abs(a - b) / size if size > 0 and math.isfinite(size) else math.inf


def row(ours: Steps, theirs: Steps, skipped: set[str]) -> dict[str, float]:
    """Per quantity, the largest difference over all steps."""
    assert len(ours) == len(theirs)
    result = {}
    for quantity, keys in QUANTITIES.items():
        known = [key for key in keys if key in theirs[0] and key not in skipped]
        if known:
            result[quantity] = max(
                difference([step[key] for step in ours], [step[key] for step in theirs])
                for key in known
            )
    return result


def beside_adaptdl(test: Any) -> dict[str, dict[str, float]]:
    rows = {}
    for name, expected in test.NOISE["expect"]["adaptdl"].items():
        case = test.CASES[name]
        # With a loss scale the original stepped along gradients that were still multiplied
        # with it; after a NaN the parameters are NaN.
        skipped = {"params"} if case["loss_scale"] or "nan" in name else set()
        rows[name] = row(test.on_ranks(case, test.train_as_adaptdl), expected, skipped)
    return rows


def beside_fairscale(test: Any, table: str, run: Callable[..., Any]) -> dict[str, dict[str, float]]:
    rows = {}
    test._noise.estimate = test.floored_estimate  # this runs last
    for name, expected in test.NOISE["expect"][table].items():
        if isinstance(expected, str):
            continue  # the original raised an error
        case = test.CASES[name]
        finite = [all(map(math.isfinite, numbers(step["sqr"]))) for step in expected]
        usable = finite.index(False) if False in finite else len(finite)  # NaN for ever after
        rows[name] = row(test.on_ranks(case, run)[:usable], expected[:usable], set())
    return rows


def beside_rules(test: Any) -> float:
    """The largest difference of each rule's factors for given statistics, LEGW's included."""
    inputs, expect = test.RULES["inputs"], test.RULES["expect"]
    found = []
    for raw, expected in zip(inputs["raw"], expect["raw"], strict=True):
        for name in ("AdaScale", "AdamScale", "LinearScale", "SqrtScale"):
            rule = test.rule_knowing(getattr(test.mh, name), raw)
            for scale, theirs in zip(inputs["scales"], expected[name], strict=True):
                ours = rule.scale_lr(scale)
                found.append(difference(ours if hasattr(ours, "__len__") else [ours], theirs))
        rule = test.rule_knowing(test.mh.AdamScale, raw)
        for power in inputs["adam_power"]:
            wanted = expected[f"AdamScale_power_{power:g}"]
            for scale, theirs in zip(inputs["scales"], wanted, strict=True):
                found.append(difference(rule.scale_lr(scale, power=power), theirs))
    for case, theirs in zip(inputs["legw"], expect["legw"], strict=True):
        names = ("scale", "progress", "base_warmup_epochs", "data_size", "batch_size")
        found.append(difference([test.legw_factor(*(case[name] for name in names))], [theirs]))
    return max(found)


def shown(value: float) -> str:
    return f"{value:.0e}" if value else "0"


def table(rows: dict[str, dict[str, float]]) -> str:
    columns = [q for q in QUANTITIES if any(q in row for row in rows.values())]
    cells = [
        [f"`{name}`", *(shown(values[c]) if c in values else "" for c in columns)]
        for name, values in rows.items()
    ]
    return pages.table(" | ".join(["case", *columns]), cells)


PAGE = """# The originals' numbers

Largest relative differences between manyhands and values that were recorded by running adaptdl
0.2.11 and fairscale 0.4.13: a small model in float32 on one, two or four ranks, with
accumulation, parameter groups, changes of scale, missing gradients, NaN and a loss scale. A value
below a hundredth of the largest of its kind in the case is compared relative to that hundredth.

```bash
python benchmarks/parity.py --reference FOLDER   # the folder with the recorded values
```

The largest of all differences is {largest}.

## adaptdl

Defaults of `AdaptiveDataParallel`, which are adaptdl's. Not compared are the parameters where the
original stepped along gradients still multiplied with the loss scale, and those after a NaN.

{adaptdl}

## fairscale

With fairscale's floors in every step, which the test puts in: `AdaScale` applies them after
averaging, which is unbiased (see [the estimator](estimator.md)). Values after a NaN are not
compared, as fairscale's stay NaN. Left out are two cases in which fairscale raises an error.

{fairscale_default}

With `debias_ewma=False` the largest difference is {without_debiasing}.

## Rules, for given statistics

The factors of AdaScale, AdamScale (with powers), LinearScale, SqrtScale and LEGWScale differ by at
most {rules}.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reference", type=Path, required=True, metavar="FOLDER")
    args = parser.parse_args()
    test = reference(args.reference.resolve())
    # Ranks are forked; what torch imports late is imported here, once (tests/conftest.py).
    test.torch.optim.SGD([test.nn.Parameter(test.torch.zeros(1))], lr=0.1)
    adaptdl = beside_adaptdl(test)
    fairscale = beside_fairscale(test, "fairscale_default", test.run_default)
    without_debiasing = largest(beside_fairscale(test, "fairscale_b3", test.run_b3))
    rules = beside_rules(test)
    parts = {
        "largest": shown(max(largest(adaptdl), largest(fairscale), without_debiasing, rules)),
        "adaptdl": table(adaptdl),
        "fairscale_default": table(fairscale),
        "without_debiasing": shown(without_debiasing),
        "rules": shown(rules),
    }
    print(PAGE.format(**parts))
    pages.write("parity", PAGE, **parts)


def largest(rows: dict[str, dict[str, float]]) -> float:
    return max(value for values in rows.values() for value in values.values())


if __name__ == "__main__":
    main()
