"""What a latent cache learns during a call of its model: latents and rotary positions, through hooks.

An attention module hands its cache finished keys and values. Their latents are seen by hooks on the factors that make
them, and the positions by hooks on the rotary embeddings; which of these a block uses is told by the tensors that its
attention is given. Attention itself reaches the cache through an implementation registered with transformers, named
after the one that it stands in for: ``latent_sdpa``, ``latent_eager``. Without a latent cache it is that one.
"""

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lsp_core.latent_blocks import Block
from lsp_core.latent_rows import Positions

PREFIX = "latent_"
MASKS = {"sdpa": sdpa_mask, "eager": eager_mask}
GROWING_ROTATIONS = ("dynamic", "longrope")  # their frequencies depend on the length so far
AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def uncompiled(function: AnyFunction) -> AnyFunction:
    """Returns ``function`` as torch.compile leaves it alone: what goes on here lies in Python objects."""
    return cast(AnyFunction, torch.compiler.disable(function))


class Reader(Protocol):
    """What a cache leaves behind for the attention that comes next."""

    def __call__(
        self, prior: AttentionFunction, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]: ...


_waiting: weakref.WeakKeyDictionary[nn.Module, Reader] = weakref.WeakKeyDictionary()


def leave(attention: nn.Module, reader: Reader) -> None:
    """The next computation of ``attention`` is ``reader``'s."""
    _waiting[attention] = reader


class Rotation:
    """One call of a rotary embedding: ``positions`` (B or 1, T), and the cosine that tells it from other calls."""

    def __init__(self, module: nn.Module, arguments: dict[str, Any], cosine: Tensor) -> None:
        self.module = module
        self.positions = arguments.pop("position_ids", None)
        # of other tensors the embedding reads dtype and device alone
        self._others = {n: v.new_empty(0) if isinstance(v, Tensor) else v for n, v in arguments.items()}
        self.cosine = cosine
        self._turned: tuple[Tensor, Tensor] | None = None

    def of(self, positions: Positions, count: int) -> tuple[Tensor, Tensor]:  # -> 2 x (B, count, d_rot)
        """Returns cosine and sine of the last ``count`` positions; a call evaluates them where it needs more of them.

        Once for all sequences where their positions are the same.
        """
        if self._turned is None or self._turned[0].shape[1] < count:
            rows = positions.last(count)[: 1 if positions.same else None, :, 0]
            self._turned = self.module.forward(position_ids=rows, **self._others)
        assert positions.tensor is not None
        cosine, sine = (part[:, -count:].expand(len(positions.tensor), -1, -1) for part in self._turned)
        return cosine, sine

    @property
    def grows(self) -> bool:
        kind = getattr(self.module, "rope_type", None)
        kinds = kind.values() if isinstance(kind, dict) else [kind]
        return any(kind in GROWING_ROTATIONS for kind in kinds)


class Recorder:
    """Hooks on a model that record what its latent caches need, removed when the last that holds this is gone.

    What is recorded of a block is forgotten when its attention is done, the rotations when the call is.
    Errors: ``ValueError`` if the model's attention cannot be switched to another implementation.
    """

    def __init__(self, model: PreTrainedModel, blocks: Iterable[Block]) -> None:
        self._switch = _switched(model)
        self._record = _Record()
        handles = [
            model.base_model.register_forward_pre_hook(self._record.begin_call),
            model.base_model.register_forward_hook(self._record.end_call, always_call=True),
        ]
        for module in model.modules():
            if type(module).__name__.endswith("RotaryEmbedding"):
                handles.append(module.register_forward_hook(self._record.rotated, with_kwargs=True))
        for block in blocks:
            sources = {latent.source for latent in (block.key, block.value) if latent is not None}
            handles += [source.register_forward_hook(self._record.latent) for source in sources]
            handles.append(block.attention.register_forward_pre_hook(self._record.begin_block, with_kwargs=True))
            handles.append(block.attention.register_forward_hook(self._record.end_block, always_call=True))
        weakref.finalize(self, _remove, handles)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # copies of a cache are caches of the same model

    def latent_of(self, source: nn.Module) -> Tensor:  # (B, T, R)
        """Returns what ``source`` returned in the current call of its block.

        Errors: ``RuntimeError`` if it was not called: something else computes the layer.
        """
        if source not in self._record.latents:
            raise RuntimeError(
                "a layer that makes keys or values did not call the factor whose latent a LatentCache holds: layers "
                "must be fused with fuse(model, latent_cache=True)"
            )
        return self._record.latents[source]

    def rotation(self) -> Rotation | None:
        """Returns the rotary embedding that the current block was given, or None where it was given none.

        Errors: ``LookupError`` if it was given one that no known module made, or that positions do not tell.
        """
        cosine = self._record.cosine
        if cosine is None:
            return None
        for rotation in self._record.rotations:
            if rotation.cosine is cosine:
                if rotation.grows:
                    raise LookupError("their rotary frequencies depend on the length so far")
                if not (isinstance(rotation.positions, Tensor) and rotation.positions.dim() == 2):
                    raise LookupError("their rotary positions are not one number a token")
                return rotation
        raise LookupError("the rotary embeddings of the block come from no module whose name ends in RotaryEmbedding")


