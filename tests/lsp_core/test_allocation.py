"""Allocation: the greedy against the exact optimum, trimming, running maxima, ties, and what cannot be reached."""

import math
import random

import numpy as np
import pytest
from scipy.optimize import LinearConstraint, milp

from lsp_core.allocation import (
    Allocation,
    UnitCurve,
    UnreachableRatio,
    greedy,
    greedy_moves,
    uniform_parameters,
    uniform_rank,
)
from lsp_core.units import Unit


def make_unit(name, dimension, *others, block=0):
    return Unit(
        name=name,
        side="input",
        members=tuple(f"{name}.{i}" for i in range(len(others))),
        dimension=dimension,
        others=others,
        block=block,
        roles=("",) * len(others),
    )


def random_curves(seed):
    """Units of odd shapes and ties; noisy curves, neither convex nor nondecreasing."""
    rng = random.Random(seed)
    curves = []
    for index in range(rng.randint(3, 9)):
        unit = make_unit(
            f"u{index}", rng.randint(17, 90), *(rng.randint(17, 150) for _ in range(rng.choice([1, 1, 2, 3])))
        )
        counts = tuple(sorted({round(i * unit.dimension / 8) for i in range(1, 8)}))
        scale = 10 ** rng.uniform(-3, 1)
        kl = tuple(scale * (k / unit.dimension) ** rng.uniform(0.5, 5) * rng.uniform(0.5, 1.5) for k in counts)
        curves.append(UnitCurve(unit=unit, counts=counts, kl=kl))
    return curves


def total_of(curves):
    return sum(curve.unit.parameters for curve in curves)


def replay(curves, moves):
    state = [0] * len(curves)
    for move in moves:
        assert state[move.unit] == move.before < move.after
        state[move.unit] = move.after
    return state


def cost_of(curves, state):
    return sum(curve.cost(k) for curve, k in zip(curves, state, strict=True))


def saved_of(curves, state):
    return sum(curve.unit.saved(k) for curve, k in zip(curves, state, strict=True))


def exact_optimum(curves, ratio):
    """The least sum of costs over the grid points, 0 among them, that saves the target: one binary a unit and point."""
    points = [(i, k) for i, curve in enumerate(curves) for k in (0, *curve.counts)]
    cost = np.array([curves[i].cost(k) for i, k in points])
    saved = np.array([curves[i].unit.saved(k) for i, k in points])
    one_each = np.array([[float(i == unit) for i, _ in points] for unit in range(len(curves))])
    target = math.ceil(ratio * total_of(curves))
    result = milp(
        cost,
        integrality=np.ones(len(points)),
        bounds=(0, 1),
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(saved[None], target, np.inf)],
        options={"mip_rel_gap": 0},
    )
    assert result.success
    chosen = np.round(result.x)
    assert saved @ chosen >= target
    return float(cost @ chosen)


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("ratio", [0.1, 0.3, 0.5, 0.7])
def test_greedy_is_within_one_move_of_the_optimum(seed, ratio):
    """The moves follow the lower convex hulls, so the state before the last one costs less than any that meets the
    target, and the optimum lies between the costs before and after it."""
    curves = random_curves(seed)
    moves = greedy_moves(curves, ratio)
    before, after = replay(curves, moves[:-1]), replay(curves, moves)
    assert saved_of(curves, before) < ratio * total_of(curves) <= saved_of(curves, after)
    optimum = exact_optimum(curves, ratio)
    rounding = 1e-12 * cost_of(curves, after)
    assert cost_of(curves, before) <= optimum + rounding
    assert optimum <= cost_of(curves, after) + rounding


