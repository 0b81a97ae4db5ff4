"""What a latent cache asks: how near what it makes again must be to what the model made, and what a crop needs."""

import dataclasses

import torch
from torch import Tensor

from lsp_core.latent_attention import KeyMaker, PlainKeys

ROUNDINGS = 16  # relative to the norm: sums in another order too
# In 16 bits the sums are in float32, and what counts are the roundings of the results: at most seven on either side, of
# the factor, the bias, the norm, its weight, and of the two products and the sum of a rotation. Each is off by eps / 2
# at most, independently of the others: sqrt(14) / 2 < 2 together.
NARROW_ROUNDINGS = 2


def differ(made: Tensor, expected: Tensor) -> bool:
    """Whether the norm of the difference is more than rounding explains in the dtype of ``expected``."""
    info = torch.finfo(expected.dtype)
    allowed = (ROUNDINGS if info.bits > 16 else NARROW_ROUNDINGS) * info.eps * _norm(expected)
    return made.shape != expected.shape or not _norm(_wide(made) - _wide(expected)) <= allowed


def plain_keys(
    maker: KeyMaker, latent: Tensor, turn: tuple[Tensor, Tensor] | None, expected: Tensor
) -> PlainKeys | None:
    """Returns what makes the keys of ``maker`` for the op that decodes, or None where that makes others.

    Compared with the keys ``expected`` (B, H_kv, T, d) of ``latent`` (B, T, R), and those of random latents without
    the bias: what a bias outweighs, as it may the rotation of the faster columns, shows there.
    """
    plain = maker.plain()
    if plain is None or differ(plain(maker, latent, turn), expected):
        return None
    drawn = torch.randn(latent.shape, generator=torch.Generator().manual_seed(0)).to(latent)
    unbiased = dataclasses.replace(maker, bias=None)
    return None if differ(plain(unbiased, drawn, turn), unbiased(drawn, turn)) else plain


def _norm(tensor: Tensor) -> float:
    return float(_wide(tensor).norm())


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def require_past(tokens_to_remove: int, full: bool, recorded: bool) -> None:
    """Errors: ``ValueError`` if tokens are to be added, or a full window has lost what was before them."""
    if tokens_to_remove > 0 or (full and not recorded):
        raise ValueError(
            f"crop({tokens_to_remove}): give the tokens to remove as a negative number, and call "
            "activate_past_recording() before tokens that may be removed from a window that is full"
        )
