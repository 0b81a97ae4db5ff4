"""Merging: each projector becomes two plain factors, exactly (paper, section 'Merge details').

Input tie: W_m P = B_m A with A = U_perpT shared and B_m = W_m U_perp. Output tie: P W_m = B A_m with B = U_perp shared
and A_m = U_perpT W_m. A member of both kinds of tie: P_out W_m P_in = B C_m A, with B and A as in either and the core
C_m = U_perp,outT W_m U_perp,in; its input latent is that of the whole group still. Biases are unchanged. With a
tolerance, singular values of the stacked projected weight below it are dropped, which narrows the shared factor; what
was dropped is reported.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lsp_core.gram import evaluating
from lsp_core.inputs import inputs_of
from lsp_core.modeling_lsp import FactoredLinear, Shared, factored, replace_module, shared_factor
from lsp_core.orthogonal import orthonormalize
from lsp_core.projector import attached
from lsp_core.units import Unit, bias_of, weight_of
from lsp_core.vectors import Form, Plan


@dataclass(frozen=True, kw_only=True)
class UnitMerge:
    """How one unit was merged.

    ``error``: max |P_out W P_in - B C A| over its members, of the stored factors, rounded to the weights' dtype,
    relative to max |W|; ``dropped``: the norm of what the tolerance dropped, relative to the norm of the projected
    weight, 0 where nothing was.
    """

    rank: int
    error: float
    dropped: float


@torch.no_grad()
def merge_model(
    model: nn.Module, units: Sequence[Unit], vectors: Mapping[str, Tensor], *, tolerance: float = 0.0
) -> dict[str, UnitMerge]:
    """Replaces, in place, the members of every unit in ``vectors`` by their factors; returns a report by unit.

    ``vectors``: V (D, K), any basis of the removed space; units without one stay dense. ``tolerance``: singular values
    of the stacked projected weight up to this value are dropped. A layer may be in an input unit and in an output unit;
    the order of the units does not matter.
    Errors: ``ValueError`` if a layer is in two units of one side, or was merged before.
    """
    chosen = [unit for unit in units if unit.name in vectors]
    seen: set[tuple[str, str]] = set()
    for name, side in ((name, unit.side) for unit in chosen for name in unit.members):
        if (name, side) in seen:
            raise ValueError(f"{name} is in two units on its {side} side: leave one of them out")
        if isinstance(model.get_submodule(name), FactoredLinear):
            raise ValueError(f"{name} was merged before: merge all units of a layer in one call")
        seen.add((name, side))
    report: dict[str, UnitMerge] = {}
    for group in _overlapping(chosen):
        report |= _merge_group(model, group, vectors, tolerance)
    return {unit.name: report[unit.name] for unit in chosen}


def merged_parameters(units: Sequence[Unit], ranks: Mapping[str, int]) -> int:
    """Returns the parameters of the factors of the units in ``ranks``: each shared one once, biases not counted."""
    merged = [unit for unit in units if unit.name in ranks]
    own: dict[str, int] = {}
    narrowed: dict[str, int] = {}  # what is left of a member's other side, where that is projected too
    for unit in merged:
        rank = ranks[unit.name]
        for name, other in zip(unit.members, unit.others, strict=True):
            own[name] = rank * narrowed.get(name, other)
            narrowed[name] = rank
    return sum(own.values()) + sum(unit.dimension * ranks[unit.name] for unit in merged)


@torch.no_grad()
def projected_outputs(
    model: PreTrainedModel, units: Sequence[Unit], vectors: Mapping[str, Tensor], examples: Tensor
) -> Tensor:
    """Returns ``outputs_of`` the unmerged ``model`` with every projector applied to the activations at alpha = 1."""
    chosen = [unit for unit in units if unit.name in vectors]
    inputs = {name for unit in chosen if unit.side == "input" for name in unit.members}
    outer = [unit for unit in chosen if unit.side == "output" and not inputs.isdisjoint(unit.members)]
    inner = [unit for unit in chosen if unit not in outer]
    bases = {unit.name: torch.cat(_split(vectors[unit.name].to(model.device))[::-1], 1) for unit in inner}
    removed = {unit.name: vectors[unit.name].shape[1] for unit in inner}
    biases = {name: bias_of(model.get_submodule(name)) for unit in outer for name in unit.members}
    with attached(model, inner, bases, removed) as projectors, evaluating(model), ExitStack() as hooks:
        for projector in projectors.values():
            projector.set_form(Plan(form=Form.ACTIVATION))
        for unit in outer:
            u = orthonormalize(vectors[unit.name].to(model.device))
            for name in unit.members:
                layer = model.get_submodule(name)
                hooks.enter_context(layer.register_forward_hook(partial(_project_output, u, biases[name])))
        return outputs_of(model, examples)


@torch.no_grad()
def outputs_of(model: PreTrainedModel, examples: Tensor) -> Tensor:  # (B, ...) -> (B, P, V), (B, classes) or (B, T, D)
    """Returns the logits of ``model``, or the final hidden states of one that has none."""
    result = model(**inputs_of(model).arguments(examples, model))
    outputs: Tensor = result.logits if "logits" in result else result.last_hidden_state
    return outputs


def dense_weight(layer: FactoredLinear) -> Tensor:
    """Returns W = B A or B C A of a factored layer, (D_out, D_in), float64."""
    product = layer.input_factor.weight.double()
    if layer.core is not None:
        product = layer.core.weight.double() @ product
    return layer.output_factor.weight.double() @ product


def removed_directions(q: Tensor, removed: int) -> Tensor:  # (D, D) -> (D, K)
    """Returns the last ``removed`` columns of an ordered basis: merged untrained, they give NoLSP."""
    return q[:, q.shape[1] - removed :]


def _overlapping(units: Sequence[Unit]) -> list[list[Unit]]:
    """Returns the units in groups that share members, input units before output units."""
    group_of: dict[str, list[Unit]] = {}
    for unit in units:
        joined = {id(group_of[name]): group_of[name] for name in unit.members if name in group_of}
        group = [*chain.from_iterable(joined.values()), unit]
        group_of |= {name: group for other in group for name in other.members}
    groups = {id(group): group for group in group_of.values()}
    return [sorted(group, key=lambda unit: unit.side) for group in groups.values()]


def _merge_group(
    model: nn.Module, units: Sequence[Unit], vectors: Mapping[str, Tensor], tolerance: float
) -> dict[str, UnitMerge]:
    """Merges units that share members."""
    layers = {name: model.get_submodule(name) for unit in units for name in unit.members}
    weights = {name: weight_of(layer) for name, layer in layers.items()}
    dtype, device = next(iter(weights.values())).dtype, next(iter(weights.values())).device
    projected = {name: weight.double() for name, weight in weights.items()}
    bases: dict[str, Tensor] = {}
    for unit in units:
        u, bases[unit.name] = _split(vectors[unit.name].to(device))
        for name in unit.members:
            w = projected[name]
            projected[name] = w - (w @ u) @ u.T if unit.side == "input" else w - u @ (u.T @ w)
    dropped = dict.fromkeys(bases, 0.0)
    if tolerance > 0:
        for unit in units:
            stacked = _stack(unit, projected)
            bases[unit.name], dropped[unit.name] = _narrow(bases[unit.name], stacked, tolerance)
    own = {name: weight.double() for name, weight in weights.items()}
    shared: dict[str, dict[str, nn.Linear | Shared]] = {name: {} for name in layers}
    for unit in units:
        basis = bases[unit.name]
        factor = shared_factor(
            (basis.T if unit.side == "input" else basis).to(dtype).contiguous(), unit.side, len(unit.members)
        )
        for name in unit.members:
            shared[name][unit.side] = factor
            own[name] = own[name] @ basis if unit.side == "input" else basis.T @ own[name]
    errors: dict[str, Tensor] = {}
    for name, layer in layers.items():
        merged = factored(own[name].to(dtype).contiguous(), shared[name], bias_of(layer))
        replace_module(model, name, merged)
        errors[name] = (dense_weight(merged) - projected[name]).abs().max()
    report: dict[str, UnitMerge] = {}
    for unit in units:
        largest = torch.stack([weights[name].double().abs().max() for name in unit.members]).max()
        error = torch.stack([errors[name] for name in unit.members]).max()
        report[unit.name] = UnitMerge(
            rank=bases[unit.name].shape[1],
            error=(error / largest.clamp_min(torch.finfo(torch.float64).tiny)).item(),
            dropped=dropped[unit.name],
        )
    return report


def _split(v: Tensor) -> tuple[Tensor, Tensor]:  # (D, K) -> (D, K), (D, R), float64
    """Returns U = qf(V) and U_perp, a basis of its complement."""
    u = orthonormalize(v)
    return u, torch.linalg.qr(u, mode="complete").Q[:, u.shape[1] :]


def _narrow(basis: Tensor, stacked: Tensor, tolerance: float) -> tuple[Tensor, float]:
    """Returns the part of ``basis`` (D, R) that ``stacked`` needs up to ``tolerance``, and the share of it dropped."""
    left, singular, _ = torch.linalg.svd(basis.T @ stacked, full_matrices=False)
    kept = singular > tolerance
    kept[0] = True  # a factor of rank 0 is no layer
    dropped = singular[~kept].norm() / singular.norm().clamp_min(torch.finfo(singular.dtype).tiny)
    return basis @ left[:, kept], dropped.item()


def _stack(unit: Unit, weights: Mapping[str, Tensor]) -> Tensor:
    """Returns the members side by side with the projected dimension first, (D, sum of the other sides)."""
    return torch.cat([weights[name].T if unit.side == "input" else weights[name] for name in unit.members], dim=1)


def _project_output(u: Tensor, bias: Tensor | None, _layer: nn.Module, _inputs: object, output: Tensor) -> Tensor:
    """A forward hook: P W x + bias from W x + bias."""
    dense = output if bias is None else output - bias
    u = u.to(output.dtype)
    return output - (dense @ u) @ u.T