@pytest.mark.parametrize("seed", range(8))
def test_each_move_has_the_least_marginal_cost(seed):
    curves = random_curves(seed)
    state = [0] * len(curves)
    for move in greedy_moves(curves, 0.6):
        marginal = {
            (i, k): (curve.cost(k) - curve.cost(now)) / (curve.unit.saved(k) - curve.unit.saved(now))
            for i, (curve, now) in enumerate(zip(curves, state, strict=True))
            for k in curve.counts
            if k > now and curve.unit.saved(k) > curve.unit.saved(now)
        }
        assert marginal[move.unit, move.after] == min(marginal.values())
        state[move.unit] = move.after


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("ratio", [0.05, 0.37, 0.7])
def test_the_last_move_is_trimmed_to_the_nearest(seed, ratio):
    curves = random_curves(seed)
    *before, last = greedy_moves(curves, ratio)
    state = replay(curves, before)
    target = ratio * total_of(curves)
    unit = curves[last.unit].unit
    allocation = greedy(curves, ratio)

    def distance(k):
        return abs(saved_of(curves, [*state[: last.unit], k, *state[last.unit + 1 :]]) - target)

    reached = allocation.removed[unit.name]
    attainable = [k for k in range(last.before + 1, last.after + 1) if unit.saved(k) > unit.saved(last.before)]
    assert reached in attainable
    assert distance(reached) == min(map(distance, attainable))
    state[last.unit] = reached
    assert allocation.removed == {curve.unit.name: k for curve, k in zip(curves, state, strict=True)}
    assert allocation.saved == saved_of(curves, state)
    assert allocation.total == total_of(curves)
    assert allocation.ratio == allocation.saved / allocation.total
    assert allocation.cost == pytest.approx(cost_of(curves, state), rel=1e-12)
    assert abs(allocation.saved - target) <= unit.factor_parameters(1)  # at most one rank of the trimmed unit


def test_cost_is_the_running_maximum_interpolated_from_zero():
    curve = UnitCurve(unit=make_unit("u", 10, 10), counts=(2, 5, 8), kl=(0.3, 0.1, 0.9))
    assert curve.running_maximum == (0.3, 0.3, 0.9)
    expected = [0, 0.15, 0.3, 0.3, 0.3, 0.3, 0.5, 0.7, 0.9]
    assert [curve.cost(k) for k in range(9)] == pytest.approx(expected, rel=1e-12)


def test_a_negative_measurement_costs_nothing():
    curve = UnitCurve(unit=make_unit("u", 10, 10), counts=(6, 8), kl=(-1e-9, 0.2))
    assert [curve.cost(k) for k in (3, 6, 7, 8)] == pytest.approx([0, 0, 0.1, 0.2], rel=1e-12)


@pytest.mark.parametrize("removed", [-1, 9])
def test_cost_outside_what_was_measured(removed):
    curve = UnitCurve(unit=make_unit("u", 10, 10), counts=(2, 8), kl=(0.1, 0.2))
    with pytest.raises(ValueError, match=r"unit u: .* outside the measured 0 \.\. 8"):
        curve.cost(removed)


def test_the_first_move_may_jump_past_break_even():
    unit = make_unit("u", 8, 8)  # saves 16 k - 64
    curve = UnitCurve(unit=unit, counts=(2, 4, 5, 6, 7), kl=(0.001, 0.002, 0.5, 0.6, 3.0))
    (move,) = greedy_moves([curve], 0.2)
    assert (move.before, move.after) == (0, 6)  # 0.6 / 32, less than 0.5 / 16 and 3.0 / 48


def test_of_equal_costs_the_move_that_saves_most_then_the_first_unit():
    linear = [
        UnitCurve(unit=make_unit(name, 8, 8), counts=(5, 6, 7), kl=(0.125, 0.25, 0.375)) for name in ("a", "b")
    ]  # 1/128 a parameter at every count
    moves = greedy_moves(linear, 0.7)
    assert [(move.unit, move.after) for move in moves] == [(0, 7), (1, 7)]
    assert greedy(linear, 0.3).removed == {"a": 6, "b": 0}


def test_equal_trims_take_fewer_directions():
    curve = UnitCurve(unit=make_unit("u", 8, 8), counts=(7,), kl=(1.0,))
    assert greedy([curve], 24 / 64).removed == {"u": 5}  # 16 and 32 are as far from 24


