"""A model run from one block on: the dense input of that block is kept for all micro-batches.

The blocks before it in its stack pass on what they are given, and the block reads its kept input. Exact where a block
reads nothing else of the blocks before it; that is checked at every block that is reached: the dense model has to give
the same outputs that way.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lsp_core.units import find_stacks

log = logging.getLogger(__name__)


class Stream:
    """The micro-batches ``batches`` on their way through ``model``, all of them before block number ``block``.

    ``outputs(batch)`` is a forward pass, in evaluation and inference mode; ``home``: where hidden states wait, none:
    where they were made. ``possible``: False where what lies before a block does not reach the outputs through its
    input alone; then nothing is kept and ``from_block`` is of no use.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batches: Sequence[Tensor],
        outputs: Callable[[Tensor], Tensor],
        *,
        home: torch.device | None = None,
    ) -> None:
        self.model = model
        self.batches = batches
        self.outputs = outputs
        self.home = home
        self.stacks = find_stacks(model)
        self.blocks = [block for stack in self.stacks for block in stack]
        self.block = 0
        self.possible = True
        self._checked = True  # whether the model was run from ``self.block`` on and gave the same
        self.inputs = [batch.new_empty(0) for batch in batches]  # dense input (B, T, D) of block ``self.block``
        self.extras: list[tuple[Any, ...] | None] = [None] * len(batches)  # beside it, in the stack's first block
        self.dense = batches[0].new_empty(0)  # the outputs of the first micro-batch

    def begin(self, index: int, *, whole: bool = True) -> Tensor:
        """Keeps the input of the first block for one micro-batch; returns the dense outputs of a ``whole`` pass.

        The first micro-batch takes a whole pass.
        """
        called: list[int] = []
        with ExitStack() as stack:
            for number, block in enumerate(self.blocks):
                note = block.register_forward_pre_hook(lambda *_, number=number: called.append(number))
                stack.callback(note.remove)
            outputs = self._keep(index, 0, stop=not whole)
        if whole and called != [*range(len(self.blocks))]:
            self._stop("the blocks do not run once each, in order")
        if index == 0:
            assert whole
            self.dense = outputs
        return outputs

    def advance_to(self, block: int) -> None:
        """Runs all micro-batches up to ``block``, and checks that the model can be run from there.

        Errors: ``ValueError`` if ``block`` lies before one already reached.
        """
        if not self.possible:
            return
        if block < self.block:
            raise ValueError(f"block {block} comes before block {self.block}, which is already measured: go in order")
        if block > self.block:
            first = self._stack_of(block).start
            for stop in [block] if self.block >= first else dict.fromkeys((first, block)):
                for index in range(len(self.batches)):
                    self._keep(index, stop, stop=True)
                self.block = stop
            self._checked = False
        if not self._checked and not self._streams():
            self._stop(f"block {block} reads more of the blocks before it than their hidden state")
        self._checked = True

    def pass_on(self, before: Callable[[int], None]) -> None:
        """Runs each micro-batch once through the block that it has reached; ``before(index)`` is called first."""
        following = self.block + 1
        for index in range(len(self.batches)):
            before(index)
            if following == len(self.blocks):
                self.from_block(index)
            else:
                self._keep(index, following, stop=True)
        self.block, self._checked = following, False

    def from_block(self, index: int) -> Tensor:
        """Returns the outputs for one micro-batch, run from ``self.block`` on; stacks before its own run whole."""
        with self._skipping(index):
            return self.outputs(self.batches[index])

    def _streams(self) -> bool:
        """Whether the dense model, run from ``self.block`` on, gives what it gives as a whole."""
        outputs, expected = self.from_block(0), self.dense
        tolerance = 8 * torch.finfo(expected.dtype).eps * expected.abs().max()  # the same products of the same numbers
        return bool((outputs - expected).abs().max() <= tolerance)

    def _stop(self, why: str) -> None:
        if self.possible:
            log.warning("%s: %s: every pass runs the whole model", type(self.model).__name__, why)
        self.possible = False

    def _stack_of(self, block: int) -> range:
        """Returns the blocks of the stack in which ``block`` lies."""
        first = 0
        for stack in self.stacks:
            if block < first + len(stack):
                return range(first, first + len(stack))
            first += len(stack)
        raise IndexError(block)

    def _waiting(self, value: Any) -> Any:
        return value.to(self.home) if self.home is not None and isinstance(value, Tensor) else value

    def _back(self, value: Any) -> Any:
        return value.to(self.model.device) if self.home is not None and isinstance(value, Tensor) else value

    def _keep(self, index: int, block: int, *, stop: bool) -> Tensor:
        """Keeps the dense input of ``block`` for one micro-batch; returns the outputs, of no use where it stops."""
        first = self._stack_of(block).start

        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.inputs[index] = self._waiting(args[0] if args else kwargs["hidden_states"])
            if stop and block != first:
                raise _Reached

        def note_extras(_: nn.Module, __: object, output: object) -> None:
            self.extras[index] = tuple(output[1:]) if isinstance(output, tuple) else None

        def keep_extras(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            read = (*args, *kwargs.values())  # of attention weights that no block reads there may be much
            extras = self.extras[index] or ()
            kept = tuple(self._waiting(extra) if any(extra is value for value in read) else None for extra in extras)
            self.extras[index] = None if self.extras[index] is None else kept
            if stop:
                raise _Reached

        with ExitStack() as stack:
            if first <= self.block < block:
                stack.enter_context(self._skipping(index))
            stack.callback(self.blocks[block].register_forward_pre_hook(keep, with_kwargs=True).remove)
            if block == first and block + 1 in self._stack_of(block):
                stack.callback(self.blocks[block].register_forward_hook(note_extras).remove)
                stack.callback(self.blocks[block + 1].register_forward_pre_hook(keep_extras, with_kwargs=True).remove)
            try:
                return self.outputs(self.batches[index])
            except _Reached:
                return self.batches[index]

    @contextmanager
    def _skipping(self, index: int) -> Iterator[None]:
        """Makes the blocks before ``self.block`` in its stack return what they are given, and itself read its input."""
        hidden = self._back(self.inputs[index])
        extras = None if self.extras[index] is None else tuple(map(self._back, self.extras[index] or ()))

        def passed_on(*args: Any, **kwargs: Any) -> Any:
            result = args[0] if args else kwargs["hidden_states"]
            return result if extras is None else (result, *extras)

        def given(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": hidden})

        skipped = self.blocks[self._stack_of(self.block).start : self.block]
        originals = [(block, block.__dict__.get("forward")) for block in skipped]
        handle = self.blocks[self.block].register_forward_pre_hook(given, with_kwargs=True)
        try:
            for block, _ in originals:
                block.forward = passed_on
            yield
        finally:
            for block, forward in originals:
                del block.forward
                if forward is not None:  # that of an offloaded block
                    block.forward = forward
            handle.remove()


class _Reached(Exception):  # noqa: N818  (no error)
    """Ends a forward pass at a block whose input is kept."""
