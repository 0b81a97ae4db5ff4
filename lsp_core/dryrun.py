"""How much memory a computation needs at its peak, found by running it on the meta device, which computes nothing.

Every tensor that comes to life is entered in a ledger and struck out when its storage dies, so what autograd keeps for
the backward pass is counted as long as it is kept. The stages' own functions run unchanged: a number that they read off
a tensor is answered as a healthy run would answer it, and attention is what the fused kernels make of it: an output and
one logsumexp a row, no matrix of scores.
"""

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

aten = torch.ops.aten
READS = (aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default)  # a number off a tensor


def peak_bytes(run: Callable[[], object], *, host: Iterable[Tensor] = (), lapack: bool = False) -> int:
    """Returns the most bytes that the tensors made by ``run`` hold at one time; what exists before is not counted.

    ``run`` works on meta tensors, with small ones on the CPU beside them. ``host``: those that stand for memory of the
    host; their clones are there too and are not counted. ``lapack``: with the workspace of its eigendecompositions.
    """
    with ExitStack() as stack:
        stack.enter_context(_FusedAttention())
        ledger = stack.enter_context(_Ledger(host, lapack))
        run()
    peak: int = ledger.peak
    return peak


class _Ledger(TorchDispatchMode):
    """Adds up the bytes of the living meta storages that were made under it."""

    def __init__(self, host: Iterable[Tensor], lapack: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lapack = lapack
        self._host = {tensor.untyped_storage()._cdata for tensor in host}
        self.live = 0
        self.peak = 0
        self._entered: set[int] = set()
        self._failures = WeakIdKeyDictionary()  # flags that are set where something went wrong

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        read = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in read if isinstance(leaf, Tensor)]
        on_meta = any(tensor.is_meta for tensor in tensors)
        if func in READS and on_meta:
            return self._healthy(args[0])
        if on_meta and "device" in kwargs:
            kwargs["device"] = torch.device("meta")  # what a stage moves to the CPU has no values either
        if func is aten._to_copy.default and not on_meta and kwargs.get("dtype", args[0].dtype) == torch.bool:
            kwargs["device"] = args[0].device  # masks keep their values: shapes depend on them
        if on_meta and func is aten.logsumexp.default:
            self._enter(args[0].clone(), set())  # the kernel's exponentials
        if on_meta:
            with self:  # in inference mode an operator made of others arrives whole
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if on_meta and func is aten._grouped_mm.default and args[1].dim() == 3:  # the meta kernel takes bfloat16 alone
            result = args[0].new_empty(len(args[0]), args[1].shape[-1])
        else:
            result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_meta]
        if func is aten.ne.Scalar:
            self._failures.update(dict.fromkeys(made, True))  # LAPACK's info != 0
        known = {tensor.untyped_storage()._cdata for tensor in tensors if tensor.is_meta}
        if func is aten.clone.default and known <= self._host:
            known |= {tensor.untyped_storage()._cdata for tensor in made}
        for tensor in made:
            self._enter(tensor, known)
        if self._lapack and func is aten._linalg_eigh.default:
            self._enter(args[0].new_empty(2, *args[0].shape), set())  # divide and conquer, beside the eigenvectors
        return result

    def _enter(self, tensor: Tensor, known: set[int]) -> None:
        storage = tensor.untyped_storage()
        name = storage._cdata
        if name in self._entered or name in known:
            return
        self._entered.add(name)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._strike, name, storage.nbytes())

    def _strike(self, name: int, size: int) -> None:
        self._entered.discard(name)
        self.live -= size

    def _healthy(self, tensor: Tensor) -> bool | int | float:
        if tensor.dtype == torch.bool:
            return tensor not in self._failures
        return 0.0 if tensor.is_floating_point() else 0


class _FusedAttention(TorchFunctionMode):
    """Replaces scaled dot product attention by a stand-in that makes and keeps what a fused kernel does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
            return _Attention.apply(named["query"], named["key"], named["value"])  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, length, _ = query.shape
        # laid out as (B, T, heads, width), so that the reshape after it is a view, as it is after the real kernels
        output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        partition = query.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, partition)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
