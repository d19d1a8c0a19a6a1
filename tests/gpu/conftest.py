"""Tests on a GPU: `make gpu PART=1`. With `--device cpu` they run as far as a CPU goes."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cuda", choices=("cuda", "cpu"), help="of the GPU tests")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    wanted = request.config.getoption("--device", default="cuda")
    if wanted == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU that torch can use")
    return wanted


@pytest.fixture
def cuda(device: str) -> str:
    """The device, for what a CPU does not have: streams, pinned memory, synchronization."""
    if device != "cuda":
        pytest.skip("a CPU has no streams and no memory of its own")
    return device


@pytest.fixture(scope="module")  # dry runs in other modules need a process without a group
def group(device: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one rank, which NCCL serves where there is a GPU."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    options = {"device_id": torch.device("cuda", 0)} if device == "cuda" else {}
    dist.init_process_group(backend, store=store, rank=0, world_size=1, **options)
    yield
    dist.destroy_process_group()
