"""fairseq's BMUF written out, on real workers, with what is wrong in it.

fairseq 0.12.2 is awkward to install, so its side of docs/migrating.md is this file. Its parameters
after every step are those that fairseq itself gave (tests/test_migrating_bmuf.py compares with the
recorded ones), and what surrounds them follows these facts:

    block    s = η s + ζ mean(anchor - parameters); the next anchor is anchor - s, less η s with
             use_nbm. One sum per tensor, over the default group. η = 0 averages.
    warm-up  at its end parameters are the first worker's, the anchor begins there, and the inner
             optimizer loads the state dict that was taken when it was made, or last loaded.
             That one is not a copy: torch puts its tensors into a state dict as they are.
    saving   the inner optimizer's state dict, and nothing else
    loss     `backward` is the loss's own, so that an inner optimizer for half precision, or one
             with a gradient scaler, is not told of it
"""

import torch
import torch.distributed as dist


class WrittenOut:
    """FairseqBMUF(cfg, optimizer), with the options of its configuration by name."""

    def __init__(
        self,
        optimizer,
        *,
        block_lr=1.0,
        block_momentum=0.875,
        global_sync_iter=50,
        warmup_iterations=500,
        use_nbm=False,
        average_sync=False,
    ):
        self.inner, self.steps = optimizer, 0
        self.rate, self.momentum = block_lr, block_momentum
        self.look_ahead = block_momentum if use_nbm else 0.0
        self.every, self.warmup = global_sync_iter, warmup_iterations
        self.average_sync = average_sync
        self.at_first = optimizer.state_dict()
        self.begin()

    @property
    def param_groups(self):
        return self.inner.param_groups

    @property
    def params(self):
        return [param for group in self.param_groups for param in group["params"]]

    def begin(self):
        self.anchors = [param.detach().clone() for param in self.params]
        self.moved = [torch.zeros_like(anchor) for anchor in self.anchors]

    def zero_grad(self):
        self.inner.zero_grad()

    def backward(self, loss):
        loss.backward()

    def clip_grad_norm(self, max_norm):
        if hasattr(self.inner, "clip_grad_norm"):
            return self.inner.clip_grad_norm(max_norm)
        return torch.nn.utils.clip_grad_norm_(self.params, max_norm)

    def set_lr(self, lr):
        for group in self.param_groups:
            group["lr"] = lr

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            self.inner.step(closure)
        self.steps += 1
        if self.steps == self.warmup:
            self.end_warmup()
        elif self.steps > self.warmup and self.steps % self.every == 0:
            self.meet()

    def end_warmup(self):
        for param in self.params:
            dist.broadcast(param, src=0)
        if self.average_sync:
            self.average_moments()
        else:
            self.inner.load_state_dict(self.at_first)
        self.begin()

    def meet(self):
        for param, anchor, moved in zip(self.params, self.anchors, self.moved, strict=True):
            if self.momentum == 0:
                param.copy_(mean(param))
                continue
            moved.mul_(self.momentum).add_(mean(anchor - param), alpha=self.rate)
            anchor.sub_(moved, alpha=1 + self.look_ahead)
            param.copy_(anchor)
        if self.average_sync:
            self.average_moments()

    def average_moments(self):
        """Adam's; fairseq's other optimizers have nothing to average."""
        for param in self.params:
            for name in ("exp_avg", "exp_avg_sq"):
                if name in self.inner.state[param]:
                    moment = self.inner.state[param][name]
                    moment.copy_(mean(moment))

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state_dict, optimizer_overrides=None):
        self.inner.load_state_dict(state_dict)
        for group in self.param_groups:
            group.update(optimizer_overrides or {})
        self.at_first = self.inner.state_dict()


def mean(tensor):
    total = tensor / dist.get_world_size()
    dist.all_reduce(total)
    return total


class Half:
    """fairseq's inner optimizer for half precision: it trains copies in float32.

    Gradients come to them after a `backward` of its own, and only then.
    """

    def __init__(self, params, make):
        self.params, self.told = list(params), False
        self.copies = [param.detach().float().requires_grad_() for param in self.params]
        self.optimizer = make(self.copies)
        self.param_groups = self.optimizer.param_groups
        self.state_dict = self.optimizer.state_dict

    def zero_grad(self):
        self.told = False
        for param, copy in zip(self.params, self.copies, strict=True):
            param.grad, copy.grad = None, torch.zeros_like(copy)

    def backward(self, loss):
        loss.backward()
        self.told = True

    def step(self, closure=None):
        for param, copy in zip(self.params, self.copies, strict=True):
            if self.told:
                copy.grad.copy_(param.grad)
        self.optimizer.step(closure)
        for param, copy in zip(self.params, self.copies, strict=True):
            param.data.copy_(copy.data)


class Amp:
    """fairseq's inner optimizer with a gradient scaler: its own `backward` multiplies the loss."""

    def __init__(self, optimizer):
        self.optimizer, self.scaler = optimizer, torch.amp.GradScaler("cpu")
        self.param_groups = optimizer.param_groups
        self.state_dict, self.zero_grad = optimizer.state_dict, optimizer.zero_grad

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def clip_grad_norm(self, max_norm):
        self.scaler.unscale_(self.optimizer)
        params = [param for group in self.param_groups for param in group["params"]]
        return torch.nn.utils.clip_grad_norm_(params, max_norm)

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()
