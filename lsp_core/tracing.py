"""One traced forward pass: which linear layers read the same tensor, and which make queries, keys and values.

The pass runs on fake tensors, so it computes nothing and a model on the meta device will do. What an attention reads is
told by its call where it is fused, and by softmax between two products where it is not; a layer is the key projection
if the key tensor depends on its output.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from lsp_core.inputs import inputs_of, probe
from lsp_core.units import LINEAR_TYPES, find_blocks

ROLES = ("query", "key", "value")
PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.baddbmm, Tensor.baddbmm}
SOFTMAXES = {F.softmax, torch.softmax, Tensor.softmax}
TOPKS = {torch.topk, Tensor.topk}


@dataclass
class Group:
    """Layers of one parent that read the same tensor, in the order of their calls."""

    parent: str
    block: int
    source: Tensor
    members: list[nn.Module] = field(default_factory=list)


@dataclass
class Trace:
    """What one forward pass tells of the linear layers inside the blocks.

    ``names``: of those that were looked for; ``groups``: those that were called, by what they read; ``roles``: what
    each one makes of an attention's query, key and value; ``routers``: those whose outputs are ranked to choose
    experts; ``odd``: those that do not read one positional tensor; ``tied``: names of layers that share their weight
    with an embedding or the head.
    """

    names: dict[nn.Module, str]
    tied: dict[str, str]
    groups: list[Group] = field(default_factory=list)
    outputs: dict[nn.Module, Tensor] = field(default_factory=dict)
    roles: dict[nn.Module, set[str]] = field(default_factory=dict)
    routers: set[nn.Module] = field(default_factory=set)
    odd: set[nn.Module] = field(default_factory=set)
    attention_calls: int = 0


def trace_model(model: PreTrainedModel) -> Trace:
    """Returns what one forward pass over a probe tells. Errors: ``ValueError`` without repeated blocks."""
    blocks = find_blocks(model)
    block_of = {layer: index for index, block in enumerate(blocks) for layer in block.modules()}
    inside = [(m, name) for name, m in model.named_modules() if m in block_of and isinstance(m, LINEAR_TYPES)]
    embedded = {
        id(p) for e in (model.get_input_embeddings(), model.get_output_embeddings()) if e for p in e.parameters()
    }
    holders = Counter(id(weight) for m in model.modules() for weight in m.parameters(recurse=False))
    tied = {
        m: "an embedding" if id(m.weight) in embedded else "another layer"
        for m, _ in inside
        if id(m.weight) in embedded or holders[id(m.weight)] > 1
    }
    trace = Trace(
        names={m: name for m, name in inside if m not in tied},
        tied={name: f"shares its weight with {tied[m]}" for m, name in inside if m in tied},
    )
    seen: set[int] = set()
    current = 0

    def enter(block: nn.Module, _: object) -> None:
        nonlocal current
        current = block_of[block]

    def record(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if len(inputs) != 1:
            trace.odd.add(module)
            return output
        (source,) = inputs
        if id(module.weight) in seen:
            return output
        seen.add(id(module.weight))
        parent = trace.names[module].rpartition(".")[0]
        match = [g for g in trace.groups if g.parent == parent and _same_tensor(g.source, source)]
        group = match[0] if match else Group(parent, block_of[module], source)
        if not match:
            trace.groups.append(group)
        group.members.append(module)
        if not output.requires_grad:
            output.requires_grad_()
        trace.outputs[module] = output
        return output

    def recent() -> dict[nn.Module, Tensor]:
        return {m: output for m, output in trace.outputs.items() if block_of[m] == current and m not in trace.roles}

    def assign_roles(call: Sequence[Tensor]) -> None:
        trace.attention_calls += 1
        roles = _dependencies(recent(), call)
        parents = [trace.names[module].rpartition(".")[0] for module, made in roles.items() if made]
        for module, made in roles.items():  # what an earlier attention gave reaches this one through its projections
            of_this_attention = trace.names[module].rpartition(".")[0] == parents[-1] if parents else False
            trace.roles[module] = made if of_this_attention else set()

    def assign_router(ranked: Tensor) -> None:
        for module, output in reversed(recent().items()):
            if output.shape[-1] == ranked.shape[-1] and any(_depends(ranked, [output])):
                trace.routers.add(module)
                return

    handles = [module.register_forward_hook(record) for module in trace.names]
    handles += [block.register_forward_pre_hook(enter) for block in blocks]
    was_training = model.training
    try:
        model.eval()
        with (
            static_experts(model),
            torch.enable_grad(),
            FakeTensorMode(allow_non_fake_inputs=True),
            _Calls(assign_roles, assign_router),
        ):
            model(**inputs_of(model).arguments(probe(model, count=2), model))
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    return trace


@contextmanager
def static_experts(model: PreTrainedModel) -> Iterator[None]:
    """Makes a mixture of experts compute all of them in one product, whose shapes do not depend on the values."""
    chosen = model.get_experts_implementation()
    if not any(chosen.values()):
        yield
        return
    model.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        model.set_experts_implementation(chosen)


class _Calls(TorchFunctionMode):
    """Hands the query, key and value of every attention to ``attention``, and what is ranked to ``ranking``."""

    def __init__(self, attention: Callable[[Sequence[Tensor]], None], ranking: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.attention = attention
        self.ranking = ranking
        self.products: list[tuple[Tensor, Tensor, Tensor]] = []  # result and the two operands
        self.scored: tuple[Tensor, Tensor, Tensor] | None = None  # attention weights, query and key

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            named = dict(zip(ROLES, args, strict=False)) | kwargs
            self.attention([named[role] for role in ROLES])
        if func in TOPKS and args[0].requires_grad:
            self.ranking(args[0])
        result = func(*args, **kwargs)
        if func in PRODUCTS and result.requires_grad:
            operands = [operand for operand in (*args, *kwargs.values()) if isinstance(operand, Tensor)]
            self._product(result, *operands[-2:])
        elif func in SOFTMAXES and result.requires_grad:
            self._softmax(args[0], result)
        return result

    def _product(self, result: Tensor, left: Tensor, right: Tensor) -> None:
        if self.scored is not None and any(_depends(left, [self.scored[0]])):
            self.attention([self.scored[1], self.scored[2], right])
            self.scored, self.products = None, []
        else:
            self.products.append((result, left, right))

    def _softmax(self, scores: Tensor, weights: Tensor) -> None:
        reached = _depends(scores, [result for result, _, _ in self.products])
        if any(reached):
            last = max(index for index, there in enumerate(reached) if there)
            self.scored = (weights, *self.products[last][1:])


def _same_tensor(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors alive at the same time are one: the same object, or the same view of the same storage."""
    if a is b:
        return True
    same_view = a.shape == b.shape and a.stride() == b.stride() and a.storage_offset() == b.storage_offset()
    return same_view and a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _depends(target: Tensor, on: Sequence[Tensor]) -> list[bool]:
    """Returns for each tensor of ``on`` whether ``target`` was computed from it."""
    if not on or not target.requires_grad:
        return [False] * len(on)
    probe_gradient = torch.ones_like(target)
    grads = torch.autograd.grad(target, list(on), probe_gradient, retain_graph=True, allow_unused=True)
    return [grad is not None for grad in grads]


def _dependencies(outputs: dict[nn.Module, Tensor], call: Sequence[Tensor]) -> dict[nn.Module, set[str]]:
    """Returns, for each layer called before an attention, which of query, key and value depend on its output."""
    roles: dict[nn.Module, set[str]] = {module: set() for module in outputs}
    for role, argument in zip(ROLES, call, strict=True):
        for module, depends in zip(outputs, _depends(argument, list(outputs.values())), strict=True):
            if depends:
                roles[module].add(role)
    return roles
