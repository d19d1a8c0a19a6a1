"""Make .peers/, the environment in which the benchmarks run beside other libraries.

    python benchmarks/peers.py        once; a few minutes; DeepSpeed needs a compiler

The peers need other versions than `.venv` has. The benchmarks find the environment by themselves.
manyhands is not installed in it, but put on the path.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".peers"
PYTHON = FOLDER / "bin" / "python"
READY = FOLDER / "ready-2"  # the number grows with PINS: an older environment is made anew
PINS = (
    "torch==2.13.0",
    "numpy==2.4.6",
    "fairscale==0.4.13",
    "adaptdl==0.2.11",
    "deepspeed==0.19.8",
    "accelerate==1.15.0",
    "torchft==0.2.0",
    "requests==2.34.2",  # adaptdl imports it
    "setuptools==80.10.2",  # adaptdl imports pkg_resources, which setuptools 81 dropped
)
COMPILE = "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as B; B().load()"
HOW = "python benchmarks/peers.py"


def make() -> None:
    print(f"Making {FOLDER.name}/ with {', '.join(PINS)} ...", flush=True)
    venv.create(FOLDER, with_pip=True, clear=True)
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # fairscale and DeepSpeed are source packages, built with what is installed before.
    first = [pin for pin in PINS if pin.startswith(("torch==", "numpy", "requests", "setuptools"))]
    subprocess.run([*pip, *first, "wheel"], check=True)
    subprocess.run([*pip, "--no-build-isolation", *PINS], check=True)
    # DeepSpeed compiles this at its first start. Ranks that start together would wait for a lock.
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    subprocess.run([PYTHON, "-c", COMPILE], check=True, env=environment, stdout=subprocess.DEVNULL)
    READY.touch()
    print(f"{FOLDER.name}/ is ready.")


def installed(name: str | None) -> bool:
    """Return whether the package is there, or none is needed."""
    return name is None or importlib.util.find_spec(name) is not None


def this_checkout() -> None:
    """Put this checkout's manyhands on the path, here and in processes that are started.

    Each has one thread.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    sys.path.insert(0, paths[0])


def run_again_beside_peers() -> None:
    """Restart this script in .peers/ if that was made; otherwise, go on without the peers."""
    this_checkout()
    if Path(sys.prefix).resolve() == FOLDER.resolve():
        return
    if not READY.exists():
        print(f"What others offer is left out. To have it in the comparison: {HOW}\n")
        return
    sys.stdout.flush()
    os.execv(PYTHON, [str(PYTHON), *sys.argv])


if __name__ == "__main__":
    make()
