"""One process's view of the processes that train together, and what they tell each other.

A group of one process needs no process group of torch and communicates nothing.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store, Work

TIMEOUT = timedelta(minutes=30)  # of one exchange: a validation or a checkpoint that others wait for is within it
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Process ``rank`` of ``size`` that train together; ``device``: where it computes, None: where its model is."""

    rank: int = 0
    size: int = 1
    device: torch.device | None = None

    @classmethod
    def from_environment(
        cls, device: str, *, timeout: timedelta = TIMEOUT, store: Store | None = None, leader: int = 0
    ) -> "Group":
        """Joins the process group that torchrun's variables describe: gloo on the CPU, NCCL on GPUs.

        ``device``: "cpu", or "cuda", of which the process takes the one of its local rank. ``timeout`` of an exchange.
        ``store``: one that they have met at before, and ``leader``: which of torchrun's ranks is then to be rank 0.
        Errors: ``ValueError`` outside torchrun.
        """
        missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR") if name not in os.environ]
        if missing:
            raise ValueError(f"{', '.join(missing)} not set: start the processes with torchrun")
        kind = torch.device(device).type
        local = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
        if kind == "cuda":
            torch.cuda.set_device(local)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
            timeout=timeout,
            device_id=local if kind == "cuda" else None,
            store=store,
            rank=-1 if store is None else (int(os.environ["RANK"]) - leader) % int(os.environ["WORLD_SIZE"]),
            world_size=-1 if store is None else int(os.environ["WORLD_SIZE"]),
        )
        return cls(rank=dist.get_rank(), size=dist.get_world_size(), device=local)

    def close(self) -> None:
        """Leaves the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @property
    def leader(self) -> bool:
        """Whether this process is the one that writes results."""
        return self.rank == 0

    def part(self, count: int) -> slice:
        """Returns this process's contiguous part of ``count`` rows; the sizes of the parts differ by one at most."""
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def largest_part(self, count: int) -> int:
        """Returns the rows of the largest part of ``count``."""
        return -(-count // self.size)

    def sums(self, values: Sequence[float]) -> list[float]:
        """Returns the sum over the processes of each of ``values``, float64, the same bits in all of them."""
        if self.size == 1:
            return list(values)
        parts = torch.empty(self.size, len(values), dtype=torch.float64)
        dist.all_gather_into_tensor(parts, torch.tensor([values], dtype=torch.float64))
        return [sum(column) for column in zip(*parts.tolist(), strict=True)]

    def from_leader(self, value: T) -> T:
        """Returns the leader's ``value``."""
        return self.from_process(value, 0)

    def from_process(self, value: T, source: int) -> T:
        """Returns the ``value`` of process ``source``: a small one, which travels as an object."""
        if self.size == 1:
            return value
        held = [value]
        dist.broadcast_object_list(held, src=source, device=torch.device("cpu"))
        return held[0]

    def raise_together(self, error: Exception | None) -> None:
        """Raises, in every process, the ``error`` of the first that has one."""
        if self.size == 1:
            if error is not None:
                raise error
            return
        first = torch.tensor(self.size if error is None else self.rank)
        dist.all_reduce(first, dist.ReduceOp.MIN)
        if first < self.size:
            raise self.from_process(error, int(first)) or AssertionError

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raises, in every process, an ``OSError`` or ``ValueError`` of one of them inside the ``with`` block."""
        failed: Exception | None = None
        try:
            yield
        except (OSError, ValueError) as error:
            failed = error
        self.raise_together(failed)

    def broadcast(self, tensor: Tensor, source: int) -> Work | None:
        """Starts to fill ``tensor`` with that of process ``source``."""
        work: Work | None = None if self.size == 1 else dist.broadcast(tensor, source, async_op=True)
        return work

    def reduce(self, tensor: Tensor, target: int | None) -> Work | None:
        """Starts to replace ``tensor`` at process ``target``, or everywhere, by its sum over the processes."""
        if self.size == 1:
            return None
        everywhere = target is None
        work: Work = (
            dist.all_reduce(tensor, async_op=True) if everywhere else dist.reduce(tensor, target, async_op=True)
        )
        return work

    def to_leader(
        self, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, source: int
    ) -> Tensor | None:
        """Returns the ``tensor`` (``shape``, on the CPU) of process ``source``, at the leader; None elsewhere."""
        if source == 0 or self.size == 1:
            return tensor if self.leader else None
        if self.leader:
            received = torch.empty(shape, dtype=dtype)
            dist.recv(received, source)
            return received
        if self.rank == source:
            assert tensor is not None
            dist.send(tensor.contiguous(), 0)
        return None

    def gathered(self, value: T) -> list[T]:
        """Returns the ``value`` of each process: small ones, which travel as objects."""
        if self.size == 1:
            return [value]
        found: list[T] = [value] * self.size
        dist.all_gather_object(found, value)
        return found
