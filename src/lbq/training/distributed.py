"""Several processes under torchrun: their ranks, sums over all of them, and a BatchNorm with common statistics.

Works with NCCL on GPUs and gloo on CPUs; with one process every function is the identity.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.modules.batchnorm import _BatchNorm

from lbq.errors import ConfigError, LbqError

TIMEOUT = timedelta(minutes=10)  # how long processes wait for each other


@dataclass(frozen=True)
class World:
    """This process among all: `rank` of `size`."""

    rank: int = 0
    size: int = 1

    @property
    def main(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flags: Sequence[bool], device: torch.device) -> list[bool]:
        """For each flag, whether any process has set it; all get the same answer."""
        if self.size == 1:
            return list(flags)
        return [bool(count) for count in self.sum(torch.tensor(flags, dtype=torch.float32, device=device)).tolist()]

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all processes, `[processes, ...]`."""
        parts = [tensor] if self.size == 1 else [torch.empty_like(tensor) for _ in range(self.size)]
        if self.size > 1:
            dist.all_gather(parts, tensor)
        return torch.stack(parts)

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite `tensors` by the main process's."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def agree(self, value: int, device: torch.device) -> bool:
        """Whether all processes have the same value."""
        return len(self.gather(torch.tensor(value, device=device)).unique()) == 1

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def check(device: str | None, here: bool = True) -> None:
    """Refuse an unknown device or, where it is needed `here`, one that this machine lacks."""
    if device not in (None, "cpu", "cuda"):
        raise LbqError(f"--device must be cpu or cuda, got {device!r}")
    if here and device == "cuda" and not torch.cuda.is_available():
        raise LbqError("--device cuda: PyTorch sees no GPU here; see lbq doctor")


def start(device: str | None = None) -> tuple[World, torch.device]:
    """Join the processes that torchrun started, if it did, and choose this one's device.

    device: `cpu`, `cuda`, or None for a GPU where there is one.
    """
    check(device)
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    size = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if kind == "cuda":
        if local >= torch.cuda.device_count():
            raise LbqError(f"process {local} has no GPU: this machine has {torch.cuda.device_count()}")
        torch.cuda.set_device(local)
    where = torch.device(kind, local) if kind == "cuda" else torch.device("cpu")
    if size == 1:
        return World(), where
    if not dist.is_initialized():
        store, rank, size = next(iter(rendezvous("env://", timeout=TIMEOUT)))
        store.set_timeout(TIMEOUT)
        store = unused_part(store, rank, size)
        dist.init_process_group(
            "nccl" if kind == "cuda" else "gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT
        )
    return World(dist.get_rank(), dist.get_world_size()), where


def unused_part(store: Store, rank: int, size: int) -> Store:
    """A part of `store`, the same for all processes, that nothing was written to before.

    torchrun keeps its store when it restarts processes, with the addresses of those that are gone, and machines have no
    common number of the attempt. So every process greets with a random word. The main process answers each greeting, old
    ones too, with the new part's name, until all others have confirmed it there.
    """
    if rank == 0:
        name, deadline = uuid4().hex, time.monotonic() + TIMEOUT.total_seconds()
        missing = set(range(1, size))
        while missing:
            if time.monotonic() > deadline:
                raise LbqError(f"processes {sorted(missing)} of {size} did not appear within {TIMEOUT}")
            for other in sorted(missing):
                if store.check([f"{name}/{other}"]):
                    missing.remove(other)
                elif store.check([f"greeting/{other}"]):
                    store.set(f"answer/{store.get(f'greeting/{other}').decode()}", name)
            time.sleep(0.01)
    else:
        greeting = uuid4().hex
        store.set(f"greeting/{rank}", greeting)
        name = store.get(f"answer/{greeting}").decode()
        store.set(f"{name}/{rank}", "here")
    return PrefixStore(name, store)


def stop() -> None:
    """Leave the others, and end gloo's threads.

    A thread of gloo that frees a tensor while Python shuts down aborts the process. Threads end with the last reference to
    the group. Dead trainers hold one: they are collected here. Functions of `torch.distributed.nn.functional` hold the group
    that exists when it is imported: so it is imported above, before there is one.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()


class _SumOverProcesses(torch.autograd.Function):
    """All-reduce forward, all-reduce of gradients backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        total = grads[0].clone()
        dist.all_reduce(total)
        return total


class SyncBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm whose training statistics are those of all processes together, on any device and in any precision.

    Two all-reduces each way, of sums and of squared deviations from the common mean, so that the result equals a single
    process's on the whole batch. `alone`: use this process's statistics, as plain BatchNorm does.
    """

    alone = False

    def forward(self, input: Tensor) -> Tensor:
        if self.alone or not (self.training and dist.is_initialized() and dist.get_world_size() > 1):
            return super().forward(input)
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        axes = [0, 2, 3]
        count = torch.full((1,), x.numel() / x.shape[1], dtype=x.dtype, device=x.device)
        sums: Tensor = _SumOverProcesses.apply(torch.cat([x.sum(axes), count]))  # type: ignore[no-untyped-call]
        total = sums[-1].detach()
        mean = sums[:-1] / total
        centred = x - mean[None, :, None, None]
        squares: Tensor = _SumOverProcesses.apply(centred.square().sum(axes))  # type: ignore[no-untyped-call]
        variance = squares / total
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                assert self.num_batches_tracked is not None
                self.num_batches_tracked.add_(1)
                momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
                self.running_var.lerp_((variance * total / (total - 1)).to(self.running_var.dtype), momentum)
        out = centred * torch.rsqrt(variance + self.eps)[None, :, None, None]
        if self.affine:
            out = out * self.weight[None, :, None, None] + self.bias[None, :, None, None]
        return out.to(input.dtype)


def synchronise_batchnorm(net: nn.Module) -> None:
    """Make every BatchNorm2d of `net` one with common statistics; its parameters, buffers and names stay.

    A user's own network may hold other BatchNorms. They are refused, unless they synchronise by themselves.
    """
    for name, module in net.named_modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = SyncBatchNorm2d
        elif isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm2d | nn.SyncBatchNorm):
            raise ConfigError(
                f"train.sync_batchnorm: layer {name!r} is a {type(module).__name__}, only BatchNorm2d is synchronised: use "
                f"that, or set train.sync_batchnorm=false"
            )
