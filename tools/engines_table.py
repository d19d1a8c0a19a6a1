"""Test each sharding, rule and number of workers on each engine, and write a table.

    python tools/engines_table.py                                    plain ranks: a minute
    python tools/engines_table.py --engines torchrun trainjob manyhands
    python tools/engines_table.py --engines ray submitit             if installed

Each engine trains 5 steps on two workers, saves a checkpoint, and trains 5 more steps on 1, 2 and 4
workers (`tools/engine_cells.py`). A cell is

    =        bitwise equal to uninterrupted training on plain ranks
    ok       equal up to the rounding of sums, on a different number of workers
    ok (r)   blocks on a different number of workers, or from the checkpoint of a crew, which
             contains the inner state of a single worker: all workers start bitwise from the
             saved anchor, and have equal parameters after the next round
    error    an error before the first step; the text is below the table
    WRONG    any other result

For engines other than plain ranks, the parameters in the checkpoint, and the parameters after
resuming, are also compared bitwise with plain ranks.

The table is in docs/engines/table.md. Only rows of the given engines change.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
CELLS = ROOT / "tools" / "engine_cells.py"
PAGE = ROOT / "docs" / "engines" / "table.md"
SHARDINGS = ["DDP", "OSS + DDP", "OSS + ShardedDataParallel", "FSDP", "blocks"]
RULES = ["AdaScale", "AdamScale", "none"]
SIZES = (1, 2, 4)
STEPPING = ["--only", *SHARDINGS[:-1]]
SECRET = "the secret of this table"
TIMEOUT = 600


def environment(**variables):
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tools'}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **{name: str(value) for name, value in variables.items()},
    }


def run(*commands):
    """Run commands concurrently, each with separate variables; return the failures."""
    outputs = [tempfile.TemporaryFile() for _ in commands]  # noqa: SIM115
    running = [
        subprocess.Popen(
            [str(word) for word in command], env=variables, stdout=out, stderr=subprocess.STDOUT
        )
        for (command, variables), out in zip(commands, outputs, strict=True)
    ]
    until, failed = time.monotonic() + TIMEOUT, ""
    for process, out in zip(running, outputs, strict=True):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, until - time.monotonic()))
        if process.poll() is None:
            process.kill()
        if process.wait():
            out.seek(0)
            failed = failed or out.read().decode(errors="replace")[-4000:]
    return failed


# -- how each engine starts the cells --------------------------------------------------------------


def ranks(size, *arguments):
    told = {"WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    command = [sys.executable, CELLS, *arguments]
    return run(*((command, environment(**told, RANK=rank)) for rank in range(size)))


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def torchrun(size, *arguments):
    options = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", size]
    return run(([sys.executable, *options, CELLS, *arguments], environment()))


def trainjob(size, *arguments):
    """A pod per rank, with the variables of Kubeflow Trainer's torch plugin only.

    (Its plugins/torch/torch.go: PET_MASTER_ADDR is a pod's name there, and the port is 29400.)
    """
    told = {
        "PET_NNODES": size,
        "PET_NPROC_PER_NODE": 1,
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": free_port(),
    }
    command = [sys.executable, "-m", "torch.distributed.run", CELLS, *arguments]
    return run(*((command, environment(**told, PET_NODE_RANK=node)) for node in range(size)))


def manyhands(size, *arguments):
    """Ranks of a single worker for synchronous steps, and a crew for each kind of blocks."""
    command = [sys.executable, "-m", "manyhands", "run", "--workers"]
    failed = run(([*command, 1, "--processes", size, CELLS, *arguments, *STEPPING], environment()))
    for rule in RULES:
        only = ["--only", f"blocks, {rule}"]
        failed = failed or run(([*command, size, CELLS, *arguments, *only], environment()))
    return failed


def submitit(size, *arguments):
    code = f"""
        import sys, submitit, engine_cells
        executor = submitit.LocalExecutor(folder={str(arguments[0])!r} + "/log")
        executor.update_parameters(tasks_per_node={size}, timeout_min=20)
        executor.submit(engine_cells.main, *{tuple(map(str, arguments))!r}).results()
    """
    return run(([sys.executable, "-c", textwrap.dedent(code)], environment()))


def ray(size, *arguments):
    code = f"""
        import ray
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer

        def train():
            import engine_cells
            engine_cells.main(*{tuple(map(str, arguments))!r})

        ray.init("local", num_cpus={size + 1}, include_dashboard=False)
        run = RunConfig(storage_path={str(arguments[0])!r} + "/ray")
        TorchTrainer(train, scaling_config=ScalingConfig(num_workers={size}), run_config=run).fit()
        ray.shutdown()
    """
    return run(([sys.executable, "-c", textwrap.dedent(code)], environment()))


ENGINES = {
    "ranks": ("plain ranks", ranks),
    "torchrun": ("torchrun", torchrun),
    "trainjob": ("Kubeflow's TrainJob", trainjob),
    "manyhands": ("manyhands run", manyhands),
    "submitit": ("submitit", submitit),
    "ray": ("Ray Train", ray),
}


# -- what came out ---------------------------------------------------------------------------------


def results(folder, phase):
    """Return the results of each cell by rank. Cells of crews are in separate files."""
    found = {}
    for path in sorted(folder.glob(f"{phase}.*.json")):
        for cell, result in json.loads(path.read_text()).items():
            found.setdefault(cell, []).append(result)
    return found


def close(ours, theirs):
    return len(ours) == len(theirs) and all(
        abs(a - b) <= 1e-4 * max(1.0, abs(b)) for a, b in zip(ours, theirs, strict=True)
    )


def ends(results):
    return [(result["digest"], result["progress"]) for result in results]


def judge(cell, size, begun, resumed, whole, ranks_begun=None, ranks_resumed=None, crew=False):
    """Return a cell of the table, with a problem or the text of an error.

    Each argument has the results of a cell by rank: the first and the last five steps on this
    engine, ten uninterrupted steps, and, except for plain ranks, both halves on plain ranks.
    """
    for result in [*begun, *resumed]:
        if "error" in result:
            return "error", result["error"]
    if len(begun) != 2 or len(resumed) != size:
        return "WRONG", "workers are missing"
    for results in (begun, resumed):
        if len({result["digest"] for result in results}) != 1:
            return "WRONG", "workers differ"
    first, blocks = resumed[0], cell.startswith("blocks")
    if {result["loaded"] for result in resumed} != {begun[0]["digest"]}:
        return "WRONG", "not the saved parameters"
    if ranks_begun is not None and ends(begun) != ends(ranks_begun):
        return "WRONG", "not the checkpoint of plain ranks"
    if ranks_resumed is not None and ends(resumed) != ends(ranks_resumed):
        return "WRONG", "not what plain ranks make of this checkpoint"
    if size == 2 and not (blocks and crew):
        same = first["digest"] == whole[0]["digest"] and first["progress"] == whole[0]["progress"]
        return ("=", "") if same else ("WRONG", "not the training without a stop")
    if blocks:
        return "ok (r)", ""
    progress = [first["progress"] or 0.0], [whole[0]["progress"] or 0.0]
    same = close(first["weights"], whole[0]["weights"]) and close(*progress)
    return ("ok", "") if same else ("WRONG", "not the training without a stop")


def run_phase(start, size, folder, phase, begun=None, *options):
    """Run a phase once, in a copied folder; return the failures."""
    done = folder / "done"
    if done.exists():
        return ""
    if folder.exists():  # of a run that was interrupted
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    if begun is not None:
        shutil.copytree(begun, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("done"))
    failed = start(size, folder, phase, *options)
    if not failed:
        done.touch()
    return failed


def try_engine(start, folder, whole):
    """Return the cells of an engine: {cell: {size: (mark, text)}}."""
    begin = folder / "begin"
    failed_begin = run_phase(start, 2, begin, "begin")
    begun, table = results(begin, "begin"), {}
    ranks_begun = {} if start is ranks else by_ranks(start, folder)
    for size in SIZES:
        again = folder / f"resume{size}"
        failed = failed_begin or run_phase(start, size, again, "resume", begin)
        resumed = results(again, "resume")
        ranks_resumed = {} if start is ranks else by_ranks(start, folder, size)
        for cell in (f"{sharding}, {rule}" for sharding in SHARDINGS for rule in RULES):
            if cell in resumed and cell in begun:
                reference = ranks_begun.get(cell), ranks_resumed.get(cell)
                crew = start is manyhands
                found = judge(cell, size, begun[cell], resumed[cell], whole[cell], *reference, crew)
            else:
                found = "WRONG", failed.strip().splitlines()[-1] if failed else "no result"
            table.setdefault(cell, {})[size] = found
        print(f"  on {size}: {failed or 'done'}", flush=True)
    return table


def by_ranks(start, folder, size=None):
    """Return the results of plain ranks: the first five steps, or from this engine's checkpoint.

    Plain ranks resume from a separate, equal checkpoint. The checkpoint of a crew differs, because
    a crew averages over the network, and plain ranks on a host in shared memory, with a different
    last bit. Plain ranks that are compared with a crew therefore average over the network. A crew
    with a single worker takes outer steps, because workers may join, but a single plain rank does
    not. The crew is therefore compared with two plain ranks that take equal steps.
    """
    own = folder.parent / "ranks"
    phase = "begin" if size is None else "resume"
    found = results(own / (phase if size is None else f"resume{size}"), phase)
    if start is not manyhands:
        return found
    if size is None:
        where = own / "begin-network"
        failed = run_phase(ranks, 2, where, phase, None, "--network", "--only", "blocks")
    else:
        where, begun = folder / f"ranks{size}", folder / "begin"
        options = ["--network", *(["--alike"] if size == 1 else []), "--only", "blocks"]
        failed = run_phase(ranks, max(size, 2), where, phase, begun, *options)
    assert not failed, failed
    of_blocks = {cell: each[: size or 2] for cell, each in results(where, phase).items()}
    return {**found, **of_blocks}


def saved_rows():
    saved = re.search(r"<!-- (.*) -->", PAGE.read_text()) if PAGE.exists() else None
    return json.loads(saved[1]) if saved else {}


ABOUT = """
Plain ranks have the variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, like in Kubeflow's
PyTorchJob. `manyhands run` starts a worker with several processes, or a crew for blocks. A crew
averages over the network, where the last bit may differ from averages in shared memory. Plain ranks
compared with a crew therefore use `shared_memory=False`. A crew with a single worker is compared
with two plain ranks that take equal steps.
"""


def write_page(rows):
    lines = ["", f"| | {' | '.join(SHARDINGS)} |", f"|---{'|---' * len(SHARDINGS)}|"]
    notes = []
    for engine, _ in ENGINES.values():
        if engine not in rows:
            continue
        row = []
        for sharding in SHARDINGS:
            by_rule = {}
            for rule in RULES:
                marks = []
                for mark, text in rows[engine][f"{sharding}, {rule}"].values():
                    if text and text not in notes:
                        notes.append(text)
                    marks.append(f"{mark} {notes.index(text) + 1}" if text else mark)
                by_rule[rule] = ", ".join(marks)
            alike = len(set(by_rule.values())) == 1
            row.append(
                by_rule[rule] if alike else "; ".join(f"{r}: {m}" for r, m in by_rule.items())
            )
        lines.append(f"| {engine} | {' | '.join(row)} |")
    lines += [""] if notes else []
    lines += [f"{number}. {text}" for number, text in enumerate(notes, 1)]
    legend = re.search(r"A cell is\n\n(.*?)\n\n(For engines .*?)\n\nThe table", __doc__, re.DOTALL)
    assert legend is not None
    PAGE.write_text(
        "# Every engine, sharding and rule\n\n"
        "Each engine and sharding trains five steps on two workers, saves a checkpoint, and trains "
        "five more steps on 1, 2 and 4 workers, which gives three marks. AdaScale, AdamScale and "
        "training without a rule have equal marks unless the table names them. `python "
        "tools/engines_table.py` writes this page.\n\n```text\n"
        + legend[1]
        + f"\n```\n\n{legend[2]}\n"
        + ABOUT
        + "\n".join(lines)
        + "\n\n<!-- "
        + json.dumps(rows, separators=(",", ":"))
        + " -->\n"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["ranks"])
    parser.add_argument(
        "--keep",
        type=Path,
        help="a folder for checkpoints and results; what is there already is not run again",
    )
    arguments = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory(prefix="engines-") as name:
        folder = arguments.keep or Path(name)
        whole = folder / "whole"
        failed = run_phase(ranks, 2, whole, "whole")
        assert not failed, failed
        expected = results(whole, "whole")
        for key in ["ranks", *(key for key in arguments.engines if key != "ranks")]:
            name, start = ENGINES[key]
            print(name, flush=True)
            table = try_engine(start, folder / key, expected)
            rows = saved_rows()  # read again, because another run of this script may have written
            rows[name] = {
                cell: {str(size): list(found) for size, found in sizes.items()}
                for cell, sizes in table.items()
            }
            write_page(rows)
    wrong = [
        f"{engine}, {cell}, {size}: {text}"
        for engine, cells in rows.items()
        for cell, sizes in cells.items()
        for size, (mark, text) in sizes.items()
        if mark == "WRONG"
    ]
    print("\n".join(wrong) or "none is wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
