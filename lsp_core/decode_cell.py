"""One cell of the decode benchmark: all arms at one dtype, batch and context, side by side."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from lsp_core.decode_cache import full_cache, full_cache_shapes
from lsp_core.decode_latent import bytes_per_token, fill, started_cache
from lsp_core.decode_report import GIB, measured, speedups
from lsp_core.decode_settings import LATENT, REBUILT, TUNED, DecodeSettings
from lsp_core.decode_step import DecodeStep, copy_bandwidth, timed_rounds
from lsp_core.decode_variants import Variant, reason_of, wanted_kinds
from lsp_core.device_memory import available_bytes
from lsp_core.random_models import Pool, bytes_read, weight_bytes

SPARE_BYTES = 1 << 28  # for activations, beside the cache
NO_GPU = "torch.compile max-autotune and a CUDA graph need a GPU"
GROWS = "this cache grows with every token, which a CUDA graph cannot: eager alone"


@dataclass(kw_only=True)
class Entry:
    """One arm: its step, or the reason why it has none. ``cache_bytes`` are held, ``read_bytes`` of them by a step."""

    name: str
    variant: Variant
    cache_bytes: int | None = None
    read_bytes: int | None = None
    step: DecodeStep | None = None
    reason: str | None = None


def measure_cell(
    settings: DecodeSettings,
    variants: list[Variant],
    base: PreTrainedConfig,
    dtype: torch.dtype,
    batch: int,
    context: int,
) -> dict[str, Any]:
    """Returns the figures of all arms that ``settings`` ask for; the first of ``variants`` is the dense model."""
    copied = copy_bandwidth(settings.place)
    entries = _entries(settings, variants, base, dtype, batch, context)
    running = [(entry, entry.step) for entry in entries if entry.step is not None]
    rounds = timed_rounds([step for _, step in running], settings.rounds, settings.tokens, settings.place)
    seconds = {(entry.name, entry.variant.ratio): each for (entry, _), each in zip(running, rounds, strict=True)}
    full_bytes = sum(shape.numel() for shape in full_cache_shapes(base, batch, context)) * dtype.itemsize
    assert variants[0].model is not None
    dense_bytes = bytes_read(variants[0].model, batch) + full_bytes
    arms = []
    for entry in entries:
        variant, step = entry.variant, entry.step
        arm: dict[str, Any] = {
            "name": entry.name,
            "ratio": variant.ratio,
            "realized_ratio": variant.realized,
            "reason": entry.reason,
            "weights_bytes": None if variant.model is None else weight_bytes(variant.model),
            "cache_bytes": entry.cache_bytes,
        }
        if step is not None:
            assert entry.read_bytes is not None
            assert entry.cache_bytes is not None
            assert variant.model is not None
            step_bytes = bytes_read(variant.model, batch) + entry.read_bytes
            own = seconds[entry.name, variant.ratio]
            arm |= {
                "step_bytes": step_bytes,
                "peak_bytes": None
                if step.peak_bytes is None
                else arm["weights_bytes"] + entry.cache_bytes + step.peak_bytes,
                "steps_per_round": step.steps_at_a_time(settings.tokens),
                "speedup": speedups(entry.name, variant.ratio, seconds),
            }
            arm |= measured(
                own, batch=batch, step_bytes=step_bytes, dense_bytes=dense_bytes, copy_bytes_per_second=copied
            )
        arms.append(arm)
    name = str(dtype).removeprefix("torch.")
    return {"dtype": name, "batch": batch, "context": context, "copy_bytes_per_second": copied, "arms": arms}


def _entries(
    settings: DecodeSettings,
    variants: list[Variant],
    base: PreTrainedConfig,
    dtype: torch.dtype,
    batch: int,
    context: int,
) -> list[Entry]:
    """Returns the arms in order, each with its step prepared; the full-width cache is one for all."""
    shapes = full_cache_shapes(base, batch, context)
    full_bytes = sum(shape.numel() for shape in shapes) * dtype.itemsize
    too_large = _too_large(Pool.bytes_for(shapes, dtype), settings.place)
    pool = None
    if too_large is None and not wanted_kinds(settings) <= set(LATENT):
        pool = Pool(Pool.bytes_for(shapes, dtype), dtype, settings.place, scale=1.0)
    entries = []
    for variant in variants:
        for name in (variant.kind, variant.kind + TUNED):
            if name not in settings.arms:
                continue
            entry, tuned = Entry(name=name, variant=variant, reason=variant.reason), name.endswith(TUNED)
            entries.append(entry)
            if tuned and not settings.on_gpu:
                entry.reason = NO_GPU
            elif tuned and variant.kind in LATENT:
                entry.reason = GROWS
            elif variant.kind not in LATENT:
                entry.cache_bytes = entry.read_bytes = full_bytes
                entry.reason = entry.reason or too_large
            if entry.reason is None:
                assert variant.model is not None
                if variant.kind in LATENT:
                    _attempt(entry, partial(_latent_step, entry, variant.model, settings, batch, context))
                else:
                    assert pool is not None
                    _attempt(entry, partial(_full_step, variant.model, shapes, pool, batch, context, tuned=tuned))
    return entries


def _attempt(entry: Entry, prepare: Callable[[], DecodeStep | None]) -> None:
    """Gives an arm its step; whatever goes wrong with one is its reason, and the others are measured."""
    try:
        entry.step = prepare()
    except Exception as error:
        entry.reason = reason_of(error)


def _full_step(
    model: PreTrainedModel, shapes: list[torch.Size], pool: Pool, batch: int, context: int, *, tuned: bool
) -> DecodeStep:
    step = DecodeStep(model, full_cache(shapes, pool), batch, context)
    step.prepare(tuned=tuned)
    return step


def _latent_step(
    entry: Entry, model: PreTrainedModel, settings: DecodeSettings, batch: int, context: int
) -> DecodeStep | None:
    """Returns a step with a filled latent cache and notes its bytes; None, with the reason, if it does not fit."""
    cache = started_cache(model, "rebuilt" if entry.variant.kind == REBUILT else "rotated", batch)
    entry.read_bytes = entry.cache_bytes = bytes_per_token(cache) * (context + 1)
    entry.reason = _too_large(entry.read_bytes * 17 // 16, settings.place)  # the room that its rows grow by
    if entry.reason is not None:
        return None
    fill(cache, context)
    step = DecodeStep(model, cache, batch, context, restore=lambda: cache.crop(-1))
    step.prepare(tuned=False)
    entry.cache_bytes = cache.bytes
    return step


def _too_large(needed: int, device: str) -> str | None:
    """Returns the reason why ``needed`` bytes cannot be held, or None."""
    free = available_bytes(device)
    if free is None or needed + SPARE_BYTES <= free:
        return None
    return f"does not fit: the cache needs {needed / GIB:.1f} GiB and {free / GIB:.1f} GiB are free"
