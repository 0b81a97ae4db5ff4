"""Discovery of the compressible units by tracing one forward pass; no table of architectures.

A unit is what shares one projector: a single linear layer, or a tied group. Layers of one parent module inside a
repeated block that read the *same tensor* form an input-tied group (Q/K/V, gate/up). Which member makes queries, keys
or values is read off the attention call: a member is the key projection if the key tensor depends on its output.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

Side = Literal["input", "output"]
KVRouting = Literal["auto", "input", "output", "untied"]
ROLES = ("query", "key", "value")
LINEAR_TYPES = (nn.Linear, Conv1D)


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One projected unit.

    ``dimension`` is D, the projected side; ``others`` the members' other sides; ``roles`` what each member makes of
    the attention's query, key and value, in that order and joined by "+", or "".
    """

    name: str
    side: Side
    members: tuple[str, ...]
    dimension: int
    others: tuple[int, ...]
    block: int
    roles: tuple[str, ...]

    @property
    def parameters(self) -> int:
        """N_u: parameters of the dense members, biases not counted."""
        return self.dimension * sum(self.others)

    def factor_parameters(self, retained: int) -> int:
        """c_u(r): parameters of the factors at rank ``retained``, the shared one counted once."""
        return retained * (self.dimension + sum(self.others))

    def saved(self, removed: int) -> int:
        """s_u(k): parameters saved by removing ``removed`` directions; 0 where it stays dense, else maybe negative."""
        return 0 if removed == 0 else self.parameters - self.factor_parameters(self.dimension - removed)

    @property
    def break_even(self) -> int:
        """The smallest removed count k that saves parameters."""
        per_rank = self.dimension + sum(self.others)
        return self.dimension - (self.parameters - 1) // per_rank


def weight_of(module: nn.Module) -> Tensor:
    """Returns the weight of a linear layer as (D_out, D_in), a view."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.T if isinstance(module, Conv1D) else weight


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the repeated blocks in the order they are registered.

    Blocks are the children of the outermost ``ModuleList``s whose children share one class and hold linear layers.
    Errors: ``ValueError`` if the model has none.
    """
    blocks: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            repeated = (
                isinstance(child, nn.ModuleList) and len(child) > 0 and len({type(block) for block in child}) == 1
            )
            if repeated and any(isinstance(layer, LINEAR_TYPES) for layer in child.modules()):
                blocks.extend(child.children())
            else:
                visit(child)

    visit(model)
    if not blocks:
        raise ValueError(
            f"{type(model).__name__} has no repeated blocks with linear layers: there is nothing to compress"
        )
    return blocks


def discover_units(
    model: PreTrainedModel,
    *,
    kv_routing: KVRouting = "auto",
    tie: bool = True,
    exclude: Sequence[str] = (),
) -> list[Unit]:
    """Returns the units in the order of the forward pass; a model on the meta device will do.

    The forward pass runs on fake tensors, so it computes nothing. ``exclude`` are shell patterns on layer names.
    Errors: ``ValueError`` if no layer is left, if ``exclude`` matches nothing, or if ``kv_routing`` needs roles
    that the trace cannot tell.
    """
    if kv_routing == "input" and not tie:
        raise ValueError(
            "kv_routing='input' ties Q, K and V on their input, tie=false forbids ties: drop one of the two"
        )
    trace = _trace(model)
    for pattern in exclude:
        if not any(fnmatch(name, pattern) for name in trace.names.values()):
            raise ValueError(f"exclude pattern {pattern!r} matches no linear layer of the model's blocks")
    units: list[Unit] = []
    for group in trace.groups:
        members = [m for m in group.members if not any(fnmatch(trace.names[m], pattern) for pattern in exclude)]
        for subset, side in _tie(members, trace, kv_routing=kv_routing, tie=tie):
            units.append(_unit(subset, side, trace, group.block))
    if not units:
        raise ValueError("no targetable layer: every linear layer inside the blocks is excluded")
    return units


@dataclass
class _Group:
    """Layers of one parent that read the same tensor, in the order of their calls."""

    parent: str
    block: int
    source: Tensor
    members: list[nn.Module] = field(default_factory=list)


@dataclass
class _Trace:
    names: dict[nn.Module, str]
    groups: list[_Group] = field(default_factory=list)
    outputs: dict[nn.Module, Tensor] = field(default_factory=dict)
    roles: dict[nn.Module, set[str]] = field(default_factory=dict)
    attention_calls: int = 0


class _AttentionCalls(TorchFunctionMode):
    """Hands the query, key and value of every scaled dot product attention to ``visit``."""

    def __init__(self, visit: Callable[[Sequence[Tensor]], None]) -> None:
        super().__init__()
        self.visit = visit

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.visit(args[:3])
        return func(*args, **(kwargs or {}))


