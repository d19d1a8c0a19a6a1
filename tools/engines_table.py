"""Test each combination of launcher, sharding and scaling rule, and write a table.

    python tools/engines_table.py                                    plain ranks: a minute
    python tools/engines_table.py --engines torchrun trainjob manyhands
    python tools/engines_table.py --engines ray submitit             requires these packages

For each engine: 5 steps on two workers, a checkpoint, and 5 more on one, two and four workers
(`tools/engine_cells.py`). A cell is

    =        bitwise equal to uninterrupted training on plain ranks
    ok       equal up to rounding, on a different number of workers
    ok (r)   blocks on a different number of workers, or from a crew's checkpoint, which contains
             the inner state of a single worker: all workers start at the saved anchor (bitwise)
             and have equal parameters after the next round
    error    an error before the first step, quoted below the table
    WRONG    a different result

For every engine but the first, the parameters in the checkpoint, and the parameters that plain
ranks reach from this checkpoint, are also bitwise equal.

The table goes to docs/engines/table.md, the results to tools/engines_table.json. Engines without
`--engines` keep their rows.
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
ROWS = ROOT / "tools" / "engines_table.json"
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
    """Run commands side by side, each with its variables; return what failed, if anything did."""
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
    """A pod for each rank, with the variables of Kubeflow Trainer's torch plugin and no others.

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
    """Ranks of one worker for what goes step by step, and a crew for each kind of blocks."""
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
    """Return each cell's results by rank. (A crew's cells are in files of their own.)"""
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
    """Return one cell of the table, and what is wrong or the error's text.

    Each argument has a cell's results by rank: from this engine's first five steps, and its last;
    from the ten steps without a stop; and, for every engine but plain ranks, from these as well.
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
    """Run a phase in its folder, which begins as a copy; return what failed. Run it once only."""
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
    """Return the cells of one engine: {cell: {size: (mark, text)}}."""
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
    """Return what plain ranks do: in the first five steps, or with this engine's checkpoint.

    They have gone on from a checkpoint of their own, which is the same one. Only a crew's is
    another. It has averaged over the network, and on one host plain ranks average in shared memory,
    where the last bit may differ; so those that a crew is compared with do not. A crew of one
    worker takes outer steps, since others may join, and a plain rank alone takes none; so it is
    compared with two plain ranks that take the same steps as each other.
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
    return json.loads(ROWS.read_text()) if ROWS.exists() else {}


ABOUT = """
Plain ranks have the variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as set by Kubeflow's
PyTorchJob. `manyhands run` starts a worker with multiple processes, and for blocks a crew. The
comparison with a crew uses `shared_memory=False`, and for a single worker two ranks with equal
batches.
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
    legend = re.search(r"A cell is\n\n(.*?)\n\n(For every .*?)\n\nThe table", __doc__, re.DOTALL)
    assert legend is not None
    PAGE.write_text(
        "# Launcher test results\n\n"
        "The table compares training under each launcher with plain ranks. Training takes five "
        "steps on two workers, saves a checkpoint, and continues for five steps on one, two and "
        "four workers (three marks). Marks for AdaScale, AdamScale and training without rules are "
        "equal unless stated. Created by `python tools/engines_table.py`.\n\n```text\n"
        + legend[1]
        + f"\n```\n\n{legend[2]}\n"
        + ABOUT
        + "\n".join(lines)
        + "\n"
    )
    engines = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items()]
    ROWS.write_text("{\n" + ",\n".join(engines) + "\n}\n")


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
            rows = saved_rows()  # now: two runs of this script may write at a time
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
