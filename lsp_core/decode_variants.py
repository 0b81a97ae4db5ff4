"""The models of the decode benchmark: which the arms need, and their weights on the device."""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from lsp_core.decode_report import GIB
from lsp_core.decode_settings import (
    DENSE,
    DTYPES,
    LATENT,
    MADE_READY,
    OURS,
    READY,
    REBUILT,
    ROTATED,
    TUNED,
    UNTIED,
    UNTIED_READY,
    DecodeSettings,
)
from lsp_core.decode_step import MASKLESS
from lsp_core.decoding import make_ready
from lsp_core.device_memory import available_bytes
from lsp_core.random_models import (
    Pool,
    dense_model,
    materialize,
    pooled_shapes,
    realized_ratio,
    tied_model,
    untied_model,
)

log = logging.getLogger(__name__)

Units = list[dict[str, Any]]
UNFACTORED = "nothing is factored, so there is no untied model of the same size"


@dataclass(kw_only=True)
class Variant:
    """One model of a run; its arms are ``kind`` and ``kind``-tuned.

    ``ratio``: as asked for; ``realized``: of the parameters of the targeted layers; both None of the dense model.
    ``reason``: why it cannot be measured; without a ``model`` there is one.
    """

    kind: str
    ratio: float | None
    realized: float | None
    model: PreTrainedModel | None
    reason: str | None = None


def variants_of(
    settings: DecodeSettings, base: PreTrainedConfig, compressions: dict[float | None, Units]
) -> tuple[list[Variant], list[dict[str, Any]]]:
    """Returns the models that the arms need, on the meta device, the dense one first; and the ranks by ratio."""
    wanted = wanted_kinds(settings)
    dense = dense_model(base)
    variants = [Variant(kind=DENSE, ratio=None, realized=None, model=dense)]
    ranks = []
    for asked, units in compressions.items():
        realized = realized_ratio(dense, tied_model(base, units))
        ratio = realized if asked is None else asked
        chosen: dict[str, Any] = {"ratio": ratio, "tied": {unit["name"]: unit["rank"] for unit in units}}
        for kind in (UNTIED, UNTIED_READY):
            if kind in wanted:
                variant, chosen["untied"] = _untied(kind, base, dense, ratio, realized)
                variants.append(variant)
        for kind in (OURS, READY, REBUILT, ROTATED):
            if kind in wanted:
                variants.append(Variant(kind=kind, ratio=ratio, realized=realized, model=tied_model(base, units)))
        ranks.append(chosen)
    return variants, ranks


def wanted_kinds(settings: DecodeSettings) -> set[str]:
    """Returns the kinds of models that the arms are of."""
    return {arm.removesuffix(TUNED) for arm in settings.arms}


def _untied(
    kind: str, base: PreTrainedConfig, dense: PreTrainedModel, ratio: float, realized: float
) -> tuple[Variant, dict[str, int]]:
    """Returns untied pairs of the size that the tied groups have, and their ranks."""
    if realized <= 0:
        return Variant(kind=kind, ratio=ratio, realized=realized, model=None, reason=UNFACTORED), {}
    try:
        pairs, ranks = untied_model(base, realized)
    except ValueError as error:
        return Variant(kind=kind, ratio=ratio, realized=realized, model=None, reason=reason_of(error)), {}
    return Variant(kind=kind, ratio=ratio, realized=realized_ratio(dense, pairs), model=pairs), ranks


def give_weights(variants: list[Variant], settings: DecodeSettings, dtype: str) -> None:
    """Gives the models that arms are of weights on the device, or a reason to each that cannot be had there.

    Errors: ``ValueError`` if none of them fits.
    """
    wanted = wanted_kinds(settings)
    models = [(each, each.model) for each in variants if each.model is not None and each.kind in wanted]
    sizes = [Pool.bytes_for(pooled_shapes(model), DTYPES[dtype]) for _, model in models]
    free = available_bytes(settings.place)
    if free is not None:
        for (variant, _), size in zip(models, sizes, strict=True):
            if size > free:
                variant.reason = f"does not fit: the weights need {size / GIB:.1f} GiB, {free / GIB:.1f} GiB are free"
        if sizes and min(sizes) > free:
            raise ValueError(
                f"the weights of {settings.model} in {dtype} need {min(sizes) / GIB:.1f} GiB, and the {settings.place} "
                f"has {free / GIB:.1f} GiB free: ask for --dtype bfloat16, a smaller shape or another device"
            )
    pool = Pool(max((size for size in sizes if free is None or size <= free), default=0), DTYPES[dtype], settings.place)
    for variant, model in models:
        if variant.reason is None:
            try:
                _finish(variant.kind, model, pool, settings, dtype)
            except Exception as error:
                variant.reason = reason_of(error)


def _finish(kind: str, model: PreTrainedModel, pool: Pool, settings: DecodeSettings, dtype: str) -> None:
    if kind not in LATENT:  # a latent cache brings an attention of its own
        model.set_attn_implementation(MASKLESS)
    materialize(model, pool, DTYPES[dtype], settings.place)
    if kind in MADE_READY:
        make_ready(model, latent_cache=kind in LATENT)


def reason_of(error: Exception) -> str:
    """Returns what an error says, for people, in a line; the log has all of it, unless it is one of the input."""
    line = next(iter(str(error).splitlines()), "")[:300]
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of memory: {line}"
    if type(error) is not ValueError:
        log.warning("an arm cannot be measured", exc_info=error)
    return line if isinstance(error, ValueError) and line else f"{type(error).__name__}: {line}"
