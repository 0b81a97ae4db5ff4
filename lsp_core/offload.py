"""Block-wise offload: the blocks' weights stay in host memory, and each block is on the device while it runs.

Everything else of the model (embeddings, head, norms, buffers, what several blocks share) is on the device throughout.
The weights of a block lie in one host buffer, pinned where the device is a GPU, and move by one copy into a slot on the
device. A slot keeps its block until another needs the place, so a block that runs on many micro-batches in a row moves
once. On a GPU there are two slots: while a block runs, the one that followed it the last time is copied into the other
one by a stream of its own. Two bytes a weight move in the time of 2 T multiply-adds a weight, T the tokens of a
micro-batch, whatever the size of the model: the copy is hidden from T = FLOP/s / (bytes/s) on, some 7,000 tokens at 350
TFLOP/s and 50 GB/s.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lsp_core.units import find_blocks

ALIGNMENT = 256  # bytes


@contextmanager
def offloaded(model: PreTrainedModel, device: str | torch.device) -> Iterator["Offload"]:
    """Makes ``model``, whose weights are in host memory, run on ``device`` inside the ``with`` block.

    For forward passes alone. Weights may be changed in place meanwhile, where they are at home.
    Errors: ``ValueError`` if its first weight, whose device is that of the inputs, is in a block.
    """
    blocks = find_blocks(model)
    outside = _outside(model, blocks)
    if next(model.parameters()) not in set(outside):
        raise ValueError(f"{type(model).__name__} cannot be offloaded: its first weight is in a block: offload: false")
    offload = Offload(blocks, outside=outside, device=torch.device(device))
    try:
        with offload.placed(model):
            yield offload
    finally:
        offload.close()


def rest_bytes(model: nn.Module) -> int:
    """Returns the bytes of the parameters that stay on the device."""
    return sum(parameter.nbytes for parameter in _outside(model, find_blocks(model)))


def slot_sizes(model: nn.Module) -> list[int]:
    """Returns the bytes of the slot that each block of ``model`` needs."""
    blocks = find_blocks(model)
    return [sum(_padded(p) for p in own) for own in _own(blocks, _outside(model, blocks))]


class Offload:
    """The weights of ``blocks`` in host memory, but for the parameters ``outside``, and the slots on ``device``.

    ``moves`` counts the copies of a block to the device.
    """

    def __init__(self, blocks: Sequence[nn.Module], *, outside: Sequence[nn.Parameter], device: torch.device) -> None:
        self.device = device
        self.moves = 0
        self.blocks = blocks
        self.outside = outside
        asynchronous = device.type == "cuda"
        self.homes = [_Home(own, pinned=asynchronous) for own in _own(blocks, outside)]
        self._stream = torch.cuda.Stream(device) if asynchronous else None
        self._slots: list[_Slot] = []  # the one used last comes last
        self._following: dict[int, int] = {}  # the block that ran after each
        self._last: int | None = None

    @contextmanager
    def placed(self, model: PreTrainedModel) -> Iterator[None]:
        """Puts what stays on the device there, and the blocks' weights around each of their forward passes."""
        homes = [(parameter, parameter.data) for parameter in self.outside]
        buffers = [
            (module, name, buffer)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        forwards = [block.forward for block in self.blocks]
        try:
            for parameter, home in homes:
                parameter.data = home.to(self.device)
            for module, name, buffer in buffers:
                module._buffers[name] = buffer.to(self.device)
            for number, block in enumerate(self.blocks):
                block.forward = self._moving(number, forwards[number])
            yield
        finally:
            for block in self.blocks:
                block.__dict__.pop("forward", None)
            for parameter, home in homes:
                parameter.data = home
            for module, name, buffer in buffers:
                module._buffers[name] = buffer

    def close(self) -> None:
        """Gives the slots back, and each weight memory of its own, so that replacing one frees it."""
        if self._stream is not None:
            torch.cuda.synchronize(self.device)
        self._slots.clear()
        for home in self.homes:
            home.leave()

    def _moving(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        home = self.homes[number]

        @wraps(forward)
        def moved(*args: Any, **kwargs: Any) -> Any:
            slot = self._bring(number)
            if self._last is not None:
                self._following[self._last] = number
            self._last = number
            if self._stream is not None:
                torch.cuda.current_stream(self.device).wait_event(slot.filled)
                self._bring(self._following.get(number, number), beside=slot)
            home.point(home.laid_out(slot.buffer))
            try:
                return forward(*args, **kwargs)
            finally:
                home.point(home.views)
                if self._stream is not None:
                    slot.read.record(torch.cuda.current_stream(self.device))

        return moved

    def _bring(self, number: int, *, beside: "_Slot | None" = None) -> "_Slot":
        """Returns the slot that holds block ``number`` as it is at home; ``beside`` keeps what it holds."""
        content = (number, self.homes[number].versions())
        slot = next((slot for slot in self._slots if slot.content == content), None)
        if slot is None:
            slot = self._free(beside)
            self._fill(slot, number)
            slot.content = content
        if beside is None:
            self._slots.remove(slot)
            self._slots.append(slot)
        return slot

    def _free(self, beside: "_Slot | None") -> "_Slot":
        if not self._slots:
            with torch.inference_mode(False):
                size = max(home.size for home in self.homes)
                for _ in range(1 if self._stream is None else 2):
                    self._slots.append(_Slot(size, self.device))
        return next(slot for slot in self._slots if slot is not beside)

    def _fill(self, slot: "_Slot", number: int) -> None:
        home = self.homes[number]
        target = slot.buffer[: home.size]
        self.moves += 1
        if self._stream is None:
            target.copy_(home.buffer)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(slot.read)
            target.copy_(home.buffer, non_blocking=True)
            slot.filled.record(self._stream)


class _Home:
    """The weights of one block, one after the other in a buffer where they were before."""

    def __init__(self, parameters: Sequence[nn.Parameter], *, pinned: bool) -> None:
        self.parameters = parameters
        self.size = sum(map(_padded, parameters))
        place = parameters[0].device if parameters else torch.device("cpu")
        self.buffer = torch.empty(self.size, dtype=torch.uint8, device=place, pin_memory=pinned)
        self.views = self.laid_out(self.buffer)
        for parameter, view in zip(parameters, self.views, strict=True):
            view.copy_(parameter.data)
            parameter.data = view

    def laid_out(self, buffer: Tensor) -> list[Tensor]:
        """Returns the views of ``buffer`` that are the parameters."""
        views, start = [], 0
        with torch.inference_mode(False):  # a parameter that points to a slot stays what it is
            for parameter in self.parameters:
                part = buffer[start : start + parameter.nbytes]
                views.append(part.view(parameter.dtype).view(parameter.shape))
                start += _padded(parameter)
        return views

    def point(self, views: Sequence[Tensor]) -> None:
        """Makes the parameters ``views``."""
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view

    def leave(self) -> None:
        """Makes the parameters tensors of their own."""
        with torch.inference_mode(False):
            self.point([view.clone() for view in self.views])
        self.views.clear()
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def versions(self) -> tuple[int, ...]:
        """Returns what changes when a weight is changed in place."""
        return tuple(parameter._version for parameter in self.parameters)


class _Slot:
    """Room for one block on the device.

    ``content``: the block's number and the versions of its weights; ``filled``, ``read``: events of the last copy into
    it and of the last forward pass that read it.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.buffer = torch.empty(size, dtype=torch.uint8, device=device)
        self.content: tuple[int, tuple[int, ...]] | None = None
        if device.type == "cuda":
            self.filled, self.read = torch.cuda.Event(), torch.cuda.Event()
            self.read.record(torch.cuda.current_stream(device))


def _padded(parameter: Tensor) -> int:
    return -(-parameter.nbytes // ALIGNMENT) * ALIGNMENT


def _outside(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Returns the parameters that are not one block's alone."""
    holders = Counter(parameter for block in blocks for parameter in set(block.parameters()))
    inside = {module for block in blocks for module in block.modules()}
    elsewhere = {p for module in model.modules() if module not in inside for p in module.parameters(recurse=False)}
    return [p for p in model.parameters() if holders[p] != 1 or p in elsewhere]


def _own(blocks: Sequence[nn.Module], outside: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Returns the parameters of each block that move with it."""
    staying = set(outside)
    return [[parameter for parameter in block.parameters() if parameter not in staying] for block in blocks]
