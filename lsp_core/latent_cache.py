"""A key-value cache that holds latents: one narrow z = A x a token and block where Q, K and V are tied on their input.

``model.generate(ids, past_key_values=LatentCache(model))``. What is held of K and of V follows from the model's units:
the latent of each where it is narrower than the whole, one for both where they share it, the whole where the layer is
dense or fused with others. A block with a sliding window holds its window, as in the ordinary cache.
"""

import logging
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from lsp_core.latent_attention import Held, KeyMaker, PlainKeys, attend_held, key_norm_of, refusal, rotation_of
from lsp_core.latent_blocks import Block, KeyMode, Latent, latent_blocks
from lsp_core.latent_checks import differ, plain_keys, require_past
from lsp_core.latent_recording import AttentionFunction, Recorder, Rotation, leave, uncompiled
from lsp_core.latent_rows import Positions, Rows, bytes_held

log = logging.getLogger(__name__)
CHECKED = 2  # tokens of each block before it is trusted: at position 0 a rotation does nothing
CHECKED_AT_ONCE = 64


class LatentCache(Cache):
    """The cache of one compressed causal language model.

    ``keys``: "rebuilt" from the latents at every step, or "rotated": finished keys are held beside the latents of the
    values, for less arithmetic and less saved. Make it when the model is where it stays, in its dtype and with its
    attention implementation; adapters on layers that make keys and values must be merged before. One call of the model
    at a time; what is held carries no gradient. After a call that failed, and after the weights changed, ``reset``.
    Errors: ``ValueError`` if the model is no compressed decoder or ``keys`` is neither; at the first tokens
    ``ValueError`` if the model does not make keys and values from the latents in a way known here.
    """

    def __init__(self, model: PreTrainedModel, *, keys: KeyMode = "rebuilt") -> None:
        wrapped = getattr(model, "get_base_model", None)  # by PEFT
        model = wrapped() if callable(wrapped) else model
        inner = getattr(model, "model", None)
        if getattr(model.config, "model_type", None) != "lsp" or not isinstance(inner, PreTrainedModel):
            raise ValueError(
                "a LatentCache holds the latents of a compressed model, an LSPForCausalLM, not of a "
                f"{type(model).__name__}: use the ordinary cache"
            )
        if inner.config.is_encoder_decoder or not inner.can_generate():
            raise ValueError(f"a LatentCache is for decoders that generate, not for a {type(inner).__name__}")
        if keys not in ("rebuilt", "rotated"):
            raise ValueError(f"keys={keys!r}: the keys of a LatentCache are 'rebuilt' or 'rotated'")
        blocks = latent_blocks(inner, model.config.units, keys)
        if not blocks:
            log.warning("no block of the model has a latent narrower than its keys and values: all are held whole")
        layers = DynamicCache(config=inner.config).layers
        self._positions = Positions()
        self._recorder = Recorder(inner, blocks.values()) if blocks else None
        if self._recorder is not None:
            for index, block in blocks.items():
                layers[index] = LatentLayer(block, layers[index], self._recorder, self._positions)
        super().__init__(layers=layers)
        self._first = min((i for i, layer in enumerate(layers) if isinstance(layer, CacheLayerMixin)), default=0)

    @property
    def bytes(self) -> int:
        """The bytes of the tensors held, with the room in them for tokens to come: at most a sixteenth."""
        latents = [latent for layer in self._latent_layers() for latent in layer._block.latents]
        return bytes_held(self) + sum(latent.bytes for latent in latents)

    @uncompiled
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of these tokens alone where a latent is held; attention finds the others.

        Errors: ``ValueError`` if a call that failed has left the cache with tokens in some blocks only.
        """
        if layer_idx == self._first:
            self._require_whole()
        states: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return states

    def reset(self) -> None:
        """Forgets all tokens and what was found out about the model: it may have changed."""
        super().reset()  # type: ignore[no-untyped-call]
        self._positions.clear()

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last ``-tokens_to_remove`` tokens. Errors: ``ValueError`` if they are not held any more."""
        self._require_whole()
        for layer in self.layers:
            if isinstance(layer, LatentLayer):
                layer.tokens_after(tokens_to_remove)
            elif isinstance(layer, DynamicSlidingWindowLayer):
                require_past(tokens_to_remove, layer.get_seq_length() >= layer.sliding_window, layer.record_past)
        super().crop(tokens_to_remove)
        self._positions.drop_last(min(-tokens_to_remove, self._positions.length))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._positions.map(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._positions.map(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._positions.map(lambda rows: rows[indices.to(rows.device)])

    def _latent_layers(self) -> list["LatentLayer"]:
        return [layer for layer in self.layers if isinstance(layer, LatentLayer)]

    def _require_whole(self) -> None:
        lengths = {layer.get_seq_length() for layer in self.layers if isinstance(layer, CacheLayerMixin)}
        rows_fit = all(layer.is_whole for layer in self._latent_layers())
        if len(lengths) > 1 or not rows_fit or self._positions.length not in {0, *lengths}:
            raise ValueError(
                f"the blocks hold {sorted(lengths)} tokens, after a call of the model that failed in one of them: "
                "reset the cache"
            )


class LatentLayer(CacheLayerMixin):
    """What is held of one block: rows of its key's latent and of its value's, of one latent, or whole keys or values.

    ``ordinary`` is the layer that the ordinary cache has for the block: its window is kept. ``positions`` (B, T, 1) are
    those of all tokens, which the blocks share: whichever is first in a call adds to them.
    """

    is_croppable = True
    supports_early_init = False

    def __init__(self, block: Block, ordinary: object, recorder: Recorder, positions: Positions) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if type(ordinary) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ValueError(
                f"block {block.index} ({type(block.attention).__name__}) keeps a {type(ordinary).__name__}, not keys "
                "and values alone: a LatentCache cannot stand in for it; use the ordinary cache"
            )
        self.window = ordinary.sliding_window if isinstance(ordinary, DynamicSlidingWindowLayer) else None
        self.is_sliding = self.window is not None
        self.record_past = False
        self.seen = 0
        self._block, self._recorder, self._positions = block, recorder, positions
        self._keys, self._values = Rows(), Rows()  # no values where the latent is one
        self._checked = 0
        self._turns = True  # whether the attention turns its keys by the rotary embedding it is given
        self._plain_keys: PlainKeys | None = None  # as the op that decodes makes them, if it does

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Takes up new tokens, (B, H_kv, n, d) each, and returns them."""
        block, n = self._block, key_states.shape[2]
        for latent in block.latents:
            latent.require_plain()
        rotation = None if block.key is None else self._rotation()
        if rotation is not None and self._positions.length < self.seen + n:
            positions = rotation.positions.to(torch.int32).expand(len(key_states), n)
            self._positions.append(positions.unsqueeze(-1))
        past = self.seen if self.window is None else min(self.seen, self.window - 1)
        keys = self._rows(block.key, key_states)
        self._keys.require_alike(keys)
        if not block.tied:
            self._values.append(self._rows(block.value, value_states))
        self._keys.append(keys)
        self.seen += n
        self.is_initialized = True
        if self._checked < CHECKED:
            self._check(key_states, value_states, rotation)
        leave(block.attention, partial(self._attend, past, rotation))
        return key_states, value_states

    def _rows(self, latent: Latent | None, states: Tensor) -> Tensor:  # (B, H, n, d) -> (B, n, F)
        return states.transpose(1, 2).flatten(2) if latent is None else self._recorder.latent_of(latent.source)

    def _rotation(self) -> Rotation | None:
        try:
            return self._recorder.rotation()
        except LookupError as error:
            raise self._unknown_keys(str(error)) from None

    def _unknown_keys(self, reason: str) -> ValueError:
        kind = type(self._block.attention).__name__
        return ValueError(
            f"the keys of block {self._block.index} ({kind}) cannot be rebuilt from their latent: {reason}; "
            "LatentCache(model, keys='rotated') holds them finished"
        )

    def _check(self, key_states: Tensor, value_states: Tensor, rotation: Rotation | None) -> None:
        """Compares what the latents give with what the model made. Errors: ``ValueError`` where they differ."""
        if not (key_states.isfinite().all() and value_states.isfinite().all()):
            return  # nothing can be told from these
        count = min(key_states.shape[2], CHECKED_AT_ONCE)
        self._checked += count
        if self._block.key is not None:
            self._check_keys(key_states[:, :, -count:], self._turn(rotation, count))
        if self._block.value is not None:
            rows = self._value_rows(count)
            made = F.linear(rows, self._block.value.factor, self._block.value.bias)
            if differ(made, value_states[:, :, -count:].transpose(1, 2).flatten(2)):
                raise ValueError(
                    f"the values of block {self._block.index} ({type(self._block.attention).__name__}) are more than "
                    "its layer's output: a LatentCache cannot hold them; use the ordinary cache"
                )

    def _check_keys(self, expected: Tensor, turn: tuple[Tensor, Tensor] | None) -> None:
        maker, latent = self._key_maker(expected.shape[1]), self._keys.last(expected.shape[2])
        if turn is not None and maker.rotate is None:
            raise self._unknown_keys("the file of the attention has no apply_rotary_pos_emb")
        for tried in (turn, None):  # some blocks do not turn what others do
            try:
                if not differ(maker(latent, tried), expected):
                    break
            except RuntimeError:  # of shapes that do not fit
                continue
        else:
            raise self._unknown_keys("the attention makes them in steps that are not known here")
        self._turns = tried is not None
        self._plain_keys = plain_keys(maker, latent, tried, expected)

    def _key_maker(self, heads: int) -> KeyMaker:
        latent, attention = self._block.key, self._block.attention
        assert latent is not None
        norm, rotate = key_norm_of(attention), rotation_of(attention)
        return KeyMaker(factor=latent.factor, bias=latent.bias, heads=heads, norm=norm, rotate=rotate)

    def _turn(self, rotation: Rotation | None, count: int) -> tuple[Tensor, Tensor] | None:
        """Returns cosine and sine of the last ``count`` positions, (B, count, d_rot) each."""
        if rotation is None:
            return None
        return rotation.of(self._positions, count)

    def _value_rows(self, count: int) -> Tensor:
        return (self._keys if self._block.tied else self._values).last(count)

    def _attend(
        self,
        past: int,
        rotation: Rotation | None,
        prior: AttentionFunction,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The attention of new tokens (B, H, n, d) over ``past`` positions and themselves; the past may be empty."""
        refused = refusal(kwargs)
        if refused is not None:
            raise ValueError(f"{type(self._block.attention).__name__} asks for {refused}, which a LatentCache lacks")
        if past == 0:
            result = prior(query, key, value, mask, **kwargs)
        else:
            result = self._over_latents(past + key.shape[2], rotation, query, key, mask, **kwargs), None
        if self.window is not None and not self.record_past:
            self._keys.keep_last(self.window - 1)
            self._values.keep_last(self.window - 1)
        return result

    def _over_latents(
        self, length: int, rotation: Rotation | None, query: Tensor, key: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Tensor:  # -> (B, n, H, d)
        n, value = query.shape[2], self._block.value
        if (mask is None and n > 1) or (mask is not None and mask.shape[-1] != length):
            raise ValueError(
                f"attention of {n} tokens over {length} positions needs a mask of that length, not "
                f"{None if mask is None else tuple(mask.shape)}"
            )
        held = Held(
            heads=key.shape[1],
            keys=self._keys.last(length),
            key_maker=None if self._block.key is None else self._key_maker(key.shape[1]),
            turn=self._turn(rotation, length) if self._turns else None,
            plain_keys=self._plain_keys,
            values=self._value_rows(length),
            value_factor=None if value is None else value.factor,
            value_bias=None if value is None else value.bias,
        )
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        result = attend_held(query, held, mask=mask, scale=scale, softcap=kwargs.get("softcap"))
        return result.transpose(1, 2).contiguous()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns how many positions the mask of the next tokens spans, and the first of them."""
        past = self.seen if self.window is None else min(self.seen, self.window - 1)
        return past + query_length, self.seen - past

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1 if self.window is None else self.window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Rows take their shapes from the first tokens."""

    def activate_past_recording(self) -> None:
        """Until the next ``crop`` nothing leaves the window."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        kept = self.tokens_after(tokens_to_remove)
        for rows in self._all_rows():
            rows.drop_last(self.seen - kept)
            if self.window is not None:
                rows.keep_last(self.window - 1)
        self.seen = kept

    def tokens_after(self, tokens_to_remove: int) -> int:
        """Returns how many tokens a crop leaves. Errors: ``ValueError`` if it cannot be done."""
        full = self.window is not None and self.seen >= self.window
        require_past(tokens_to_remove, full, self.record_past or tokens_to_remove == 0)
        removed = min(-tokens_to_remove, self.seen)
        kept = self.seen - removed
        needed = kept if self.window is None else min(kept, self.window - 1)
        if self._keys.length - removed < needed:
            raise ValueError(f"crop({tokens_to_remove}): the window before those tokens is not held any more")
        return kept

    @property
    def is_whole(self) -> bool:
        """Whether the rows are those of all tokens seen, or of the window."""
        held = {rows.length for rows in self._all_rows()} or {0}
        return len(held) == 1 and (held == {self.seen} or (self.window is not None and max(held) < self.seen))

    def reset(self) -> None:
        self._keys.clear()
        self._values.clear()
        self.seen = self._checked = 0
        self._turns, self._plain_keys = True, None
        self.is_initialized = False
        for latent in self._block.latents:
            latent.forget()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for rows in self._all_rows():
            rows.map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        for rows in self._all_rows():
            rows.map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        for rows in self._all_rows():
            rows.map(lambda tensor: tensor[indices.to(tensor.device)])

    def _all_rows(self) -> list[Rows]:
        return [rows for rows in (self._keys, self._values) if rows.tensor is not None]
