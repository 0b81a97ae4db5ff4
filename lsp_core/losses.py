"""The losses of a language model on one micro-batch of test windows."""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from lsp_core.gram import NonFiniteError
from lsp_core.inputs import inputs_of


@torch.inference_mode()
def sum_losses(model: PreTrainedModel, windows: Tensor, batch: range) -> tuple[float, int]:  # (B, T)
    """Returns the sum of the next-token losses of the windows ``batch``, in nats and float64, and how many they are.

    Each window is predicted from its own beginning; of an encoder-decoder its second half, from the first.
    Errors: ``NonFiniteError`` naming the first window whose logits are not finite.
    """
    inputs = inputs_of(model)
    rows = windows[batch.start : batch.stop].to(model.device)
    logits, targets = model(**inputs.arguments(rows, model)).logits, inputs.targets(rows)
    if inputs.decoder_start is None:
        logits, targets = logits[:, :-1], rows[:, 1:]
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    finite = torch.isfinite(losses).all(1) & torch.isfinite(logits).flatten(1).all(1)
    if not finite.all():
        window = batch.start + int((~finite).nonzero()[0])
        raise NonFiniteError(
            f"the logits of test window {window} hold a NaN or an infinity: the model is broken, or overflows"
        )
    return losses.sum(dtype=torch.float64).item(), losses.numel()
