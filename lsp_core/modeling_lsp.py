"""The compressed model as a Hugging Face model: its layers, its config and its classes.

This file travels in every checkpoint, so that ``trust_remote_code=True`` loads one where only torch and transformers
are installed: it imports nothing else.

A linear layer W becomes B A: ``y = B (A x) + bias``. The layers of an input-tied group hold one A and compute the
latent z = A x once a forward pass; those of an output-tied group hold one B; a layer of both has a core C between them.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

T = TypeVar("T")
CACHE_LINE = 64  # bytes
REMEDY = "the model is compressed: load it after `import lsp_core`, or with trust_remote_code=True"
OWN = ("architectures", "transformers_version")  # what the configs of a compressed model and of its base each have


class Once:
    """Evaluates a function once for several readers of the same tensor, and forgets it after the last of them.

    A pass that was broken off leaves a result behind, which is not read after the tensor or the weights of a module
    changed in place. Copies hold nothing. Threads that share one may each evaluate it anew, but never get the other's
    result: what is held is one object.
    """

    def __init__(self, readers: int) -> None:
        self.readers = readers
        self._held: tuple[Tensor, Any, Any, int] | None = None  # source, its state, result, how often that was read

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.readers,)

    def __call__(self, function: Callable[[Tensor], T], x: Tensor) -> T:
        held, state = self._held, () if torch.compiler.is_compiling() else _state(function, x)
        if held is None or held[0] is not x or held[1] != state:
            held = x, state, function(x), 0
        _, _, result, reads = held
        self._held = (x, state, result, reads + 1) if reads + 1 < self.readers else None
        return result


def _state(function: object, x: Tensor) -> tuple[int, ...]:
    """Returns what the result of a function depends on beside the identity of ``x``."""
    weights: Any = ()
    if isinstance(function, nn.Module):
        weights = function._parameters.values() or function.parameters()  # its own, or those of an adapted layer
    versions = (each._version for each in (x, *weights) if each is not None and not each.is_inference())
    return torch.is_grad_enabled(), *versions


class StandIn(nn.Module):
    """What takes the place of a linear layer. Some blocks ask a layer's ``weight`` for its dtype before the call."""

    @property
    def weight(self) -> Tensor:
        """A tensor of the layer's dtype and device."""
        raise NotImplementedError


class Shared(nn.Module):
    """x -> x WT, a factor that several layers hold, evaluated once a pass for the ``readers`` that read the same x.

    The weight lies one level down, in ``linear``: what replaces that, such as an adapter, replaces it for all holders.
    """

    def __init__(self, linear: nn.Linear, *, readers: int = 1) -> None:
        super().__init__()
        self.linear = linear
        self._once = Once(readers)

    @property
    def weight(self) -> Tensor:
        return self.linear.weight

    def forward(self, x: Tensor) -> Tensor:  # (..., D_in) -> (..., R)
        z: Tensor = self.linear(x) if self._once.readers == 1 else self._once(self.linear, x)
        return z


