"""Read the environment variables of each engine as a `Place`.

    place = find_place(os.environ)

`ENGINES` lists a function per engine, in the order of the calls. Slurm may start torchrun, which
starts the ranks, so torchrun precedes Slurm. Each function returns a `Place`, or None if the engine
did not start this process. This module does not read the environment and opens no connections.

To add an engine, write a function and list it in `ENGINES`.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from manyhands._arguments import number_in

# Ports for rank 0, below Linux's range of client ports.
FIRST_PORT = 20_000
PORTS = 12_000

Variables = Mapping[str, str]


@dataclass(frozen=True)
class Place:
    """The place of this process among the ranks that train a model together."""

    engine: str = "none"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # among the processes of this host; selects the GPU
    local_world_size: int = 1
    address: str = ""  # host of rank 0; empty for a single rank
    port: int = 0

    def variables(self) -> dict[str, str]:
        """Return the variables that torch and related libraries read."""
        values: dict[str, object] = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
        }
        if self.address:
            values |= {"MASTER_ADDR": self.address, "MASTER_PORT": self.port}
        return {name: str(value) for name, value in values.items()}


def find_place(variables: Variables) -> Place:
    """Return the place of this process: a single rank if no engine has started it."""
    for engine in ENGINES:
        place = engine(variables)
        if place is None:
            continue
        if not 0 <= place.rank < place.world_size:
            raise ValueError(
                f"rank must be from 0 to {place.world_size - 1}, got {place.rank} (engine: "
                f"{place.engine}). Check the engine's environment variables."
            )
        return place
    return Place()


# -- the engines -----------------------------------------------------------------------------------


def _torch_variables(variables: Variables) -> Place | None:
    """Read the variables of torchrun, accelerate launch and Kubeflow's PyTorchJob."""
    # `manyhands run --processes` also sets them.
    if not {"RANK", "WORLD_SIZE"} <= variables.keys():
        return None
    if "TORCHELASTIC_RUN_ID" in variables:
        engine = "torchrun"
    elif "MANYHANDS_RUN" in variables:
        engine = "manyhands"
    else:
        engine = "variables"
    size = number_in(variables, "WORLD_SIZE", int)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not variables.get(name)]
    if missing and size > 1:
        raise ValueError(
            f"RANK and WORLD_SIZE={size} are set without {' and '.join(missing)}. Set MASTER_ADDR "
            "and MASTER_PORT to the same values on all ranks, or start the script with torchrun."
        )
    return Place(
        engine,
        number_in(variables, "RANK", int),
        size,
        number_in(variables, "LOCAL_RANK", int, 0),
        number_in(variables, "LOCAL_WORLD_SIZE", int, 1),
        variables.get("MASTER_ADDR", ""),
        number_in(variables, "MASTER_PORT", int, 0),
    )


def _crew_worker(variables: Variables) -> Place | None:
    return Place("manyhands") if variables.get("MANYHANDS_STORE") else None


def _train_job(variables: Variables) -> Place | None:
    """Read the variables of Kubeflow's TrainJob, as torchrun does."""
    if not {"PET_NNODES", "PET_NODE_RANK"} <= variables.keys():
        return None
    processes = variables.get("PET_NPROC_PER_NODE", "1")
    if processes != "1":
        raise ValueError(
            f"PET_NPROC_PER_NODE={processes} needs torchrun, which has not started this process. "
            'Start the script with torchrun (command: ["torchrun", "train.py"]), or set '
            "numProcPerNode: 1."
        )
    return Place(
        "kubeflow",
        number_in(variables, "PET_NODE_RANK", int),
        number_in(variables, "PET_NNODES", int),
        address=variables.get("PET_MASTER_ADDR", ""),
        port=number_in(variables, "PET_MASTER_PORT", int, 0),
    )


