import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.mixing import apportion, shuffled

WEIGHTS = st.sampled_from([0.1, 0.3, 0.5, 1.0, 2.0, 3.7, 100.0])


def quotas(total: int, weights: list[float], limits: list[float]) -> list[float]:
    """Returns min(cap, s x weight) for the s at which they sum to ``total``, found by halving."""
    low, high = 0.0, 2 * total / min(weights)
    for _ in range(200):
        middle = (low + high) / 2
        filled = sum(min(limit, middle * weight) for limit, weight in zip(limits, weights, strict=True))
        low, high = (middle, high) if filled < total else (low, middle)
    return [min(limit, high * weight) for limit, weight in zip(limits, weights, strict=True)]


@given(st.lists(st.tuples(WEIGHTS, st.none() | st.integers(1, 8)), min_size=1, max_size=4), st.integers(1, 12))
def test_no_other_counts_are_nearer_to_the_shares(parts: list[tuple[float, int | None]], total: int) -> None:
    weights, caps = [weight for weight, _ in parts], [cap for _, cap in parts]
    limits = [float("inf") if cap is None else float(cap) for cap in caps]
    if sum(limits) < total:
        with pytest.raises(ValueError, match=rf"the caps sum to {sum(limits):.0f}, below the {total} sequences: raise"):
            apportion(total, weights, caps)
        return
    counts = apportion(total, weights, caps)
    assert sum(counts) == total
    assert all(0 <= count <= limit for count, limit in zip(counts, limits, strict=True))
    exact = quotas(total, weights, limits)

    def away(candidate: tuple[int, ...] | list[int]) -> float:
        return sum((count - quota) ** 2 for count, quota in zip(candidate, exact, strict=True))

    ranges = [range(min(total, int(min(limit, total))) + 1) for limit in limits]
    nearest = min(away(candidate) for candidate in itertools.product(*ranges) if sum(candidate) == total)
    assert away(counts) <= nearest + 1e-9  # 4 squares of differences up to 12, in rounded quotas


def test_shares_by_hand() -> None:
    assert apportion(10, [1, 1, 1]) == [4, 3, 3]  # of equal remainders the first
    assert apportion(100, [2.0, 1.0, 1.0], [20, None, None]) == [20, 40, 40]
    assert apportion(100, [2.0, 1.0, 1.0], [20, 30, None]) == [20, 30, 50]  # the second is full by what the first lost
    assert apportion(60, [5.0, 1.0], [20, 40]) == [20, 40]
    assert apportion(3, [1000.0, 1.0]) == [3, 0]


@given(st.lists(WEIGHTS, min_size=1, max_size=6), st.integers(1, 60), st.data())
def test_fewer_of_what_was_apportioned_are_some_of_it(weights: list[float], total: int, data: st.DataObject) -> None:
    counts = apportion(total, weights)
    fewer = apportion(data.draw(st.integers(1, total)), counts)
    assert all(few <= many for few, many in zip(fewer, counts, strict=True))
    assert apportion(total, counts) == counts


def test_shuffling_keeps_every_row_and_depends_on_the_seed() -> None:
    parts = [np.arange(40).reshape(20, 2), np.arange(100, 130).reshape(15, 2)]
    mixed = shuffled(parts, 3)
    assert sorted(map(tuple, mixed)) == sorted(map(tuple, np.concatenate(parts)))
    assert np.array_equal(mixed, shuffled(parts, 3))
    assert not np.array_equal(mixed, shuffled(parts, 4))
    half = mixed[:17, 0] < 100
    assert 0 < half.sum() < 17  # both texts among the first
