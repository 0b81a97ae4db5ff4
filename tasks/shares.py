"""How a stage's work is cut into shares: runs of neighbours, the costliest of them as cheap as it can be."""

from collections.abc import Callable
from itertools import pairwise

HALVINGS = 60  # of the bound on a share's cost, until two neighbouring floats are left


def contiguous(count: int, shares: int, cost: Callable[[int, int], float]) -> list[range]:
    """Returns at most ``shares`` ranges that cover ``range(count)`` once, in order, the dearest as cheap as can be.

    ``cost(start, stop)`` is that of a range; it must not fall where the range grows at either end.
    """
    if count == 0:
        return []
    low, high = max(cost(i, i + 1) for i in range(count)), cost(0, count)
    best = _packed(count, high, cost)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        packed = _packed(count, middle, cost)
        if len(packed) <= shares:
            high, best = middle, packed
        else:
            low = middle
    return best


def _packed(count: int, bound: float, cost: Callable[[int, int], float]) -> list[range]:
    """Returns ranges that are each as long as ``bound`` allows, or one long."""
    starts = [0]
    for stop in range(1, count + 1):
        if stop - starts[-1] > 1 and cost(starts[-1], stop) > bound:
            starts.append(stop - 1)
    return [range(*pair) for pair in pairwise([*starts, count])]