class FactoredLinear(StandIn):
    """y = B A x + bias, or B C A x + bias where both sides are projected.

    ``input_factor`` holds A (R_in, D_in), ``output_factor`` B (D_out, R_out), ``core`` C (R_out, R_in) where there is
    one. ``sides`` are those on which the layer is projected. A ``bias`` (D_out,) is B's own, or beside a shared B.
    """

    def __init__(
        self,
        input_factor: nn.Linear | Shared,
        core: nn.Linear | None,
        output_factor: nn.Linear | Shared,
        sides: frozenset[str],
        bias: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.sides = sides
        self.input_factor = input_factor
        self.core = core
        self.output_factor = output_factor
        self.bias_beside = bias
        self.fused: Callable[[Tensor], Tensor] | None = None  # what computes it in place of the factors

    @property
    def weight(self) -> Tensor:
        return self.output_factor.weight

    @property
    def bias(self) -> Tensor | None:
        """The bias (D_out,), or None."""
        own: Tensor | None = getattr(self.output_factor, "bias", None)  # an adapter in its place has one too
        return own if self.bias_beside is None else self.bias_beside

    @property
    def ranks(self) -> dict[str, int]:
        """R of each side: one and the same without a core."""
        return {"input": self.input_factor.weight.shape[0], "output": self.output_factor.weight.shape[1]}

    @property
    def in_features(self) -> int:
        return self.input_factor.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.output_factor.weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:  # (..., D_in) -> (..., D_out)
        if self.fused is not None:
            return self.fused(x)
        latent = self.input_factor(x)
        if self.core is not None:
            latent = self.core(latent)
        y: Tensor = self.output_factor(latent)
        return y if self.bias_beside is None else y + self.bias_beside

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, ranks={self.ranks}, out_features={self.out_features}"


def linear_of(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """Returns a linear layer that holds ``weight`` (D_out, D_in) and ``bias`` (D_out,) themselves, frozen."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def shared_factor(weight: Tensor, side: str, members: int) -> nn.Linear | Shared:
    """Returns A (R, D_in) of an input side or B (D_out, R) of an output side, for so many members."""
    linear = linear_of(weight)
    return linear if members == 1 else Shared(linear, readers=members if side == "input" else 1)


def factored(own: Tensor, shared: Mapping[str, nn.Linear | Shared], bias: Tensor | None) -> FactoredLinear:
    """Returns the factored layer of one member.

    ``shared`` holds A as "input", B as "output", or both; what more than one layer holds is a ``Shared``. ``own`` is
    the rest of the product: B (D_out, R_in), A (R_out, D_in) or the core C (R_out, R_in). ``bias``: (D_out,).
    """
    if "output" not in shared:
        return FactoredLinear(shared["input"], None, linear_of(own, bias), frozenset(shared))
    beside = None if bias is None else nn.Parameter(bias, requires_grad=False)
    output = shared["output"]
    if isinstance(output, nn.Linear) and beside is not None:
        output, beside = linear_of(output.weight, bias), None
    if "input" in shared:
        return FactoredLinear(shared["input"], linear_of(own), output, frozenset(shared), beside)
    return FactoredLinear(linear_of(own), None, output, frozenset(shared), beside)


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Puts ``module`` where ``name`` is; other names of the same layer (weight sharing) are replaced with it."""
    old = model.get_submodule(name)
    for parent in list(model.modules()):
        for child_name, child in list(parent._modules.items()):  # named_children passes over second names
            if child is old:
                setattr(parent, child_name, module)


def factor_layers(model: nn.Module, units: Sequence[Mapping[str, Any]]) -> None:
    """Replaces, in place, the members of ``units`` by factored layers of the right shapes, with uninitialized weights.

    Each unit: ``name``, ``side`` ("input" or "output"), ``members`` (names in ``model``), ``rank``.
    """
    shared: dict[str, dict[str, nn.Linear | Shared]] = {}
    for unit in units:
        weight = _weight_of(model.get_submodule(unit["members"][0]))
        shape = (unit["rank"], weight.shape[1]) if unit["side"] == "input" else (weight.shape[0], unit["rank"])
        factor = shared_factor(weight.new_empty(shape), unit["side"], len(unit["members"]))
        for name in unit["members"]:
            shared.setdefault(name, {})[unit["side"]] = factor
    for name, factors in shared.items():
        layer = model.get_submodule(name)
        weight = _weight_of(layer)
        rows = factors["output"].weight.shape[1] if "output" in factors else weight.shape[0]
        columns = factors["input"].weight.shape[0] if "input" in factors else weight.shape[1]
        bias = None if layer.bias is None else torch.empty_like(cast(Tensor, layer.bias))
        replace_module(model, name, factored(weight.new_empty(rows, columns), factors, bias))
        for parameter in model.get_submodule(name).parameters():
            parameter.requires_grad_(True)


def _weight_of(layer: nn.Module) -> Tensor:  # (D_out, D_in)
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return weight.T if isinstance(layer, Conv1D) else weight


def _given(**arguments: Any) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


def _second_names(model: nn.Module) -> dict[str, str]:
    """Returns the second names of the parameters of shared factors, each with its first."""
    first: dict[nn.Parameter, str] = {}
    holders = [(name, module) for name, module in model.named_modules(remove_duplicate=False)]
    held = [pair for name, module in holders if isinstance(module, Shared) for pair in module.named_parameters(name)]
    return {name: first[parameter] for name, parameter in held if first.setdefault(parameter, name) != name}


def _forgive_second_names(model: nn.Module, loaded: Any) -> None:
    """Takes out of the missing keys, whatever their prefix, the second names of what was loaded under its first."""
    missing = loaded.missing_keys
    for second, first in _second_names(model).items():
        for key in [key for key in missing if key == second or key.endswith(f".{second}")]:
            if key.removesuffix(second) + first not in missing:
                missing.remove(key)


class LSPConfig(PreTrainedConfig):
    """The base model's config, the units, and what is known about the compression.

    ``units``: the factored ones, each with ``name``, ``side``, ``members``, ``roles`` (what each member makes of the
    attention's query, key and value, joined by "+"), ``rank``. ``base_architecture``: the class of transformers that
    is compressed; ``options``: the arguments that it is built with beside its config. An attribute that is not here is
    the base config's; one that both have is set in both.
    """

    model_type = "lsp"
    _auto_class = "AutoConfig"  # config.json names this file as the code of it, as of the models below
    sub_configs = {"base_config": AutoConfig}  # noqa: RUF012 (as the base class declares it)

    def __init__(
        self,
        base_config: PreTrainedConfig | dict[str, Any] | None = None,
        base_architecture: str = "",
        units: Sequence[dict[str, Any]] = (),
        options: dict[str, Any] | None = None,
        facts: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if base_config is not None and not base_architecture:
            raise ValueError(
                "this compressed checkpoint was written in an earlier format: run the merge stage again (python -m "
                "flows compress on the same config)"
            )
        if isinstance(base_config, dict):
            dtype = str(base_config.get("dtype")).removeprefix("torch.")
            if not isinstance(getattr(torch, dtype, None), torch.dtype):  # REMEDY, in whatever words
                base_config = base_config | {"dtype": kwargs.get("dtype")}
            base_config = AutoConfig.for_model(**base_config)
        if base_config is not None:
            shared = ("is_encoder_decoder", "id2label", "label2id", "problem_type")
            kwargs |= {name: getattr(base_config, name) for name in shared}
        super().__init__(**kwargs)
        self.base_config = base_config
        self.base_architecture = base_architecture
        self.units = list(units)
        self.options = dict(options or {})
        self.facts = dict(facts or {})
        if self._attn_implementation is not None:
            self._attn_implementation = self._attn_implementation  # reaches the base config by assignment

    def __getattr__(self, name: str) -> Any:
        base = self.__dict__.get("base_config")
        if base is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no {name}")
        return getattr(base, name)

    def __setattr__(self, name: str, value: Any) -> None:
        base = None if name.startswith("_") or name in OWN else self.__dict__.get("base_config")
        theirs = base is not None and hasattr(base, name)
        if theirs:
            setattr(base, name, value)
        if not theirs or name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)  # type: ignore[no-untyped-call]

    def to_dict(self) -> dict[str, Any]:
        output: dict[str, Any] = super().to_dict()
        base: Any = self.__dict__.get("base_config")
        if base is not None:  # what differs from the defaults, and no path of the machine it came from
            output["base_config"] = base.to_diff_dict() | {"model_type": base.model_type}
            # The base model's own class would find its config here and draw the factored layers at random. What it
            # cannot take for a dtype stops it, and says what to do; the true one is the compressed model's.
            output["base_config"]["dtype"] = REMEDY
        return output

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        base = self.__dict__.get("base_config")  # not there yet while the fields are checked
        return self if base is None else base.get_text_config(decoder=decoder, encoder=encoder)


class _Compressed(PreTrainedModel):
    """A model of transformers, in ``model``, whose units are factored; everything is delegated to it."""

    config_class = LSPConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True  # as far as the base model does, which checks for itself
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: LSPConfig) -> None:
        architecture = getattr(transformers, config.base_architecture, None)
        if not (isinstance(architecture, type) and issubclass(architecture, PreTrainedModel)):
            raise ValueError(
                f"the checkpoint compresses a {config.base_architecture or 'model of no class'}, which transformers "
                f"{transformers.__version__} lacks: install the version that it was made with, or a later one"
            )
        expected = class_name(config.base_architecture)
        if type(self).__name__ != expected:
            loader = CLASSES[expected]._auto_class
            raise ValueError(
                f"the checkpoint compresses a {config.base_architecture}: load it with {loader} or {expected}, not as "
                f"{type(self).__name__}"
            )
        base: Any = architecture(cast(PreTrainedConfig, config.base_config), **config.options)
        factor_layers(base, config.units)
        config._attn_implementation_internal = base.config._attn_implementation
        super().__init__(config)
        self.model = base
        self.main_input_name = base.main_input_name
        self._can_compile_fullgraph = base._can_compile_fullgraph
        taken = inspect.signature(base.forward).parameters.values()
        open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken)
        self.accepts_loss_kwargs = getattr(base, "accepts_loss_kwargs", open_ended)  # how trainers average losses
        self._tied_weights_keys = _second_names(self)  # what is not saved
        self.register_load_state_dict_post_hook(_forgive_second_names)  # type: ignore[no-untyped-call]
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.set_input_embeddings(value)

    def get_output_embeddings(self) -> Any:
        return self.model.get_output_embeddings()

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.model.set_output_embeddings(value)

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Returns the second names of shared factors, tied whatever the config says, and what the base model ties."""
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)  # calls this one for each part
        return _second_names(self)

    def mark_tied_weights_as_initialized(self, loading_info: Any) -> None:
        """As in transformers, but a shared factor that no file holds stays missing under its first name too."""
        missing = set(loading_info.missing_keys)
        super().mark_tied_weights_as_initialized(loading_info)  # type: ignore[no-untyped-call]
        loading_info.missing_keys = missing

    @classmethod
    def from_pretrained(cls, name_or_path: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """As in transformers, but weights that are missing or too many are an error, never a random tensor.

        So are those of another shape, unless ``ignore_mismatched_sizes`` is given.
        """
        wanted, allowed = kwargs.pop("output_loading_info", False), kwargs.get("ignore_mismatched_sizes", False)
        kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # mismatches are among the odd below
        model: Any
        info: Any
        model, info = super().from_pretrained(name_or_path, *args, **kwargs)  # type: ignore[misc]
        _forgive_second_names(model, SimpleNamespace(**info))  # those of adapters, if any
        kinds = {"missing_keys": "missing", "unexpected_keys": "too many", "mismatched_keys": "misshapen"}
        if allowed:
            del kinds["mismatched_keys"]
        odd = {
            text: sorted(name if isinstance(name, str) else name[0] for name in info[kind])
            for kind, text in kinds.items()
        }
        if any(odd.values()):
            listed = "; ".join(f"{text}: {', '.join(names[:5])}" for text, names in odd.items() if names)
            raise ValueError(
                f"the weights in {name_or_path} do not fit its config ({listed}): copy the checkpoint anew"
            )
        for parameter in model.parameters():
            if parameter.device.type == "cpu" and parameter.data_ptr() % CACHE_LINE:
                parameter.data = parameter.data.clone()  # sums are then the same bits as before saving, and faster
        if model.can_generate():
            model.model.generation_config = model.generation_config
        return (model, info) if wanted else model


class _Generating(_Compressed, GenerationMixin):
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As the base model generates, by the generation config of this one, whose call each step is.

        What generates is the base model under a class of its own, which differs in what a call is: with it go the
        signatures and methods that transformers looks for, and what was put in the place of this one's is called.
        """
        base, prepare = self.model, self.prepare_inputs_for_generation
        if getattr(prepare, "__func__", None) is _Generating.prepare_inputs_for_generation:
            prepare = base.prepare_inputs_for_generation  # whose signature is looked at too
        base.generation_config = self.generation_config
        kind, call = type(base), lambda _, *args, **kwargs: self(*args, **kwargs)
        own = {"__call__": call, "prepare_inputs_for_generation": staticmethod(prepare), "__module__": kind.__module__}
        stepping: Any = object.__new__(type(kind.__name__, (kind,), own))
        object.__setattr__(stepping, "__dict__", base.__dict__)
        return stepping.generate(*args, **kwargs)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.prepare_inputs_for_generation(*args, **kwargs)