class _Record:
    """The hooks' own state: they hold this, and this holds no cache."""

    def __init__(self) -> None:
        self.latents: dict[nn.Module, Tensor] = {}
        self.rotations: list[Rotation] = []
        self.cosine: Tensor | None = None

    @uncompiled
    def latent(self, source: nn.Module, _args: tuple[Any, ...], output: Tensor) -> None:
        self.latents[source] = output

    @uncompiled
    def rotated(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if isinstance(output, tuple) and len(output) == 2:
            arguments = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
            self.rotations.append(Rotation(module, dict(arguments), output[0]))

    @uncompiled
    def begin_block(self, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _waiting.pop(attention, None)  # an interrupted call leaves its own, as no hook is called after it
        self.latents.clear()
        if args and "position_embeddings" not in kwargs:
            kwargs = dict(inspect.signature(attention.forward).bind_partial(*args, **kwargs).arguments)
        embeddings = kwargs.get("position_embeddings")
        self.cosine = embeddings[0] if isinstance(embeddings, tuple) else None

    @uncompiled
    def end_block(self, attention: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        self.latents.clear()
        self.cosine = None
        if _waiting.pop(attention, None) is not None and output is not None:  # no output: it raised
            raise RuntimeError(
                f"{type(attention).__name__} computed its attention without the LatentCache that it had filled: the "
                "implementation that the cache set must stay; make the cache after any set_attn_implementation"
            )

    @uncompiled
    def begin_call(self, _model: nn.Module, _args: tuple[Any, ...]) -> None:
        self.rotations.clear()

    @uncompiled
    def end_call(self, _model: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
        self.rotations.clear()


class _Switch:
    """The attention of a model goes through its latent caches while this lives."""

    def __init__(self, model: PreTrainedModel) -> None:
        weakref.finalize(self, _restore, weakref.ref(model))


_switches: weakref.WeakKeyDictionary[PreTrainedModel, weakref.ref[_Switch]] = weakref.WeakKeyDictionary()


def _switched(model: PreTrainedModel) -> _Switch:
    """Returns the one switch of ``model`` that all its recorders hold."""
    _engage(model)
    known = _switches.get(model)
    switch = None if known is None else known()
    if switch is None:
        switch = _Switch(model)
        _switches[model] = weakref.ref(switch)
    return switch


def _engage(model: PreTrainedModel) -> None:
    prior = str(model.config._attn_implementation).removeprefix(PREFIX)
    if prior not in MASKS:
        raise ValueError(
            f"a LatentCache computes attention in place of sdpa or eager, not of {prior!r}: call "
            "model.model.set_attn_implementation('sdpa') first"
        )
    name = PREFIX + prior
    AttentionInterface.register(name, partial(_attention, prior))
    AttentionMaskInterface.register(name, MASKS[prior])  # type: ignore[arg-type]
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise ValueError(
            f"{type(model).__name__} computes its attention without transformers' AttentionInterface, so that a "
            "LatentCache cannot take part in it: use the ordinary cache"
        )


def _restore(model: weakref.ref[PreTrainedModel]) -> None:
    found = model()
    if found is not None:
        found.set_attn_implementation(str(found.config._attn_implementation).removeprefix(PREFIX))


def _remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()


def _prior(module: nn.Module, name: str) -> AttentionFunction:
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    function: AttentionFunction = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    return function


@uncompiled
def _attention(
    prior: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The registered implementation: the cache's where one waits for this module, else the prior one."""
    function = _prior(module, prior)
    reader = _waiting.pop(module, None)
    if reader is None:
        return function(module, query, key, value, attention_mask, **kwargs)
    return reader(partial(function, module), query, key, value, attention_mask, **kwargs)
