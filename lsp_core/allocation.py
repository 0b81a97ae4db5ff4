"""Rank allocation: how many directions each unit removes so that a share of all parameters goes.

A *ratio* is the share removed of the parameters of the targeted layers: shared factors counted once, units left dense
counted. *Limits* are the most directions that single units may lose, by unit; 0 keeps one dense.
Source: paper, section 'Measured-KL Allocation'.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import accumulate

from lsp_core.units import Unit

Limits = Mapping[str, int]
NAMED = 5  # units that an error lists


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


def find_limits(units: Sequence[Unit], min_rank: Mapping[str, int], keep_dense: Sequence[str] = ()) -> dict[str, int]:
    """Returns the limits of the units that shell patterns on their names, or on their members' names, cap.

    ``min_rank``: the least rank by pattern, the largest counts where several match; ``keep_dense``: patterns of units
    that lose nothing.
    Errors: ``ValueError`` if a pattern matches no unit.
    """
    limits: dict[str, int] = {}
    caps: list[tuple[str, int | None]] = [*min_rank.items(), *((pattern, None) for pattern in keep_dense)]
    for pattern, rank in caps:
        matched = [u for u in units if any(fnmatch(name, pattern) for name in (u.name, *u.members))]
        if not matched:
            names = ", ".join(unit.name for unit in units[:NAMED]) + (", ..." if len(units) > NAMED else "")
            raise ValueError(f"pattern {pattern!r} of the allocation matches no unit; the units are {names}")
        for unit in matched:
            limit = 0 if rank is None else max(0, unit.dimension - rank)
            limits[unit.name] = min(limit, limits.get(unit.name, limit))
    return limits


def largest_ratio(curves: Sequence[UnitCurve], limits: Limits | None = None) -> float:
    """Returns the largest ratio that ``greedy`` reaches."""
    deepest = sum(max(0, *(curve.unit.saved(k) for k in (0, *_allowed(curve, limits)))) for curve in curves)
    return deepest / sum(curve.unit.parameters for curve in curves)


def largest_uniform_ratio(units: Sequence[Unit], limits: Limits | None = None) -> float:
    """Returns the largest ratio that ``uniform_parameters`` and ``uniform_rank`` reach."""
    kept = sum(min(unit.factor_parameters(_least_rank(unit, limits)), unit.parameters) for unit in units)
    return 1 - kept / sum(unit.parameters for unit in units)


def greedy_moves(curves: Sequence[UnitCurve], ratio: float, *, limits: Limits | None = None) -> list[Move]:
    """Returns the moves, none trimmed, until the savings reach ``ratio``.

    Each is the one with the smallest marginal cost per saved parameter over all units and all higher grid counts within
    the limits that save more; of equals, the one that saves most, then the first unit.
    Errors: ``UnreachableRatio``; ``ValueError`` for a ratio outside (0, 1).
    """
    total = sum(curve.unit.parameters for curve in curves)
    largest = largest_ratio(curves, limits)
    check_ratio(ratio, largest)
    deepest = round(largest * total)
    curves = [_cut(curve, limits) for curve in curves]
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


def greedy(
    curves: Sequence[UnitCurve], ratio: float, *, limits: Limits | None = None, at_least: bool = False
) -> Allocation:
    """Returns the measured-KL allocation, the last move trimmed to the count whose savings come nearest the target.

    ``at_least``: to the count with the smallest savings that reach it.
    Errors: as ``greedy_moves``.
    """
    moves = greedy_moves(curves, ratio, limits=limits)
    removed = {curve.unit.name: 0 for curve in curves}
    for move in moves[:-1]:
        removed[curves[move.unit].unit.name] = move.after
    last = moves[-1]
    unit = curves[last.unit].unit
    total = sum(curve.unit.parameters for curve in curves)
    wanted = ratio * total - sum(c.unit.saved(removed[c.unit.name]) for c in curves) + unit.saved(last.before)
    counts = [k for k in range(last.before + 1, last.after + 1) if unit.saved(k) > unit.saved(last.before)]
    if at_least:  # the last count does, but for rounding in the ratio
        counts = [k for k in counts if unit.saved(k) >= wanted] or counts[-1:]
    removed[unit.name] = min(counts, key=lambda k: abs(unit.saved(k) - wanted))
    cost = sum(curve.cost(removed[curve.unit.name]) for curve in curves)
    return _allocation([curve.unit for curve in curves], removed, cost)


def uniform_parameters(
    units: Sequence[Unit], ratio: float, *, limits: Limits | None = None, at_least: bool = False
) -> Allocation:
    """Returns ranks that are one share of what each layer could keep if it were factored by itself.

    r_u = round(rho N_u / sum over members of (D + other side)), no less than the limits leave; what a tie saves by
    sharing a factor raises rho until the ratio is met. This reproduces the paper's uniform rows. ``at_least``: the
    largest rho whose rounded ranks reach the ratio.
    Errors: ``UnreachableRatio``; ``ValueError`` for a ratio outside (0, 1).
    """

    def retained(unit: Unit, rho: float) -> float:
        return rho * unit.parameters / (len(unit.members) * unit.dimension + sum(unit.others))

    return _uniform(units, ratio, retained, limits, at_least=at_least)


def uniform_rank(
    units: Sequence[Unit], ratio: float, *, limits: Limits | None = None, at_least: bool = False
) -> Allocation:
    """Returns ranks that are one share of each unit's dimension, r_u = round(rho D); else as ``uniform_parameters``."""
    return _uniform(units, ratio, lambda unit, rho: rho * unit.dimension, limits, at_least=at_least)


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