# What the forward methods below name is what trainers look for in a signature, to choose columns and to find labels.


class LSPForCausalLM(_Generating):
    """A compressed decoder."""

    _auto_class = "AutoModelForCausalLM"

    def forward(
        self, input_ids: Any = None, *args: Any, attention_mask: Any = None, labels: Any = None, **kwargs: Any
    ) -> Any:
        return super().forward(input_ids, *args, **_given(attention_mask=attention_mask, labels=labels), **kwargs)


class LSPForSeq2SeqLM(_Generating):
    """A compressed encoder-decoder."""

    _auto_class = "AutoModelForSeq2SeqLM"

    def forward(
        self,
        input_ids: Any = None,
        *args: Any,
        attention_mask: Any = None,
        decoder_input_ids: Any = None,
        labels: Any = None,
        **kwargs: Any,
    ) -> Any:
        given = _given(attention_mask=attention_mask, decoder_input_ids=decoder_input_ids, labels=labels)
        return super().forward(input_ids, *args, **given, **kwargs)

    def get_encoder(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.get_encoder(*args, **kwargs)


class LSPForImageClassification(_Compressed):
    """A compressed image classifier."""

    _auto_class = "AutoModelForImageClassification"

    def forward(self, pixel_values: Any = None, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        return super().forward(pixel_values, *args, **_given(labels=labels), **kwargs)


class LSPModel(_Compressed):
    """A compressed encoder, or any other model."""

    _auto_class = "AutoModel"


CLASSES: dict[str, type[_Compressed]] = {
    "LSPForCausalLM": LSPForCausalLM,
    "LSPForSeq2SeqLM": LSPForSeq2SeqLM,
    "LSPForImageClassification": LSPForImageClassification,
    "LSPModel": LSPModel,
}


def class_name(base_architecture: str) -> str:
    """Returns the name of the class here that holds a ``base_architecture`` of transformers."""
    auto = transformers.models.auto.modeling_auto
    by_task: dict[str, Any] = {
        "LSPForCausalLM": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "LSPForSeq2SeqLM": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "LSPForImageClassification": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    }
    for name, architectures in by_task.items():
        known = [(each,) if isinstance(each, str) else each for each in architectures.values()]
        if any(base_architecture in each for each in known):
            return name
    return "LSPModel"
