"""Products of the projected forms, a unit at a time: what ``costs`` adds up. 2 FLOPs a multiply-add."""

from collections.abc import Mapping, Sequence

from lsp_core.shapes import Shapes
from lsp_core.units import Unit


def backward_flops(shapes: Shapes, length: int, first: int) -> float:
    """FLOPs a token of the dense backward pass down to block ``first``: 2.5 times the forward pass in attention."""
    return shapes.forward(length, first) + 1.5 * shapes.attend(length) * (len(shapes.blocks) - first)


def activation_form_flops(shapes: Shapes, active: Sequence[Unit], removed: Mapping[str, int], length: int) -> float:
    """FLOPs a token, forward and backward, of the dense layers and the way through U."""
    extra = 0.0
    for unit in active:  # an input tie goes down to U once and up for each member, an output tie both for each
        passes = 1 + len(unit.members) if unit.side == "input" else 2 * len(unit.members)
        extra += 2.0 * removed[unit.name] * unit.dimension * passes
    first = active[0]
    unread = removed[first.name] * first.dimension if first.side == "input" else first.parameters
    return shapes.forward(length) + backward_flops(shapes, length, first.block) + 3 * extra - 2.0 * unread


def factor_form_flops(shapes: Shapes, active: Sequence[Unit], rank: Mapping[str, float], length: int) -> float:
    """FLOPs a token, forward and backward, with the factors in place of the layers."""
    dense = 2.0 * sum(unit.parameters for unit in active)
    factors = 2.0 * sum(factor_products(unit, rank[unit.name]) for unit in active)
    first = active[0]
    unread = rank[first.name] * (first.dimension if first.side == "input" else sum(first.others))
    backward = backward_flops(shapes, length, first.block)
    return shapes.forward(length) + backward + 3 * factors - 2 * dense - 2.0 * unread


def factor_products(unit: Unit, rank: float) -> float:
    """Multiply-adds a token of a unit's factors; a factor that an output tie shares is applied by each member."""
    applied = len(unit.members) if unit.side == "output" else 1
    return rank * (applied * unit.dimension + sum(unit.others))


def projection_flops(unit: Unit, count: int) -> float:
    """W P by way of the smaller of the two spaces."""
    return 4.0 * unit.parameters * min(count, unit.dimension - count)


def orthogonal_flops(
    active: Sequence[Unit], removed: Mapping[str, int], steps: int, factored: int, validations: int
) -> tuple[float, float]:
    """Products and solves of qf(V), of the basis of its complement, and of the backward passes of both."""
    products = solvers = 0.0
    for unit in active:
        d, k = unit.dimension, removed[unit.name]
        r = d - k
        products += (steps + validations) * 4.0 * d * k**2 + steps * 4.0 * d * k**2
        solvers += (steps + validations) * (d * k**2 + k**3 / 3) + steps * d * k**2
        products += (factored + validations) * (4.0 * d * k * r + 4.0 * d * r**2) + factored * 4.0 * d * k * r
        solvers += (factored + validations) * (d * r**2 + r**3 / 3)
    return products, solvers


def merge_flops(units: Sequence[Unit], removed: Mapping[str, int]) -> tuple[float, float]:
    """Products and solves of merging each unit: U, the complete QR, U_perpT W, U UT W, and the check of the factors."""
    products = solvers = 0.0
    for unit in units:
        d, k = unit.dimension, removed.get(unit.name, 0)
        if k == 0:
            continue
        products += 4.0 * d * k**2 + (4.0 * k + 4.0 * (d - k)) * unit.parameters
        solvers += d * k**2 + k**3 / 3 + 2.0 * d * k**2 - 2 / 3 * k**3 + 4.0 * d**2 * k - 4.0 * d * k**2 + 4 / 3 * k**3
    return products, solvers
