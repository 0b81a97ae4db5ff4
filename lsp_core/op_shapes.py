"""What the arguments of an op must agree on, looked at before a kernel reads them."""

from collections.abc import Sequence

from torch import Tensor

Shapes = dict[str, tuple[Tensor | None, tuple[int, ...]]]  # tensors by name, each with the shape that it must have


def _require(function: str, tensors: Shapes) -> None:
    """Compares each tensor's shape with the one beside it, where -1 is any size, and its device with the first's.

    Errors: ``ValueError`` naming the first that does not fit. Kernels would read beyond it.
    """
    device = None
    for name, (tensor, expected) in tensors.items():
        if tensor is None:
            continue
        device = tensor.device if device is None else device
        sizes = tensor.shape
        fits = len(sizes) == len(expected)
        for size, wanted in zip(sizes, expected, strict=False):
            fits = fits and wanted in (-1, size)
        if not fits:
            wanted_sizes = ", ".join("any" if size == -1 else str(size) for size in expected)
            raise ValueError(f"{function}: {name} has the shape {tuple(sizes)}, but must have ({wanted_sizes})")
        if tensor.device != device:
            raise ValueError(f"{function}: {name} is on {tensor.device}, but must be on {device} as the others are")


def require_head(function: str, h: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Compares hidden states (T, D), a head (V, D) and its bias (V,). Errors: as ``_require``."""
    shapes: Shapes = {"h": (h, (-1, -1)), "weight": (weight, (-1, *h.shape[1:])), "bias": (bias, weight.shape[:1])}
    _require(function, shapes)


def require_low_rank(x: Tensor, a: Tensor, bs: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
    shapes: Shapes = {"x": (x, tuple(x.shape)), "a": (a, (-1, x.shape[-1]))}
    for number, (b, bias) in enumerate(zip(bs, biases, strict=True)):
        shapes |= {f"bs[{number}]": (b, (-1, len(a))), f"biases[{number}]": (bias, (len(b),))}
    _require("low_rank_linear", shapes)


def require_decode_attention(
    query: Tensor,
    latent_k: Tensor,
    latent_v: Tensor,
    key_factor: Tensor,
    key_bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    keep: Tensor | None,
    norm: Tensor | None,
) -> None:
    if query.shape[1] % len(key_factor) or (cos is None) != (sin is None):
        raise ValueError(
            f"latent_decode_attention: {query.shape[1]} query heads for {len(key_factor)} key/value heads, cos "
            f"{'absent' if cos is None else 'given'}, sin {'absent' if sin is None else 'given'}; the first must be a "
            "multiple of the second, and cos and sin come together"
        )
    (batch, *_, width), context, own = query.shape, latent_k.shape[1:2], len(key_factor)
    turned = () if cos is None else cos.shape[-1:]
    shapes: Shapes = {
        "query": (query, (-1, -1, -1)),
        "latent_k": (latent_k, (batch, -1, -1)),
        "latent_v": (latent_v, (batch, *context, -1)),
        "key_factor": (key_factor, (own, width, *latent_k.shape[2:])),
        "key_bias": (key_bias, (own * width,)),
        "cos": (cos, (batch, *context, *turned)),
        "sin": (sin, (batch, *context, *turned)),
        "keep": (keep, (batch, *context)),
        "norm": (norm, (width,)),
    }
    _require("latent_decode_attention", shapes)
    if turned and (turned[0] % 2 or turned[0] > width):
        raise ValueError(f"latent_decode_attention: cos and sin rotate {turned[0]} columns of {width} in two halves")


def require_value_attention(query: Tensor, keys: Tensor, latent_v: Tensor, keep: Tensor | None) -> None:
    if query.shape[1] % keys.shape[1]:
        raise ValueError(
            f"latent_value_attention: {query.shape[1]} query heads are no multiple of {keys.shape[1]} key/value heads"
        )
    (batch, *_, width), context = query.shape, keys.shape[2:3]
    shapes: Shapes = {
        "query": (query, (-1, -1, -1)),
        "keys": (keys, (batch, -1, -1, width)),
        "latent_v": (latent_v, (batch, *context, -1)),
        "keep": (keep, (batch, *context)),
    }
    _require("latent_value_attention", shapes)


def require_projection(x: Tensor, u: Tensor, scales: Sequence[Tensor]) -> None:
    shapes: Shapes = {"x": (x, tuple(x.shape)), "u": (u, (*x.shape[-1:], -1))}
    _require("project", shapes | {f"scales[{number}]": (scale, u.shape[1:]) for number, scale in enumerate(scales)})
