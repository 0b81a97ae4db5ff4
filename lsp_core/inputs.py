"""What a model reads: how a batch of examples, one tensor, becomes the keyword arguments of a forward pass.

Examples are token ids (B, T) for language models and text encoders, bytes of pixels (B, C, H, W) for images, and token
ids that are split in the middle, the encoder's half and the decoder's, for encoder-decoders.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

PIXELS = "pixel_values"
PROBE_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """How examples become arguments.

    ``name``: of the main argument; ``padding_id``: the token that is no content; ``decoder_start``: the token that a
    decoder beside an encoder begins with; ``mean``, ``std``: of each channel, for pixels as shares of 255;
    ``constants``: further arguments of every forward pass.
    """

    name: str = "input_ids"
    padding_id: int | None = None
    decoder_start: int | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    constants: tuple[tuple[str, Any], ...] = ()

    def arguments(self, batch: Tensor, model: PreTrainedModel) -> dict[str, Any]:
        """Returns the keyword arguments with which ``model`` reads ``batch``."""
        batch = batch.to(model.device)
        if self.name == PIXELS:
            exact = batch.to(torch.promote_types(model.dtype, torch.float32))  # bytes less their mean cancel
            pixels = exact / 255 if batch.dtype == torch.uint8 else exact
            if self.mean:
                mean, std = (pixels.new_tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
                pixels = (pixels - mean) / std
            return {PIXELS: pixels.to(model.dtype), **dict(self.constants)}
        if self.decoder_start is not None:
            targets = self.targets(batch)
            start = targets.new_full((len(targets), 1), self.decoder_start)
            halves = {
                "input_ids": batch[:, : batch.shape[1] // 2],
                "decoder_input_ids": torch.cat([start, targets], 1)[:, :-1],
            }
            return halves | dict(self.constants)
        kept = self.kept(batch)
        mask = {} if kept is None else {"attention_mask": kept.long()}
        return {"input_ids": batch, **mask, **dict(self.constants)}

    def kept(self, batch: Tensor) -> Tensor | None:  # (B, T) -> (B, T)
        """Returns which positions are content, or None where all are."""
        return None if self.padding_id is None else batch != self.padding_id

    def targets(self, batch: Tensor) -> Tensor:  # (B, T) -> (B, P)
        """Returns the tokens that the decoder of an encoder-decoder predicts."""
        return batch[:, batch.shape[1] // 2 :]


def inputs_of(model: PreTrainedModel, *, mean: tuple[float, ...] = (), std: tuple[float, ...] = ()) -> Inputs:
    """Returns how ``model`` reads examples; ``mean`` and ``std`` are those of image data.

    Errors: ``ValueError`` for a model that reads neither tokens nor pixels.
    """
    config = model.config
    if model.main_input_name == PIXELS:
        return Inputs(name=PIXELS, mean=mean, std=std)
    if model.main_input_name != "input_ids":
        raise ValueError(
            f"{type(model).__name__} reads {model.main_input_name}: models that read input_ids or pixel_values can be "
            "compressed"
        )
    if config.is_encoder_decoder:
        start = getattr(config, "decoder_start_token_id", None)
        start = config.pad_token_id if start is None else start
        return Inputs(decoder_start=0 if start is None else start, constants=(("use_cache", False),))
    if model.get_output_embeddings() is None:  # an encoder reads documents, and these are padded
        return Inputs(padding_id=getattr(config, "pad_token_id", None))
    return Inputs(constants=(("use_cache", False),))


def probe(
    model: PreTrainedModel, count: int = 1, length: int = PROBE_TOKENS
) -> Tensor:  # (count, length) or (count, C, H, W)
    """Returns a few examples that ``model`` can read, no token of them padding, on its device."""
    if model.main_input_name == PIXELS:
        config = model.config
        height, width = image_size(config)
        pixels = torch.arange(count * config.num_channels * height * width, device=model.device) % 251
        return pixels.view(count, config.num_channels, height, width).to(torch.uint8)
    vocabulary = model.config.get_text_config().vocab_size
    padding = inputs_of(model).padding_id
    ids = (torch.arange(count * length, device=model.device) % vocabulary).view(count, length)
    return ids if padding is None else torch.where(ids == padding, (padding + 1) % vocabulary, ids)


def image_size(config: Any) -> tuple[int, int]:
    """Returns height and width of the images that a model of ``config`` reads."""
    size = config.image_size
    return (size, size) if isinstance(size, int) else (size[0], size[1])
