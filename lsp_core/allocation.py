"""Rank allocation: how many directions each unit removes so that a share of all parameters goes.

A *ratio* is the share removed of the parameters of the targeted layers: shared factors counted once, units left dense
counted.
Source: paper, section 'Measured-KL Allocation'.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from lsp_core.units import Unit


class UnreachableRatio(ValueError):  # noqa: N818 - the name that callers know
    """A ratio that no allocation reaches; the message states the largest that one does."""


@dataclass(frozen=True, kw_only=True)
class UnitCurve:
    """The measured cost of a unit: ``kl[i]``, nats a token, at removed count ``counts[i]``, ascending from above 0."""

    unit: Unit
    counts: tuple[int, ...]
    kl: tuple[float, ...]

    @property
    def running_maximum(self) -> tuple[float, ...]:
        """The cost at each count, made nondecreasing and not below 0."""
        return tuple(accumulate(self.kl, max, initial=0.0))[1:]

    def cost(self, removed: int) -> float:
        """Returns the running maximum at ``removed``, interpolated linearly between the measured counts and 0 at 0.

        Errors: ``ValueError`` beyond the deepest measured count.
        """
        counts, costs = (0, *self.counts), (0.0, *self.running_maximum)
        if not 0 <= removed <= counts[-1]:
            raise ValueError(f"unit {self.unit.name}: {removed} directions lie outside the measured 0 .. {counts[-1]}")
        right = bisect_left(counts, removed)
        if counts[right] == removed:
            return costs[right]
        left = right - 1
        share = (removed - counts[left]) / (counts[right] - counts[left])
        return costs[left] + share * (costs[right] - costs[left])


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """``removed`` directions by unit, 0 where dense; ``cost``: the sum of isolated costs, NaN without curves."""

    removed: dict[str, int]
    saved: int
    total: int
    cost: float

    @property
    def ratio(self) -> float:
        """The realized ratio."""
        return self.saved / self.total


@dataclass(frozen=True, kw_only=True)
class Move:
    """One greedy step: unit number ``unit`` goes from ``before`` to ``after`` removed directions."""

    unit: int
    before: int
    after: int


def greedy_moves(curves: Sequence[UnitCurve], ratio: float) -> list[Move]:
    """Returns the moves, none trimmed, until the savings reach ``ratio``.

    Each is the one with the smallest marginal cost per saved parameter over all units and all higher grid counts that
    save more; of equals, the one that saves most, then the first unit.
    Errors: ``UnreachableRatio``; ``ValueError`` for a ratio outside (0, 1).
    """
    total = sum(curve.unit.parameters for curve in curves)
    deepest = sum(max((0, *(curve.unit.saved(k) for k in curve.counts))) for curve in curves)
    check_ratio(ratio, deepest / total)
    state = [0] * len(curves)
    best = [_best_move(curve, 0) for curve in curves]
    moves: list[Move] = []
    saved = 0
    while saved < min(ratio * total, deepest):  # the product may be rounded up past what is there
        index = min((i for i, move in enumerate(best) if move), key=lambda i: (*_key(best[i]), i))
        (_, gain, after) = best[index]  # type: ignore[misc]
        moves.append(Move(unit=index, before=state[index], after=after))
        state[index] = after
        saved += gain
        best[index] = _best_move(curves[index], after)
    return moves


def greedy(curves: Sequence[UnitCurve], ratio: float) -> Allocation:
    """Returns the measured-KL allocation, the last move trimmed to the count whose savings come nearest the target."""
    moves = greedy_moves(curves, ratio)
    removed = {curve.unit.name: 0 for curve in curves}
    for move in moves[:-1]:
        removed[curves[move.unit].unit.name] = move.after
    last = moves[-1]
    unit = curves[last.unit].unit
    total = sum(curve.unit.parameters for curve in curves)
    wanted = ratio * total - sum(c.unit.saved(removed[c.unit.name]) for c in curves) + unit.saved(last.before)
    counts = [k for k in range(last.before + 1, last.after + 1) if unit.saved(k) > unit.saved(last.before)]
    removed[unit.name] = min(counts, key=lambda k: abs(unit.saved(k) - wanted))
    cost = sum(curve.cost(removed[curve.unit.name]) for curve in curves)
    return _allocation([curve.unit for curve in curves], removed, cost)


def uniform_parameters(units: Sequence[Unit], ratio: float) -> Allocation:
    """Returns ranks that are one share of what each layer could keep if it were factored by itself.

    r_u = round(rho N_u / sum over members of (D + other side)); what a tie saves by sharing a factor raises rho until
    the ratio is met. This reproduces the paper's uniform rows.
    """

    def retained(unit: Unit, rho: float) -> float:
        return rho * unit.parameters / (len(unit.members) * unit.dimension + sum(unit.others))

    return _uniform(units, ratio, retained)


def uniform_rank(units: Sequence[Unit], ratio: float) -> Allocation:
    """Returns ranks that are one share of each unit's dimension, r_u = round(rho D)."""
    return _uniform(units, ratio, lambda unit, rho: rho * unit.dimension)


def check_ratio(ratio: float, largest: float) -> None:
    """Errors: ``ValueError`` for a ratio outside (0, 1), ``UnreachableRatio`` for one above ``largest``."""
    if not 0 < ratio < 1:
        raise ValueError(f"ratio {ratio} lies outside (0, 1)")
    if ratio > largest:
        raise UnreachableRatio(f"ratio {ratio} cannot be reached: the largest that can is {int(largest * 1e4) / 1e4}")


def _best_move(curve: UnitCurve, before: int) -> tuple[float, int, int] | None:
    """Returns (marginal cost, parameters gained, count after) of the unit's best move, or None if none saves more."""
    start = curve.unit.saved(before)
    moves = [
        ((cost - curve.cost(before)) / (curve.unit.saved(k) - start), curve.unit.saved(k) - start, k)
        for k, cost in zip(curve.counts, curve.running_maximum, strict=True)
        if k > before and curve.unit.saved(k) > start
    ]
    return min(moves, key=_key, default=None)


def _key(move: tuple[float, int, int] | None) -> tuple[float, int]:
    assert move is not None
    return move[0], -move[1]


def _uniform(units: Sequence[Unit], ratio: float, retained: Callable[[Unit, float], float]) -> Allocation:
    """Binary search on the share rho over unrounded ranks, then rounds; a unit whose rank saves nothing stays dense."""
    total = sum(unit.parameters for unit in units)

    def kept_at(rho: float) -> float:
        return sum(min(u.factor_parameters(1) * max(1.0, retained(u, rho)), u.parameters) for u in units)

    check_ratio(ratio, 1 - sum(unit.factor_parameters(1) for unit in units) / total)
    low, high = 0.0, float(max(len(unit.members) for unit in units))  # every unit is dense at the upper end
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if kept_at(middle) > (1 - ratio) * total else (middle, high)
    counts = {unit.name: unit.dimension - max(1, round(retained(unit, low))) for unit in units}
    removed = {u.name: counts[u.name] if counts[u.name] > 0 and u.saved(counts[u.name]) > 0 else 0 for u in units}
    return _allocation(units, removed, float("nan"))


def _allocation(units: Sequence[Unit], removed: dict[str, int], cost: float) -> Allocation:
    saved = sum(unit.saved(removed[unit.name]) for unit in units)
    return Allocation(removed=removed, saved=saved, total=sum(unit.parameters for unit in units), cost=cost)
