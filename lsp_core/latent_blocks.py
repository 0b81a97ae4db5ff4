"""What a latent cache holds of each block: which latents, and the way back from them to keys and values.

A key or value y = B z + bias is held as its latent z where that is narrower than y. K and V of an input-tied group
have one z, held once. A layer with a core, y = B C z, offers both z and C z. Of all choices the one with the fewest
numbers a token is taken, the whole K and V among them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal, Self

from torch import Tensor, nn

KeyMode = Literal["rebuilt", "rotated"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Latent:
    """One latent of a factored layer. ``source``: the factor whose output it is."""

    layer: nn.Module
    source: nn.Module
    _products: list[tuple[object, Tensor]] = field(default_factory=list)  # none or one, with what it was made from

    @property
    def width(self) -> int:
        """R, the numbers a token."""
        return int(_weight(self.source).shape[0])

    @property
    def factor(self) -> Tensor:  # (D_out, R)
        """The rest of the layer, where ``require_plain`` passes: y = factor z + bias."""
        core = self.layer.core
        before_core = core is not None and self.source is not core
        return self._product() if before_core else _weight(self.layer.output_factor)

    @property
    def bias(self) -> Tensor | None:  # (D_out,)
        bias = self.layer.bias
        assert bias is None or isinstance(bias, Tensor)
        return bias

    @property
    def bytes(self) -> int:
        """Of what is held beside the model's own factors."""
        return sum(product.nbytes for _, product in self._products)

    def forget(self) -> None:
        self._products.clear()

    def require_plain(self) -> None:
        """Errors: ``ValueError`` if a factor is not a linear layer alone: what is held was made without the rest."""
        factors = {name: getattr(self.layer, name) for name in ("input_factor", "core", "output_factor")}
        for name, factor in factors.items():
            linear = getattr(factor, "linear", factor)  # of a Shared
            if factor is not None and type(linear) is not nn.Linear:
                raise ValueError(
                    f"a LatentCache needs the factors of keys and values as plain linear layers, but an {name} is a "
                    f"{type(linear).__module__}.{type(linear).__qualname__}: merge the adapter first "
                    "(merge_and_unload) and make the cache after it, or use the ordinary cache"
                )
        if not any(self.source is factor for factor in factors.values()):
            raise ValueError("a factor of keys or values was replaced after the LatentCache was made: make it anew")

    def _product(self) -> Tensor:
        """Returns the output factor times the core; made anew when either has changed."""
        factors = _weight(self.layer.output_factor).detach(), _weight(self.layer.core).detach()
        made_from = [
            (w.data_ptr(), None if w.is_inference() else w._version, w.stride(), w.dtype, w.device) for w in factors
        ]
        if not self._products or self._products[0][0] != made_from:
            product = (factors[0].double() @ factors[1].double()).to(factors[0].dtype)
            self._products[:] = [(made_from, product)]
        return self._products[0][1]


@dataclass(frozen=True, eq=False, kw_only=True)
class Block:
    """What is held of block ``index``: ``key`` and ``value`` are None where K or V is held whole."""

    index: int
    attention: nn.Module
    key: Latent | None
    value: Latent | None

    @property
    def latents(self) -> list[Latent]:
        return [latent for latent in (self.key, self.value) if latent is not None]

    @property
    def tied(self) -> bool:
        """Whether K and V have one latent."""
        return self.key is not None and self.value is not None and self.key.source is self.value.source

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a copied cache is one of the same model


def latent_blocks(model: nn.Module, units: Iterable[Mapping[str, Any]], keys: KeyMode) -> dict[int, Block]:
    """Returns, by ``layer_idx``, the blocks of ``model`` that have a latent to hold.

    ``units``: each with ``members``, names in ``model``, and ``roles``. Where ``keys`` is "rotated", keys are whole.
    Errors: ``ValueError`` if a layer that makes keys or values lies in no attention with a ``layer_idx``.
    """
    makers: dict[nn.Module, dict[str, set[str]]] = {}
    for unit in units:
        for name, role in zip(unit["members"], unit["roles"], strict=True):
            for made in {"key", "value"}.intersection(role.split("+")):
                # what makes several of them at once gives no latent of one alone
                alone = role == made and _is_factored(model.get_submodule(name))
                makers.setdefault(_attention_of(model, name), {}).setdefault(made, set()).add(name if alone else "")
    blocks = {}
    for attention, names in makers.items():
        layers = {
            made: model.get_submodule(*found) for made, found in names.items() if len(found) == 1 and "" not in found
        }
        block = _narrowest(attention, layers.get("key") if keys == "rebuilt" else None, layers.get("value"))
        for latent in block.latents:
            latent.require_plain()
            blocks[block.index] = block
    return blocks


def _narrowest(attention: nn.Module, key_layer: nn.Module | None, value_layer: nn.Module | None) -> Block:
    """Returns the choice with the fewest numbers a token; of equal ones that with more held whole."""

    def numbers(block: Block) -> int:
        whole_key = 0 if key_layer is None else int(_weight(key_layer).shape[0])
        whole_value = 0 if value_layer is None else int(_weight(value_layer).shape[0])
        value = whole_value if block.value is None else 0 if block.tied else block.value.width
        return (whole_key if block.key is None else block.key.width) + value

    index = attention.layer_idx
    assert isinstance(index, int)
    choices = product([None, *_latents(key_layer)], [None, *_latents(value_layer)])
    blocks = [Block(index=index, attention=attention, key=key, value=value) for key, value in choices]
    return min(blocks, key=numbers)


def _latents(layer: nn.Module | None) -> list[Latent]:
    if layer is None:
        return []
    sources = [source for source in (layer.core, layer.input_factor) if isinstance(source, nn.Module)]
    return [Latent(layer=layer, source=source) for source in sources]


def _attention_of(model: nn.Module, name: str) -> nn.Module:
    path = name
    while path:
        path = path.rpartition(".")[0]
        module = model.get_submodule(path)
        if isinstance(getattr(module, "layer_idx", None), int):
            return module
    raise ValueError(
        f"{name} makes keys or values, but no module around it has a layer_idx: what a LatentCache holds of "
        f"{type(model).__name__} cannot be told from that; use the ordinary cache"
    )


def _is_factored(layer: nn.Module) -> bool:
    """Also of classes that came with a checkpoint."""
    return all(hasattr(layer, part) for part in ("input_factor", "core", "output_factor"))


def _weight(factor: object) -> Tensor:
    weight = getattr(factor, "weight", None)
    assert isinstance(weight, Tensor)
    return weight
