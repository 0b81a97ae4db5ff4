"""Merging: each projector becomes two plain factors, exactly (paper, section 'Merge details').

Input tie: W_m P = B_m A with A = U_perpT shared and B_m = W_m U_perp. Output tie: P W_m = B A_m with B = U_perp shared
and A_m = U_perpT W_m. Biases are unchanged. With a tolerance, singular values of the stacked projected weight below it
are dropped, which narrows the shared factor; what was dropped is reported.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lsp_core.gram import evaluating
from lsp_core.inputs import inputs_of
from lsp_core.layers import Factor, FactoredLinear, bias_of, replace_module
from lsp_core.orthogonal import orthonormalize
from lsp_core.projector import attached
from lsp_core.units import Unit, weight_of


@dataclass(frozen=True, kw_only=True)
class UnitMerge:
    """How one unit was merged.

    ``error``: max |W P - B A| of the stored factors, rounded to the weights' dtype, relative to max |W|; ``dropped``:
    the norm of what the tolerance dropped, relative to the norm of the projected weight, 0 where nothing was.
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
    of the stacked projected weight up to this value are dropped.
    """
    report: dict[str, UnitMerge] = {}
    for unit in units:
        if unit.name in vectors:
            layers = [model.get_submodule(name) for name in unit.members]
            report[unit.name] = _merge_unit(model, unit, layers, vectors[unit.name], tolerance)
    return report


@torch.no_grad()
def projected_outputs(
    model: PreTrainedModel, units: Sequence[Unit], vectors: Mapping[str, Tensor], examples: Tensor
) -> Tensor:
    """Returns ``outputs_of`` the unmerged ``model`` with every projector applied to the activations at alpha = 1."""
    bases: dict[str, Tensor] = {}
    for name, v in vectors.items():
        u = orthonormalize(v.to(model.device))
        bases[name] = torch.cat([torch.linalg.qr(u, mode="complete").Q[:, u.shape[1] :], u], 1)
    removed = {name: v.shape[1] for name, v in vectors.items()}
    with attached(model, units, bases, removed) as projectors, evaluating(model):
        for projector in projectors.values():
            projector.set_activation_form(1.0, [projector.v.new_ones(projector.v.shape[1])] * len(projector.weights))
        return outputs_of(model, examples)


@torch.no_grad()
def outputs_of(model: PreTrainedModel, examples: Tensor) -> Tensor:  # (B, ...) -> (B, P, V), (B, classes) or (B, T, D)
    """Returns the logits of ``model``, or the final hidden states of one that has none."""
    result = model(**inputs_of(model).arguments(examples, model))
    outputs: Tensor = result.logits if "logits" in result else result.last_hidden_state
    return outputs


def removed_directions(q: Tensor, removed: int) -> Tensor:  # (D, D) -> (D, K)
    """Returns the last ``removed`` columns of an ordered basis: merged untrained, they give NoLSP."""
    return q[:, q.shape[1] - removed :]


def _merge_unit(model: nn.Module, unit: Unit, layers: Sequence[nn.Module], v: Tensor, tolerance: float) -> UnitMerge:
    weights = [weight_of(layer) for layer in layers]
    dtype, device = weights[0].dtype, weights[0].device
    u = orthonormalize(v.to(device))
    shared = torch.linalg.qr(u, mode="complete").Q[:, u.shape[1] :]  # U_perp (D, R)
    stacked = _stack(unit, weights)  # (D, sum of the other sides)
    dropped = 0.0
    if tolerance > 0:
        left, singular, _ = torch.linalg.svd(shared.T @ stacked, full_matrices=False)
        kept = singular > tolerance
        kept[0] = True  # a factor of rank 0 is no layer
        dropped = (singular[~kept].norm() / singular.norm().clamp_min(torch.finfo(singular.dtype).tiny)).item()
        shared = shared @ left[:, kept]
    projected = stacked - u @ (u.T @ stacked)
    own = (shared.T @ stacked).to(dtype)  # (R, sum of the other sides)
    basis = shared.to(dtype)
    scale = stacked.abs().max().clamp_min(torch.finfo(stacked.dtype).tiny)
    error = ((basis.double() @ own.double() - projected).abs().max() / scale).item()
    factors = own.split(unit.others, dim=1)
    if unit.side == "input":
        latent = Factor(basis.T.contiguous(), readers=len(layers))
        pairs = [(latent, Factor(part.T.contiguous())) for part in factors]
    else:
        output = Factor(basis.contiguous())
        pairs = [(Factor(part.contiguous()), output) for part in factors]
    for name, layer, (a, b) in zip(unit.members, layers, pairs, strict=True):
        replace_module(model, name, FactoredLinear(a, b, bias_of(layer)))
    return UnitMerge(rank=basis.shape[1], error=error, dropped=dropped)


def _stack(unit: Unit, weights: Sequence[Tensor]) -> Tensor:
    """Returns the members side by side with the projected dimension first, (D, sum of the other sides), float64."""
    return torch.cat([weight.T if unit.side == "input" else weight for weight in weights], dim=1).double()
