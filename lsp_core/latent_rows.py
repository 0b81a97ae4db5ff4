"""Rows of numbers, one a token, that grow at the end, of which a latent cache consists; and the bytes caches hold."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

SLACK = 16  # a tensor that is too short is made anew with room for a sixteenth more


class Rows:
    """Rows (B, T, F) in one tensor that is longer than they are, by a sixteenth at most once it has grown.

    A row is copied some sixteen times in all; with a new tensor for every token it would be copied T times.
    """

    def __init__(self) -> None:
        self.tensor: Tensor | None = None  # (B, room, F)
        self.start = 0
        self.length = 0

    def append(self, rows: Tensor) -> None:  # (B, n, F)
        """Adds rows, without their gradients. Errors: ``ValueError`` as ``require_alike``."""
        self.require_alike(rows)
        needed = self.length + rows.shape[1]
        if self.tensor is None:
            self._move(rows, needed)
        elif self.start + needed > self.tensor.shape[1] or (
            self.tensor.is_inference() and not torch.is_inference_mode_enabled()  # then it cannot be written to
        ):
            self._move(rows, needed + needed // SLACK)
        assert self.tensor is not None
        end = self.start + self.length
        self.tensor[:, end : end + rows.shape[1]] = rows.detach()
        self.length = needed

    def require_alike(self, rows: Tensor) -> None:
        """Errors: ``ValueError`` if ``rows`` are of another batch, width, dtype or device than those held."""
        if self.tensor is not None and (self.tensor.shape[0], *self.tensor.shape[2:]) != (len(rows), *rows.shape[2:]):
            raise ValueError(
                f"the cache holds {tuple(self.last(self.length).shape)} (sequences, tokens, width) and is given "
                f"{tuple(rows.shape)}: continue it with the same sequences, or reset it"
            )
        if self.tensor is not None and (self.tensor.dtype, self.tensor.device) != (rows.dtype, rows.device):
            raise ValueError(
                f"the cache holds {self.tensor.dtype} on {self.tensor.device} and is given {rows.dtype} on "
                f"{rows.device}: reset it after the model is moved or cast"
            )

    def last(self, count: int) -> Tensor:  # (B, count, F)
        """Returns a view of the last ``count`` rows."""
        assert self.tensor is not None
        assert count <= self.length
        end = self.start + self.length
        return self.tensor[:, end - count : end]

    def keep_last(self, count: int) -> None:
        """Forgets all but the last ``count`` rows, and gives their memory back where they were many."""
        gone = max(self.length - count, 0)
        self.start, self.length = self.start + gone, self.length - gone
        if self.tensor is not None and self.tensor.shape[1] > self.length + 2 * (self.length // SLACK) + SLACK:
            self._move(self.tensor, self.length)

    def drop_last(self, count: int) -> None:
        assert count <= self.length
        self.length -= count

    def map(self, function: Callable[[Tensor], Tensor]) -> None:
        """Applies what changes the batch alone."""
        if self.tensor is not None:
            self.tensor = function(self.tensor)

    def clear(self) -> None:
        self.tensor, self.start, self.length = None, 0, 0

    def _move(self, like: Tensor, room: int) -> None:
        moved = like.detach().new_empty(like.shape[0], room, *like.shape[2:])
        if self.tensor is not None:
            moved[:, : self.length] = self.last(self.length)
        self.tensor, self.start = moved, 0


class Positions(Rows):
    """Positions (B, T, 1) of tokens. ``same``: whether all sequences are known to have the same."""

    def __init__(self) -> None:
        super().__init__()
        self.same = True

    def append(self, rows: Tensor) -> None:
        super().append(rows)
        repeated = len(rows) == 1 or rows.stride(0) == 0
        if self.same and not repeated:  # to compare them on a GPU would wait for it
            self.same = rows.device.type == "cpu" and bool((rows == rows[:1]).all())

    def clear(self) -> None:
        super().clear()
        self.same = True


def bytes_held(cache: Cache) -> int:
    """Returns the bytes of all storages that a cache's tensors lie in, each counted once, whole."""
    storages = [tensor.untyped_storage() for tensor in _tensors(list(vars(cache).values()))]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Rows | CacheLayerMixin):
        yield from _tensors(list(vars(value).values()))
