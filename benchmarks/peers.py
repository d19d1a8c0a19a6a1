"""Make the environment in which the benchmarks run beside fairscale and adaptdl.

    python benchmarks/peers.py        makes .peers/ (once; a minute or two)

The peers want other versions than the library's own environment has, hence one of its own. The
benchmarks find it by themselves. manyhands itself is not installed in it: it is put on the path.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".peers"
PYTHON = FOLDER / "bin" / "python"
READY = FOLDER / "ready"
PINS = (
    "torch==2.13.0",
    "numpy==2.4.6",
    "fairscale==0.4.13",
    "adaptdl==0.2.11",
    "requests==2.34.2",  # adaptdl imports it
    "setuptools==80.10.2",  # adaptdl imports pkg_resources, which setuptools 81 dropped
    "matplotlib==3.11.2",  # for the figures
)
HOW = "python benchmarks/peers.py"


def make() -> None:
    """Create .peers/ with the pinned versions in it."""
    print(f"Making {FOLDER.name}/ with {', '.join(PINS)} ...", flush=True)
    venv.create(FOLDER, with_pip=True, clear=True)
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # fairscale is a source package: it is built with the setuptools and torch installed before.
    subprocess.run([*pip, *PINS[:2], *PINS[4:6], "wheel"], check=True)
    subprocess.run([*pip, "--no-build-isolation", *PINS], check=True)
    READY.touch()
    print(f"{FOLDER.name}/ is ready.")


def this_checkout() -> None:
    """Put this checkout's manyhands on the path, here and in processes that are started."""
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    sys.path.insert(0, paths[0])


def run_again_beside_peers() -> bool:
    """Restart this script in .peers/, if that was made; returns whether it runs there.

    Where it was not, the benchmark goes on without the peers, in the environment it has. Either
    way this checkout's manyhands is put on the path, for processes that are started as well.
    """
    this_checkout()
    if Path(sys.prefix).resolve() == FOLDER.resolve():
        return True
    if not READY.exists():
        print(f"fairscale and adaptdl are left out. To have them in the comparison: {HOW}\n")
        return False
    sys.stdout.flush()
    os.execv(PYTHON, [str(PYTHON), *sys.argv])


if __name__ == "__main__":
    make()
