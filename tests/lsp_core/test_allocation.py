"""Allocation: the greedy against the exact optimum, trimming, running maxima, ties, limits, what cannot be reached."""

import itertools
import math
import random
from fractions import Fraction

import numpy as np
import pytest
from scipy.optimize import LinearConstraint, milp

from lsp_core.allocation import (
    Allocation,
    UnitCurve,
    UnreachableRatio,
    find_limits,
    greedy,
    greedy_moves,
    largest_ratio,
    largest_uniform_ratio,
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


def exact_optimum(curves, ratio, limits=None):
    """The least sum of costs over the grid points, 0 among them, that saves the target: one binary a unit and point."""
    points = [
        (i, k)
        for i, curve in enumerate(curves)
        for k in (0, *curve.counts)
        if k <= (limits or {}).get(curve.unit.name, k)
    ]
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


def random_limits(curves, seed):
    """Caps on most units: some dense, some between two grid points, some on one."""
    rng = random.Random(seed + 1000)
    return {
        curve.unit.name: rng.choice([0, rng.randrange(curve.unit.dimension), rng.choice(curve.counts)])
        for curve in curves
        if rng.random() < 0.7
    }


def deepest_within(curve, limits):
    limit = limits.get(curve.unit.name, curve.unit.dimension)
    return max(0, *(curve.unit.saved(k) for k in (0, *curve.counts) if k <= limit))


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("share", [0.15, 0.5, 0.9])
def test_greedy_within_limits_is_within_one_move_of_the_optimum_within_them(seed, share):
    curves = random_curves(seed)
    limits = random_limits(curves, seed)
    ratio = share * sum(deepest_within(curve, limits) for curve in curves) / total_of(curves)
    if ratio == 0:  # all of the few units are capped
        assert largest_ratio(curves, limits) == 0
        return
    moves = greedy_moves(curves, ratio, limits=limits)
    before, after = replay(curves, moves[:-1]), replay(curves, moves)
    allocation = greedy(curves, ratio, limits=limits)
    assert all(allocation.removed[name] <= limit for name, limit in limits.items())
    assert saved_of(curves, before) < ratio * total_of(curves) <= saved_of(curves, after)
    optimum = exact_optimum(curves, ratio, limits)
    rounding = 1e-12 * cost_of(curves, after)
    assert cost_of(curves, before) <= optimum + rounding
    assert optimum <= cost_of(curves, after) + rounding


def test_limits_that_bind_nothing_change_nothing():
    curves = random_curves(3)
    limits = {curve.unit.name: curve.unit.dimension - 1 for curve in curves}
    for method in METHODS.values():
        assert repr(method(curves, 0.4, limits=limits)) == repr(method(curves, 0.4))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("ratio", [0.05, 0.31, 0.6])
def test_at_least_trims_to_the_smallest_saving_that_reaches_the_ratio(seed, ratio):
    curves = random_curves(seed)
    *before, last = greedy_moves(curves, ratio)
    state = replay(curves, before)
    unit = curves[last.unit].unit
    reaching = [
        unit.saved(k) - unit.saved(last.before)
        for k in range(last.before + 1, last.after + 1)
        if saved_of(curves, [*state[: last.unit], k, *state[last.unit + 1 :]]) >= ratio * total_of(curves)
    ]
    allocation = greedy(curves, ratio, at_least=True)
    assert allocation.saved == saved_of(curves, state) + min(reaching)
    assert allocation.cost == pytest.approx(cost_of(curves, allocation.removed.values()), rel=1e-12)


@pytest.mark.parametrize("method", ["uniform_parameters", "uniform_rank"])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("ratio", [0.03, 0.31, 0.6])
def test_uniform_at_least_takes_the_largest_share_that_reaches_the_ratio(method, seed, ratio):
    """Every share at which a rounded rank changes, from the largest down: the first whose savings reach the ratio.

    On the share itself, a tie, either side of it will do.
    """
    curves = random_curves(seed)
    units = units_of(curves)
    shares = {Fraction(2 * r + 1, 2) / exact_share(method, unit) for unit in units for r in range(unit.dimension)}
    for share in sorted(shares, reverse=True):
        near = [saved_at(share - step, method, units) for step in (0, Fraction(1, 10**9))]
        reaching = [saved for saved in near if saved >= ratio * total_of(curves)]
        if reaching:
            break
    assert METHODS[method](curves, ratio, at_least=True).saved in reaching


def saved_at(share, method, units):
    ranks = [max(1, round(share * exact_share(method, unit))) for unit in units]
    return sum(max(0, unit.saved(max(0, unit.dimension - r))) for unit, r in zip(units, ranks, strict=True))


def exact_share(method, unit):
    """The rank at a share of 1, as a fraction."""
    if method == "uniform_rank":
        return Fraction(unit.dimension)
    return Fraction(unit.parameters, len(unit.members) * unit.dimension + sum(unit.others))


@pytest.mark.parametrize("method", ["greedy", "uniform_parameters", "uniform_rank"])
@pytest.mark.parametrize("seed", range(8))
def test_the_largest_ratio_within_limits_is_reached_and_stated(method, seed):
    curves = random_curves(seed)
    limits = random_limits(curves, seed)
    if method == "greedy":
        saved = sum(deepest_within(curve, limits) for curve in curves)
    else:  # any count up to the limit
        saved = sum(
            max(0, *(c.unit.saved(k) for k in range(min(c.unit.dimension - 1, limits.get(c.unit.name, 999)) + 1)))
            for c in curves
        )
    largest = largest_ratio(curves, limits) if method == "greedy" else largest_uniform_ratio(units_of(curves), limits)
    assert largest == pytest.approx(saved / total_of(curves), rel=1e-12, abs=1e-15)
    if saved > 0:
        for at_least in (False, True):
            reached = METHODS[method](curves, largest, limits=limits, at_least=at_least)
            assert reached.saved == saved
            assert all(reached.removed[name] <= limit for name, limit in limits.items())
    with pytest.raises(UnreachableRatio) as error:
        METHODS[method](curves, largest + 1e-3, limits=limits)
    stated = float(str(error.value).split()[-1])
    assert largest - 1e-4 <= stated <= largest


@pytest.mark.parametrize("method", ["uniform_parameters", "uniform_rank"])
@pytest.mark.parametrize("seed", range(8))
def test_uniform_within_limits_keeps_one_share_of_every_unit_below_them(method, seed):
    units = units_of(random_curves(seed))
    limits = {unit.name: unit.dimension // 2 for unit in units[::2]}
    curves = [UnitCurve(unit=unit, counts=(), kl=()) for unit in units]
    allocation = METHODS[method](curves, 0.9 * largest_uniform_ratio(units, limits), limits=limits)
    free = [u for u in units if 0 < allocation.removed[u.name] < limits.get(u.name, u.dimension - 1)]
    kept = [(u.dimension - allocation.removed[u.name], SHARES[method](u)) for u in free]
    if kept:
        assert max((r - 0.5) / full for r, full in kept) <= min((r + 0.5) / full for r, full in kept)
    rounding = 0.5 * sum(unit.factor_parameters(1) for unit in units)
    assert abs(allocation.saved - 0.9 * largest_uniform_ratio(units, limits) * allocation.total) <= rounding


def test_patterns_become_limits():
    units = [make_unit("0.attn.q+k", 64, 64, 8), make_unit("0.mlp.down", 48, 64), make_unit("1.mlp.down", 20, 64)]
    assert find_limits(units, {}) == {}
    assert find_limits(units, {"*.down": 30}) == {"0.mlp.down": 18, "1.mlp.down": 0}
    assert find_limits(units, {"*.down": 10, "1.*": 15, "0.*.1": 60}) == {  # the last is a member's name
        "0.mlp.down": 38,
        "1.mlp.down": 5,
        "0.attn.q+k": 4,
    }
    assert find_limits(units, {"0.*": 10}, ["*attn*"]) == {"0.attn.q+k": 0, "0.mlp.down": 38}


@pytest.mark.parametrize("caps", [({"*up*": 3}, []), ({}, ["*up*"])])
def test_a_pattern_without_a_unit_is_refused_with_some_names(caps):
    units = [make_unit(f"{i}.mlp.down", 48, 64) for i in range(7)]
    with pytest.raises(ValueError, match=r"'\*up\*' .* matches no unit; .*0\.mlp\.down, .*4\.mlp\.down, \.\.\.$"):
        find_limits(units, *caps)


def test_greedy_within_limits_against_brute_force():
    """Two units, all pairs of grid points: nothing within the limits costs less and saves as much."""
    units = [make_unit("a", 8, 8), make_unit("b", 8, 24)]
    curves = [
        UnitCurve(unit=unit, counts=(5, 6, 7), kl=kl) for unit, kl in zip(units, ((1, 2, 3), (1, 4, 9)), strict=True)
    ]
    limits = {"b": 6}
    for target in range(1, units[0].saved(7) + units[1].saved(6) + 1):
        moves = greedy_moves(curves, target / 256, limits=limits)
        state = replay(curves, moves)
        assert state[1] <= 6
        pairs = itertools.product((0, 5, 6, 7), (0, 5, 6))
        least = min(cost_of(curves, pair) for pair in pairs if saved_of(curves, pair) >= target)
        assert cost_of(curves, replay(curves, moves[:-1])) <= least <= cost_of(curves, state)


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
    "uniform_parameters": lambda curves, ratio, **caps: uniform_parameters(units_of(curves), ratio, **caps),
    "uniform_rank": lambda curves, ratio, **caps: uniform_rank(units_of(curves), ratio, **caps),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ratio", [0.0, 1.0, -0.2, 1.5, math.nan])
def test_ratio_outside_its_range(method, ratio):
    with pytest.raises(ValueError, match=r"lies outside \(0, 1\)"):
        METHODS[method](random_curves(0), ratio)


def expected_largest(method, curves):
    if method == "greedy":
        return sum(max(curve.unit.saved(k) for k in curve.counts) for curve in curves) / total_of(curves)
    return 1 - sum(curve.unit.factor_parameters(1) for curve in curves) / total_of(curves)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(8))
def test_the_largest_ratio_is_reached_and_stated(method, seed):
    curves = random_curves(seed)
    largest = expected_largest(method, curves)
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
