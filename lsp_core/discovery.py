"""Discovery of the compressible units by tracing one forward pass; no table of architectures.

Layers of one parent module inside a repeated block that read the *same tensor* form an input-tied group (Q/K/V,
gate/up). Left alone are routers, layers that share a weight with an embedding, parameters that are no linear layer's
(fused experts), and what the user excludes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Literal

from torch import nn
from transformers import PreTrainedModel

from lsp_core.tracing import ROLES, Trace, trace_model
from lsp_core.units import LINEAR_TYPES, Side, Unit, find_blocks, weight_of

KVRouting = Literal["auto", "input", "output", "untied"]
Member = tuple[list[nn.Module], Side | None]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Layers to tie, whatever the trace says: shell patterns of their names; one unit for each parent module."""

    members: tuple[str, ...]
    side: Side


@dataclass(frozen=True, kw_only=True)
class Discovery:
    """``units`` in the order of the forward pass; ``left_alone``: the reason, by the name of every other matrix."""

    units: list[Unit]
    left_alone: dict[str, str]


def discover_units(
    model: PreTrainedModel,
    *,
    kv_routing: KVRouting = "auto",
    tie: bool = True,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    groups: Sequence[Group] = (),
) -> list[Unit]:
    """Returns the units in the order of the forward pass. Arguments and errors: as ``discover``."""
    return discover(model, kv_routing=kv_routing, tie=tie, include=include, exclude=exclude, groups=groups).units


def discover(
    model: PreTrainedModel,
    *,
    kv_routing: KVRouting = "auto",
    tie: bool = True,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    groups: Sequence[Group] = (),
) -> Discovery:
    """Returns the units, and what of the blocks belongs to none; a model on the meta device will do.

    ``include``, where given, and ``exclude`` are shell patterns on layer names. ``groups`` override the discovered
    ties of the layers that they name.
    Errors: ``ValueError`` if no layer is left, if a pattern matches nothing, if a group cannot be tied as it says, or
    if ``kv_routing`` needs roles that the trace cannot tell.
    """
    if kv_routing == "input" and not tie:
        raise ValueError(
            "kv_routing='input' ties Q, K and V on their input, tie=false forbids ties: drop one of the two"
        )
    trace = trace_model(model)
    reasons = _left_alone(model, trace)
    for setting, patterns in (("include", include), ("exclude", exclude)):
        for pattern in patterns:
            if not any(fnmatch(name, pattern) for name in trace.names.values()):
                raise ValueError(f"{setting} pattern {pattern!r} matches no linear layer of the model's blocks")
    for name in trace.names.values():
        if any(fnmatch(name, pattern) for pattern in exclude):
            reasons.setdefault(name, "excluded")
        elif include and not any(fnmatch(name, pattern) for pattern in include):
            reasons.setdefault(name, "not included")
    explicit = _explicit(trace, groups, reasons)
    units: list[Unit] = []
    for group in trace.groups:
        grouped = [unit for unit in explicit if unit.members[0] in {trace.names[m] for m in group.members}]
        units += grouped
        taken = reasons.keys() | {name for unit in explicit for name in unit.members}
        members = [m for m in group.members if trace.names[m] not in taken]
        for subset, side in _tie(members, trace, kv_routing=kv_routing, tie=tie):
            units.append(_unit(subset, side, trace, group.block))
    if not units:
        raise ValueError("no targetable layer: every linear layer inside the blocks is excluded")
    return Discovery(units=units, left_alone=reasons)


def _left_alone(model: PreTrainedModel, trace: Trace) -> dict[str, str]:
    """Returns the reason for each matrix of a block that can be no member of a unit."""
    names = {module: name for name, module in model.named_modules()}
    called = {module for group in trace.groups for module in group.members}
    reasons = dict(trace.tied)
    reasons |= {trace.names[module]: "router" for module in trace.routers}
    reasons |= {trace.names[module]: "called otherwise than with one positional tensor" for module in trace.odd}
    for module, name in trace.names.items():
        if module not in called and not any(module.weight is other.weight for other in called):
            reasons.setdefault(name, "not used in a forward pass")
    for module in {module: None for block in find_blocks(model) for module in block.modules()}:
        if not isinstance(module, LINEAR_TYPES):
            for leaf, parameter in module.named_parameters(recurse=False):
                if parameter.dim() >= 2:
                    reasons[f"{names[module]}.{leaf}"] = "no linear layer (fused experts, a router, an embedding)"
    return reasons