def test_units_left_dense_count_in_the_total():
    cheap = UnitCurve(unit=make_unit("cheap", 8, 8), counts=(6, 7), kl=(0.1, 0.2))
    dear = UnitCurve(unit=make_unit("dear", 8, 8), counts=(6, 7), kl=(50.0, 60.0))
    unmeasured = UnitCurve(unit=make_unit("unmeasured", 8, 8), counts=(), kl=())
    allocation = greedy([cheap, dear, unmeasured], 0.25)
    assert allocation == Allocation(
        removed={"cheap": 7, "dear": 0, "unmeasured": 0}, saved=48, total=192, cost=pytest.approx(0.2)
    )


def units_of(curves):
    return [curve.unit for curve in curves]


METHODS = {
    "greedy": greedy,
    "uniform_parameters": lambda curves, ratio: uniform_parameters(units_of(curves), ratio),
    "uniform_rank": lambda curves, ratio: uniform_rank(units_of(curves), ratio),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ratio", [0.0, 1.0, -0.2, 1.5, math.nan])
def test_ratio_outside_its_range(method, ratio):
    with pytest.raises(ValueError, match=r"lies outside \(0, 1\)"):
        METHODS[method](random_curves(0), ratio)


def largest_ratio(method, curves):
    if method == "greedy":
        return sum(max(curve.unit.saved(k) for k in curve.counts) for curve in curves) / total_of(curves)
    return 1 - sum(curve.unit.factor_parameters(1) for curve in curves) / total_of(curves)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(8))
def test_the_largest_ratio_is_reached_and_stated(method, seed):
    curves = random_curves(seed)
    largest = largest_ratio(method, curves)
    assert METHODS[method](curves, largest).ratio == pytest.approx(largest, rel=1e-12)
    with pytest.raises(UnreachableRatio) as error:
        METHODS[method](curves, min(largest + 1e-3, 1 - 1e-9))
    stated = float(str(error.value).split()[-1])
    assert largest - 1e-4 <= stated <= largest


def test_the_largest_ratio_times_the_total_may_be_rounded_up():
    curve = UnitCurve(unit=make_unit("u", 5, 23), counts=(3,), kl=(1.0,))
    saved, total = curve.unit.saved(3), curve.unit.parameters
    assert saved / total * total > saved
    assert greedy([curve], saved / total).removed == {"u": 3}


SHARES = {
    "uniform_parameters": lambda unit: unit.parameters / sum(unit.dimension + other for other in unit.others),
    "uniform_rank": lambda unit: unit.dimension,
}


@pytest.mark.parametrize("method", SHARES)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("ratio", [0.02, 0.2, 0.5, 0.8])
def test_uniform_keeps_one_share_of_every_unit(method, seed, ratio):
    units = units_of(random_curves(seed))
    allocation = METHODS[method]([UnitCurve(unit=unit, counts=(), kl=()) for unit in units], ratio)
    rounding = 0.5 * sum(unit.factor_parameters(1) for unit in units)  # half a rank of every unit
    assert abs(allocation.saved - ratio * allocation.total) <= rounding
    assert math.isnan(allocation.cost)
    kept = [(u.dimension - allocation.removed[u.name], SHARES[method](u)) for u in units if allocation.removed[u.name]]
    assert max((r - 0.5) / full for r, full in kept) <= min((r + 0.5) / full for r, full in kept)
    assert all(u.saved(allocation.removed[u.name]) > 0 for u in units if allocation.removed[u.name])


def test_uniform_reaches_a_small_ratio_of_a_wide_tie():
    """Three narrow members share a factor that is most of their cost: the share goes beyond 2 before they are dense."""
    unit = make_unit("u", 64, 8, 8, 8)
    allocation = uniform_parameters([unit], 0.05)
    assert abs(allocation.saved - 0.05 * allocation.total) <= unit.factor_parameters(1) / 2