def _trace(model: PreTrainedModel) -> _Trace:
    blocks = find_blocks(model)
    block_of = {layer: index for index, block in enumerate(blocks) for layer in block.modules()}
    inside = [(m, name) for name, m in model.named_modules() if m in block_of and isinstance(m, LINEAR_TYPES)]
    tied_embeddings = {
        id(p) for e in (model.get_input_embeddings(), model.get_output_embeddings()) if e for p in e.parameters()
    }
    names: dict[nn.Module, str] = {m: name for m, name in inside if id(m.weight) not in tied_embeddings}
    trace = _Trace(names)
    seen: set[int] = set()
    current = 0

    def enter(block: nn.Module, _: object) -> None:
        nonlocal current
        current = block_of[block]

    def record(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        (source,) = inputs
        if id(module.weight) in seen:
            return output
        seen.add(id(module.weight))
        parent = names[module].rpartition(".")[0]
        match = [g for g in trace.groups if g.parent == parent and _same_tensor(g.source, source)]
        group = match[0] if match else _Group(parent, block_of[module], source)
        if not match:
            trace.groups.append(group)
        group.members.append(module)
        if not output.requires_grad:
            output.requires_grad_()
        trace.outputs[module] = output
        return output

    def assign_roles(call: Sequence[Tensor]) -> None:
        trace.attention_calls += 1
        recent = {m: output for m, output in trace.outputs.items() if block_of[m] == current and m not in trace.roles}
        for module, roles in _dependencies(recent, call).items():
            trace.roles[module] = roles

    handles = [module.register_forward_hook(record) for module in names]
    handles += [block.register_forward_pre_hook(enter) for block in blocks]
    was_training = model.training
    try:
        model.eval()
        with torch.enable_grad(), FakeTensorMode(allow_non_fake_inputs=True), _AttentionCalls(assign_roles):
            model(input_ids=torch.zeros(2, 4, dtype=torch.long, device=model.device), use_cache=False)
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    return trace


def _same_tensor(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors alive at the same time are one: the same object, or the same view of the same storage."""
    if a is b:
        return True
    same_view = a.shape == b.shape and a.stride() == b.stride() and a.storage_offset() == b.storage_offset()
    return same_view and a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _dependencies(outputs: dict[nn.Module, Tensor], call: Sequence[Tensor]) -> dict[nn.Module, set[str]]:
    """Returns, for each layer called before an attention, which of query, key and value depend on its output."""
    roles: dict[nn.Module, set[str]] = {module: set() for module in outputs}
    for role, argument in zip(ROLES, call, strict=True):
        if outputs and argument.requires_grad:
            probe = torch.ones_like(argument)
            grads = torch.autograd.grad(argument, list(outputs.values()), probe, retain_graph=True, allow_unused=True)
            for module, grad in zip(outputs, grads, strict=True):
                if grad is not None:
                    roles[module].add(role)
    return roles


def _tie(
    members: list[nn.Module], trace: _Trace, *, kv_routing: KVRouting, tie: bool
) -> list[tuple[list[nn.Module], Side | None]]:
    """Splits layers that read one tensor into units; a side of None stands for the rule of single layers."""
    singles: list[tuple[list[nn.Module], Side | None]] = [([m], None) for m in members]
    if len(members) <= 1 or not tie:
        return singles
    roles = [trace.roles.get(m, set()) for m in members]
    widths = {_shape(m)[0] for m in members}
    names = ", ".join(trace.names[m] for m in members)
    if all(role in (set(), set(ROLES)) for role in roles):  # no projections of one attention, as gate/up
        if kv_routing != "input" and (trace.attention_calls == 0 or len(widths) > 1):
            raise ValueError(
                f"the trace cannot tell which of {names} are query, key and value: load the model with "
                "attn_implementation='sdpa', or tie them all with kv_routing='input'"
            )
        return [(members, "input")]
    if kv_routing == "untied":
        return singles
    if kv_routing == "input" or (kv_routing == "auto" and len(widths) == 1):
        return [(members, "input")]
    shared = [m for m, role in zip(members, roles, strict=True) if role in ({"key"}, {"value"})]
    if len(shared) != 2 or any(len(role) != 1 for role in roles):
        raise ValueError(
            f"kv_routing={kv_routing!r} needs one key and one value among {names}, the traced attention gives {roles}"
        )
    return [([m], None) for m in members if m not in shared] + [(shared, "output")]


def _shape(module: nn.Module) -> tuple[int, int]:
    d_out, d_in = weight_of(module).shape
    return d_out, d_in


def _unit(members: list[nn.Module], side: Side | None, trace: _Trace, block: int) -> Unit:
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
