"""Who a process is, from what each engine writes into its environment."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import manyhands as mh
from helpers.ranks import on_ranks
from manyhands._ranks import ranks as core_ranks
from manyhands._ranks.ranks import RankGroup
from manyhands.adaptdl import AdaptiveDataParallel
from manyhands.engines._places import Place, find_place, find_worker_number, first_host

pytestmark = pytest.mark.quick

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
}
SUBMITIT = {
    "SUBMITIT_EXECUTOR": "local",
    "SUBMITIT_LOCAL_JOB_ID": "4711",
    "SUBMITIT_LOCAL_NTASKS": "2",
    "SUBMITIT_LOCAL_GLOBALID": "1",
    "SUBMITIT_LOCAL_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
TRAIN_JOB = {  # Kubeflow Trainer, pkg/runtime/framework/plugins/torch/torch.go
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "3",
    "PET_MASTER_ADDR": "run-node-0-0.run",
    "PET_MASTER_PORT": "29400",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def test_without_an_engine_a_process_is_a_rank_alone():
    assert find_place({"PATH": "/bin"}) == Place("none", 0, 1, 0, 1, "", 0)


@pytest.mark.parametrize(
    ("more", "engine"),
    [
        ({}, "variables"),  # as Kubeflow's PyTorchJob sets them
        ({"TORCHELASTIC_RUN_ID": "x"}, "torchrun"),
        ({"MANYHANDS_RUN": "x", "MANYHANDS_STORE": "127.0.0.1:1"}, "manyhands"),
    ],
)
def test_torchs_variables_are_believed_first(more, engine):
    place = find_place({**SLURM, **SUBMITIT, **TORCHRUN, **more})
    assert place == Place(engine, 5, 8, 1, 4, "10.0.0.1", 29500)


def test_a_task_of_srun():
    place = find_place(SLURM)
    assert (place.engine, place.rank, place.world_size) == ("slurm", 5, 7)
    assert (place.local_rank, place.local_world_size, place.address) == (1, 3, "gpu007")
    assert 20_000 <= place.port < 32_000
    assert place.port == find_place({**SLURM, "SLURM_PROCID": "0"}).port  # ranks meet
    assert place.port != find_place({**SLURM, "SLURM_STEP_ID": "1"}).port  # steps do not
    chosen = find_place({**SLURM, "MASTER_ADDR": "a", "MASTER_PORT": "1"})
    assert (chosen.address, chosen.port) == ("a", 1)


def test_a_batch_script_of_slurm_is_no_task():
    batch = {k: v for k, v in SLURM.items() if "STEP" not in k} | {"SLURM_NTASKS": "7"}
    assert find_place(batch).engine == "none"


@pytest.mark.parametrize(
    ("variables", "engine"), [(SUBMITIT, "submitit"), (OPEN_MPI, "mpi"), (HYDRA, "mpi")]
)
def test_ranks_of_one_host_meet_there(variables, engine):
    place = find_place(variables)
    assert (place.engine, place.rank, place.world_size) == (engine, 1, 2)
    assert (place.local_rank, place.local_world_size, place.address) == (1, 2, "127.0.0.1")


def test_a_pod_of_a_train_job():
    pod = {**TRAIN_JOB, "JOB_COMPLETION_INDEX": "3"}
    assert find_place(pod) == Place("kubeflow", 3, 4, 0, 1, "run-node-0-0.run", 29400)
    # torchrun has read these variables, and its ranks have them still.
    ranks = {**pod, **TORCHRUN, "TORCHELASTIC_RUN_ID": "x"}
    assert find_place(ranks) == Place("torchrun", 5, 8, 1, 4, "10.0.0.1", 29500)
    assert find_place({**pod, "MANYHANDS_STORE": "store:29600"}).engine == "manyhands"


def test_a_crews_worker_is_a_rank_alone_wherever_it_was_started():
    place = find_place({**SLURM, "MANYHANDS_STORE": "10.0.0.1:29510"})
    assert (place.engine, place.rank, place.world_size) == ("manyhands", 0, 1)


def test_a_workers_number_comes_from_whoever_knows_it():
    assert find_worker_number({}) is None
    assert find_worker_number({"JOB_COMPLETION_INDEX": "3"}) == 3
    assert find_worker_number({"JOB_COMPLETION_INDEX": "3", "MANYHANDS_WORKER": "1"}) == 1


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({**TORCHRUN, "RANK": "x"}, "RANK must be a whole number, got 'x'"),
        ({**TORCHRUN, "RANK": "8"}, "from 0 to 7, got 8"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "without MASTER_ADDR and MASTER_PORT"),
        ({**TRAIN_JOB, "PET_NPROC_PER_NODE": "auto"}, "Start the script with torchrun"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}, "Pass MASTER_ADDR"),
    ],
)
def test_an_incomplete_environment_is_an_error_that_says_what_to_do(variables, message):
    with pytest.raises(ValueError, match=message):
        find_place(variables)


def test_the_first_host_of_slurms_lists():
    assert first_host("node[007-009,12],login1") == "node007"
    assert first_host("a1,b[1-2]") == "a1"
    assert first_host("n[1,3-4]-ib0") == "n1-ib0"
    assert first_host("") == ""


def test_the_variables_that_other_libraries_read():
    variables = find_place(SUBMITIT).variables()
    assert variables["RANK"] == variables["LOCAL_RANK"] == "1"
    assert variables["WORLD_SIZE"] == variables["LOCAL_WORLD_SIZE"] == "2"
    assert variables["MASTER_ADDR"] == "127.0.0.1"
    assert find_place(variables) == Place(
        "variables", 1, 2, 1, 2, "127.0.0.1", find_place(SUBMITIT).port
    )


# -- started as one of several, and no process group --------------------------------------------

ALONE = r"WORLD_SIZE=8 in the environment, but there is no process group: each of the 8 processes "
ALONE += r"trains a separate model. Call manyhands.start\(\)"


@pytest.fixture
def under_torchrun(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(core_ranks, "_settled", False)


def model_and_optimizer():
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


PARTS = {
    "AdaScale": lambda model, sgd, path: mh.AdaScale(sgd),
    "LinearScale": lambda model, sgd, path: mh.LinearScale(sgd),
    "AdaptiveDataParallel": lambda model, sgd, path: AdaptiveDataParallel(model, sgd),
    "NoiseScale": lambda model, sgd, path: mh.NoiseScale(sgd, batch_size=8),
    "Ramp": lambda model, sgd, path: mh.Ramp(mh.AdaScale(sgd), max_scale=8),
    "OSS": lambda model, sgd, path: mh.OSS(model.parameters(), optim=torch.optim.SGD, lr=0.1),
    "shard": lambda model, sgd, path: mh.shard(model, sgd, level=2),
    "FSDP": lambda model, sgd, path: mh.FSDP(model),
    "DiLoCo": lambda model, sgd, path: mh.DiLoCo(sgd, every=4),
    "BMUF": lambda model, sgd, path: mh.BMUF(sgd),
    "Cursor": lambda model, sgd, path: mh.Cursor(TensorDataset(torch.ones(8, 2)), batch_size=4),
    "Record": lambda model, sgd, path: mh.Record(path / "record.jsonl"),
    "save": lambda model, sgd, path: mh.save(path, model=model),
}


@pytest.mark.parametrize("make", PARTS.values(), ids=PARTS.keys())
def test_a_part_that_would_train_alone_names_start_once(make, under_torchrun, tmp_path):
    with pytest.warns(UserWarning, match=ALONE) as caught:
        make(*model_and_optimizer(), tmp_path)
    assert sum("no process group" in str(each.message) for each in caught) == 1
    RankGroup.of()  # said once: another warning would be an error here


def test_a_process_that_is_alone_on_purpose_is_not_warned(under_torchrun, monkeypatch):
    mh.AdaScale(model_and_optimizer()[1], world_size=1)
    monkeypatch.setenv("WORLD_SIZE", "1")
    mh.AdaScale(model_and_optimizer()[1])


@pytest.mark.usefixtures("under_torchrun")
@on_ranks(1)
def test_a_process_that_has_left_its_group_is_not_warned(tmp_path):
    model, optimizer = model_and_optimizer()
    mh.LinearScale(optimizer)
    dist.destroy_process_group()
    if core_ranks.os.environ["RANK"]:
        mh.save(tmp_path, model=model)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
