"""Mixes of several texts: how many sequences each gives, and their order."""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np


def apportion(total: int, weights: Sequence[float], caps: Sequence[int | None] | None = None) -> list[int]:
    """Returns ``total`` in parts proportional to ``weights``, by the largest remainder; none exceeds its cap.

    What a cap cuts off goes to the others by their weights; of equal remainders the first part's counts. Of ``counts``
    so made, ``apportion(fewer, counts)`` takes from no part more than it has.
    Errors: ``ValueError`` with their sum if the caps leave less than ``total``.
    """
    limits = [math.inf if cap is None else cap for cap in caps or [None] * len(weights)]
    if sum(limits) < total:
        raise ValueError(f"the caps sum to {sum(limits)}, below the {total} sequences: raise a cap or ask for fewer")
    exact = [Fraction(weight) for weight in weights]
    quotas: dict[int, Fraction] = {}
    free = list(range(len(weights)))
    while True:
        left = total - sum(quotas.values())
        share = left / sum(exact[index] for index in free) if left else Fraction(0)
        full = [index for index in free if share * exact[index] >= limits[index]]
        if not full:
            break
        quotas |= {index: Fraction(limits[index]) for index in full}
        free = [index for index in free if index not in full]
    quotas |= {index: share * exact[index] for index in free}
    counts = [math.floor(quotas[index]) for index in range(len(weights))]
    by_remainder = sorted(free, key=lambda index: (counts[index] - quotas[index], index))
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts


def shuffled(parts: Sequence[np.ndarray], seed: int) -> np.ndarray:  # (n_i, T) each -> (sum of n_i, T)
    """Returns the rows of all parts in an order that ``seed`` decides."""
    rows = np.concatenate(parts)
    return rows[np.random.default_rng(seed).permutation(len(rows))]
