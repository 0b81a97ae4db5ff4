"""A compressed model made ready to decode as fast as its device can."""

from transformers import PreTrainedModel

from lsp_core.fused import fuse, pad_ranks
from lsp_core.layout import lay_out


def make_ready(model: PreTrainedModel, *, latent_cache: bool = False) -> None:
    """Changes how ``model`` computes and not what, in place, for inference: to be done last.

    On a GPU ranks are padded and groups fused, elsewhere factors are laid out. The model is on its device, in its dtype
    and without adapters. ``latent_cache``: a ``LatentCache`` will be used. Load the checkpoint anew to save or train.
    """
    if model.device.type == "cuda":
        pad_ranks(model)
        fuse(model, latent_cache=latent_cache)
    else:
        lay_out(model)
