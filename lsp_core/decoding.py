"""A compressed model made ready to decode as fast as its device can."""

from transformers import PreTrainedModel

from lsp_core.fused import fuse
from lsp_core.layout import lay_out


def make_ready(model: PreTrainedModel, *, latent_cache: bool = False) -> None:
    """Changes how ``model`` computes and not what, in place, for inference: on a GPU ``fuse``, elsewhere ``lay_out``.

    Do it last, when the model is on its device, in its dtype and with its adapters. ``latent_cache``: one will be used.
    """
    if model.device.type == "cuda":
        fuse(model, latent_cache=latent_cache)
    else:
        lay_out(model)
