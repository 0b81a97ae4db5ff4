"""Of which models, and at which contexts, decoding can be measured: told from the config and an empty model."""

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from lsp_core.modeling_lsp import LSPConfig, class_name

MEASURED = "decoding is measured for decoders that keep every key and value"


def check_compressed(config: LSPConfig) -> None:
    """Errors: ``ValueError`` if the compressed model is no decoder, or was written in an earlier format."""
    if not config.base_architecture or not all("roles" in unit for unit in config.units):
        raise ValueError("the checkpoint was written in an earlier format: run the merge stage again")
    if class_name(config.base_architecture) != "LSPForCausalLM":
        raise ValueError(f"a compressed {config.base_architecture} is no decoder: {MEASURED}")


def check_decoder(model: PreTrainedModel) -> None:
    """Errors: ``ValueError`` for a ``model``, on the meta device or not, of which no arm could be measured right."""
    config = model.config.get_text_config()
    name = type(model).__name__
    if getattr(config, "kv_lora_rank", None) is not None:
        raise ValueError(f"a {name} has multi-head latent attention, a cache of latents of its own: {MEASURED}")
    if expert_weights(model):
        raise ValueError(
            f"a {name} is a mixture of experts: which of them a step reads depends on the tokens, and the tokens of a "
            "benchmark are arbitrary; decoding is measured for models that read all weights"
        )
    check_full_attention(config)


def check_full_attention(config: PreTrainedConfig) -> None:
    """Errors: ``ValueError`` if a layer of the decoder keeps a window only, or a state."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if kinds != {"full_attention"} or window is not None:
        raise ValueError(
            f"a {config.model_type} of layers {', '.join(sorted(kinds))} and window {window} does not keep every key "
            "and value: decoding is measured for full attention only"
        )


def check_positions(model: PreTrainedModel, context: int) -> str | None:
    """Returns a remark where ``context`` lies beyond what the config names, which rotary positions allow, or None.

    Errors: ``ValueError`` where positions are learned, or stored as a table, and there are fewer.
    """
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is None or context < most:
        return None
    learned = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if any(table is not model.get_input_embeddings() for table in learned):
        raise ValueError(f"context {context}: the model has {most} learned positions; ask for at most {most - 1}")
    if any(buffer.dim() > 1 and most in buffer.shape for buffer in model.buffers()):
        raise ValueError(f"context {context}: the model has a table of {most} positions; ask for at most {most - 1}")
    return f"context {context} lies beyond the {most} positions of the config: good for speed, not for text"


def expert_weights(model: nn.Module) -> list[nn.Parameter]:
    """Returns the weights (E, ., .) that hold all experts of a block, each as one parameter."""
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return [
        parameter
        for module in model.modules()
        if not isinstance(module, convolutions)
        for parameter in module.parameters(recurse=False)
        if parameter.dim() == 3
    ]