def _submitit_local(variables: Variables) -> Place | None:
    # On Slurm, `srun` starts the tasks.
    if variables.get("SUBMITIT_EXECUTOR") != "local":
        return None
    size = number_in(variables, "SUBMITIT_LOCAL_NTASKS", int, 1)
    return Place(
        "submitit",
        number_in(variables, "SUBMITIT_LOCAL_GLOBALID", int, 0),
        size,
        number_in(variables, "SUBMITIT_LOCAL_LOCALID", int, 0),
        size,
        *_meeting_address(variables, "127.0.0.1", variables.get("SUBMITIT_LOCAL_JOB_ID", "")),
    )


def _slurm(variables: Variables) -> Place | None:
    # Without `srun`, a process of a batch script is a single rank.
    if not {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"} <= variables.keys():
        return None
    step = variables.get("SLURM_STEP_ID", "0")
    hosts = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST") or ""
    return Place(
        "slurm",
        number_in(variables, "SLURM_PROCID", int),
        number_in(variables, "SLURM_STEP_NUM_TASKS", int),
        number_in(variables, "SLURM_LOCALID", int, 0),
        _tasks_here(variables),
        *_meeting_address(variables, first_host(hosts), f"{variables.get('SLURM_JOB_ID')}.{step}"),
    )


def _tasks_here(variables: Variables) -> int:
    """Return a step's tasks on this node, from a text like "SLURM_STEP_TASKS_PER_NODE=4(x2),1"."""
    text = variables.get("SLURM_STEP_TASKS_PER_NODE", "1")
    counts: list[int] = []
    for count, repeated in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(repeated or 1)
    node = number_in(variables, "SLURM_NODEID", int, 0)
    return counts[node] if node < len(counts) else 1


def first_host(hosts: str) -> str:
    """Return the first host of a Slurm host list.

    >>> first_host("node[007-009,12],login1"), first_host("a1,b[1-2]"), first_host("rack1-[3]-x")
    ('node007', 'a1', 'rack1-3-x')
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else "")


def _mpi(variables: Variables) -> Place | None:
    """Read the variables of Open MPI's mpirun or Hydra (MPICH, Intel MPI)."""
    for rank, size, local_rank, local_size in (
        (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ):
        if not {rank, size} <= variables.keys():
            continue
        here = number_in(variables, local_size, int, 1)
        everywhere = number_in(variables, size, int)
        if not variables.get("MASTER_ADDR") and here < everywhere:
            raise ValueError(
                f"mpirun has started {everywhere} ranks, {here} on this host. Pass MASTER_ADDR: "
                "mpirun -x MASTER_ADDR=$(hostname -i) ... on rank 0 (Hydra: -genv MASTER_ADDR ...)."
            )
        job = variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid") or ""
        own = number_in(variables, rank, int)
        local = number_in(variables, local_rank, int, 0)
        meeting = _meeting_address(variables, "127.0.0.1", job)
        return Place("mpi", own, everywhere, local, here, *meeting)
    return None


ENGINES: list[Callable[[Variables], Place | None]] = [
    _torch_variables,
    _crew_worker,
    _train_job,
    _submitit_local,
    _slurm,
    _mpi,
]


def find_worker_number(variables: Variables) -> int | None:
    """Return this worker's number in a crew, or None."""
    # Kubernetes sets JOB_COMPLETION_INDEX in the pods of an Indexed Job.
    for name in ("MANYHANDS_WORKER", "JOB_COMPLETION_INDEX"):
        if variables.get(name):
            return number_in(variables, name, int)
    return None


# -- parsing ---------------------------------------------------------------------------------------


def _meeting_address(variables: Variables, host: str, job: str) -> tuple[str, int]:
    # All ranks compute the port from the job. Two jobs on a host rarely get equal ports.
    port = FIRST_PORT + zlib.crc32(job.encode()) % PORTS
    return variables.get("MASTER_ADDR") or host, number_in(variables, "MASTER_PORT", int, port)
