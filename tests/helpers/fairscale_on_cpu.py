"""fairscale's FullyShardedDataParallel without a GPU, so that it can be compared with ours.

It talks to CUDA only to let copies and computation overlap. Here all of these calls do nothing, and
what it does in between is done by the CPU, one thing after the other. A script on a CPU:

    torchrun --nproc-per-node 2 fairscale_on_cpu.py script.py
"""

import contextlib
import os
import runpy
import sys
import warnings
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

STREAMS = ("fp32_to_fp16", "all_gather", "post_backward")


@contextlib.contextmanager
def fairscale_on_cpu():
    from fairscale.nn.data_parallel import fully_sharded_data_parallel as theirs

    wrapper = theirs.FullyShardedDataParallel
    stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
    set_up, scatter = wrapper._setup_streams, dist.reduce_scatter_tensor

    def with_streams(self):
        set_up(self)
        if self._is_root:
            self._streams.update(dict.fromkeys(STREAMS, stream))

    def scatter_flat(output, given, group=None, async_op=False):
        return scatter(output.view(-1), given.view(-1), group=group)  # gloo wants one dimension

    with contextlib.ExitStack() as stack:
        for owner, name, instead in (
            (torch.cuda, "is_available", lambda: False),
            (torch.cuda, "synchronize", lambda *_: None),
            (torch.cuda, "current_stream", lambda *_: stream),
            (torch.cuda, "stream", lambda *_: contextlib.nullcontext()),
            (torch.Tensor, "cuda", lambda self, *_, **__: self),
            (torch.Tensor, "record_stream", lambda self, *_: None),
            (dist, "_reduce_scatter_base", scatter_flat),
            (theirs, "_get_default_cuda_device", lambda *_: torch.device("cpu")),
            (wrapper, "_setup_streams", with_streams),
        ):
            stack.enter_context(mock.patch.object(owner, name, instead))
        yield wrapper


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[1])))
    with fairscale_on_cpu():
        runpy.run_path(sys.argv[1], run_name="__main__")