def _uniform(
    units: Sequence[Unit],
    ratio: float,
    retained: Callable[[Unit, float], float],
    limits: Limits | None,
    *,
    at_least: bool,
) -> Allocation:
    """Binary search on the share rho over unrounded ranks, then rounds; over rounded ones if ``at_least``.

    A unit whose rank saves nothing stays dense.
    """
    total = sum(unit.parameters for unit in units)
    least = {unit.name: _least_rank(unit, limits) for unit in units}

    def kept_at(rho: float) -> float:
        return sum(min(u.factor_parameters(1) * max(least[u.name], retained(u, rho)), u.parameters) for u in units)

    def removed_at(rho: float) -> dict[str, int]:
        counts = {u.name: u.dimension - max(least[u.name], round(retained(u, rho))) for u in units}
        return {u.name: counts[u.name] if counts[u.name] > 0 and u.saved(counts[u.name]) > 0 else 0 for u in units}

    def rounded_at(rho: float) -> float:
        removed = removed_at(rho)
        return total - sum(unit.saved(removed[unit.name]) for unit in units)

    check_ratio(ratio, largest_uniform_ratio(units, limits))
    measure = rounded_at if at_least else kept_at
    low, high = 0.0, float(max(len(unit.members) for unit in units))  # every unit is dense at the upper end
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if measure(middle) > (1 - ratio) * total else (middle, high)
    return _allocation(units, removed_at(low), float("nan"))


def _least_rank(unit: Unit, limits: Limits | None) -> int:
    return max(1, unit.dimension - (limits or {}).get(unit.name, unit.dimension))


def _allowed(curve: UnitCurve, limits: Limits | None) -> tuple[int, ...]:
    limit = (limits or {}).get(curve.unit.name, curve.unit.dimension)
    return curve.counts[: bisect_right(curve.counts, limit)]


def _cut(curve: UnitCurve, limits: Limits | None) -> UnitCurve:
    """Returns ``curve`` without the counts that the unit may not lose."""
    counts = _allowed(curve, limits)
    return curve if counts == curve.counts else UnitCurve(unit=curve.unit, counts=counts, kl=curve.kl[: len(counts)])


def _allocation(units: Sequence[Unit], removed: dict[str, int], cost: float) -> Allocation:
    saved = sum(unit.saved(removed[unit.name]) for unit in units)
    return Allocation(removed=removed, saved=saved, total=sum(unit.parameters for unit in units), cost=cost)