def _explicit(trace: Trace, groups: Sequence[Group], reasons: dict[str, str]) -> list[Unit]:
    """Returns the units that ``groups`` ask for, one for each parent module of the members."""
    units: list[Unit] = []
    place = {
        trace.names[m]: (group, m) for group in trace.groups for m in group.members if trace.names[m] not in reasons
    }
    for group in groups:
        by_parent: dict[str, list[str]] = {}
        for pattern in group.members:
            matches = [name for name in place if fnmatch(name, pattern)]
            if not matches:
                raise ValueError(f"groups: the pattern {pattern!r} matches no linear layer that can be compressed")
            for name in matches:
                by_parent.setdefault(name.rpartition(".")[0], []).append(name)
        for names in by_parent.values():
            members = [place[name][1] for name in names]
            twice = {name for name in names if names.count(name) > 1 or any(name in unit.members for unit in units)}
            if twice:
                raise ValueError(f"groups: {', '.join(sorted(twice))} is named twice")
            sources = {id(place[name][0]) for name in names}
            widths = sorted({_shape(m)[0] for m in members})
            if group.side == "input" and len(sources) > 1:
                raise ValueError(f"groups: {', '.join(names)} do not read the same tensor: they share no input side")
            if group.side == "output" and len(widths) > 1:
                raise ValueError(
                    f"groups: {', '.join(names)} are {', '.join(map(str, widths))} wide: they share no output side"
                )
            units.append(_unit(members, group.side, trace, place[names[0]][0].block))
    return units


def _tie(members: list[nn.Module], trace: Trace, *, kv_routing: KVRouting, tie: bool) -> list[Member]:
    """Splits layers that read one tensor into units; a side of None stands for the rule of single layers."""
    singles: list[Member] = [([m], None) for m in members]
    if len(members) <= 1 or not tie:
        return singles
    roles = [trace.roles.get(m, set()) for m in members]
    widths = {_shape(m)[0] for m in members}
    names = ", ".join(trace.names[m] for m in members)
    if all(role in (set(), set(ROLES)) for role in roles):  # no projections of one attention, as gate/up
        if kv_routing != "input" and (trace.attention_calls == 0 or len(widths) > 1):
            raise ValueError(
                f"the trace cannot tell which of {names} are query, key and value: name what to tie with explicit "
                "groups, or tie them all with kv_routing='input'"
            )
        return [(members, "input")]
    if kv_routing == "untied":
        return singles
    if kv_routing == "input" or (kv_routing == "auto" and len(widths) == 1):
        return [(members, "input")]
    shared = [m for m, role in zip(members, roles, strict=True) if role in ({"key"}, {"value"})]
    if kv_routing == "auto" and (len(shared) != 2 or any(len(role) != 1 for role in roles)):
        return singles  # some of the attention's projections are excluded, or in a group of their own
    if len(shared) != 2 or any(len(role) != 1 for role in roles):
        raise ValueError(
            f"kv_routing={kv_routing!r} needs one key and one value among {names}, the traced attention gives {roles}"
        )
    return [([m], None) for m in members if m not in shared] + [(shared, "output")]


def _shape(module: nn.Module) -> tuple[int, int]:
    d_out, d_in = weight_of(module).shape
    return d_out, d_in


def _unit(members: list[nn.Module], side: Side | None, trace: Trace, block: int) -> Unit:
    d_out, d_in = _shape(members[0])
    if side is None:  # a single layer is projected on its smaller side, a square one on its output side
        side = "input" if d_in < d_out else "output"
    layers = tuple(trace.names[m] for m in members)
    parent = layers[0].rpartition(".")[0]
    leaves = "+".join(layer.rpartition(".")[2] for layer in layers)
    return Unit(
        name=f"{parent}.{leaves}" if parent else leaves,
        side=side,
        members=layers,
        dimension=d_in if side == "input" else d_out,
        others=tuple(_shape(m)[0 if side == "input" else 1] for m in members),
        block=block,
        roles=tuple("+".join(role for role in ROLES if role in trace.roles.get(m, ())) for m in members),
    )
