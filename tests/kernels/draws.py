"""Numbers for the kernels' tests, and where the kernels run: on a GPU where there is one, interpreted elsewhere."""

import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def integers(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Returns -1, 0 (three in five) and 1: their products and sums are exact in any order while they stay small."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-2, 3, shape, generator=generator)
    return torch.where(drawn.abs() == 1, drawn, 0).to(DEVICE, dtype)


def normal(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Returns standard normal numbers, rounded to ``dtype``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def roundoff(dtype: torch.dtype) -> float:
    """Returns the largest relative error of a rounding to ``dtype``; the interpreter truncates to bfloat16."""
    eps = torch.finfo(dtype).eps
    return eps if dtype == torch.bfloat16 else eps / 2


def cut_out(tensor: Tensor) -> Tensor:
    """Returns ``tensor`` as a part of larger storage, in its last two dimensions, that holds NaN around it."""
    shape = (*tensor.shape[:-2], tensor.shape[-2] + 3, tensor.shape[-1] + 5)
    storage = torch.full(shape, torch.nan, dtype=tensor.dtype, device=tensor.device)
    part = storage[..., 1:-2, 2:-3]
    return part.copy_(tensor)
