"""The shapes of a model that the costs of the stages are figured from, and what a cost consists of."""

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lsp_core.dryrun import peak_bytes
from lsp_core.inputs import PIXELS, Inputs, inputs_of, probe
from lsp_core.readout import Kind, Readout
from lsp_core.units import LINEAR_TYPES, find_blocks, weight_of

META = torch.device("meta")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one stage takes.

    ``flops``: in the model's dtype; ``gradient_flops``: those of them in passes that are differentiated;
    ``head_flops``: of the vocabulary's distributions, in float32 at least; ``flops64``: matrix products in the
    precision of Grams and bases; ``solver_flops``: decompositions in it.
    ``logits``: numbers that pass through a softmax. ``peak_bytes``: device memory at the peak, weights and tensors;
    on a CPU the tensors of the process, without the interpreter's own base. ``read_bytes``, ``written_bytes``: from and
    to the store or the model's folder. ``text_bytes``: text that is tokenized. ``more_seconds``: a guess of
    time that no rate tells. ``processes`` share the work, each on a device of its own, whose peak is stated.
    """

    flops: float = 0.0
    gradient_flops: float = 0.0
    head_flops: float = 0.0
    flops64: float = 0.0
    solver_flops: float = 0.0
    logits: float = 0.0
    peak_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    text_bytes: int = 0
    more_seconds: float = 0.0
    processes: int = 1


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """What the formulas need of a model that computes in ``dtype`` on the CPU (``on_host``) or on a device.

    ``kind``: as ``Readout`` says; ``positions`` of an image, 0 for tokens; ``inputs``: without padding; ``vocabulary``:
    numbers of a distribution; ``blocks``: parameters of the linear layers of each block; ``attention``: heads x their
    width; ``stored_bytes``: weights on disk; ``model``: on the meta device, in ``dtype``.
    """

    kind: Kind
    positions: int
    inputs: Inputs
    parameters: int
    dtype: torch.dtype
    stored_bytes: int
    hidden: int
    vocabulary: int
    head_parameters: int
    linear_head: bool
    attention: int
    blocks: tuple[int, ...]
    on_host: bool
    model: PreTrainedModel

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.dtype.itemsize

    @property
    def statistic_bytes(self) -> int:
        """Bytes of a teacher's statistic of one token."""
        width = self.hidden if self.keeps_teacher else self.vocabulary
        return (width + 2) * max(4, self.dtype.itemsize)

    @property
    def keeps_teacher(self) -> bool:
        """Whether a teacher's statistic has the width of the hidden state."""
        return self.linear_head or self.kind != "lm"

    def examples(self, count: int, length: int) -> Tensor:  # (count, length) or (count, C, H, W)
        """Returns examples of no content, of ``length`` tokens each."""
        if self.positions == 0:
            return torch.zeros(count, length, dtype=torch.long)
        return torch.zeros(count, *probe(self.model).shape[1:], dtype=torch.uint8)

    def forward(self, length: int, first: int = 0) -> float:
        """FLOPs that the blocks from ``first`` on take a token in a context of ``length``."""
        return 2.0 * sum(self.blocks[first:]) + self.attend(length) * (len(self.blocks) - first)

    def attend(self, length: int) -> float:
        """FLOPs of one block's attention a token."""
        return 4.0 * length * self.attention

    def logits(self) -> float:
        """FLOPs of one pass over the vocabulary a token."""
        return 2.0 * self.head_parameters

    def statistic(self) -> float:
        """FLOPs of a teacher's statistic a token: W h, and WT q where the head is linear."""
        return self.logits() * (2 if self.linear_head else 1)


def shapes_of(
    model: PreTrainedModel,
    *,
    dtype: torch.dtype | None = None,
    stored_bytes: int | None = None,
    on_host: bool = True,
) -> Shapes:
    """Returns the shapes of ``model`` on the meta device, which is left as it is.

    ``dtype``: to compute in, none: the model's own; ``stored_bytes``: of the weights on disk, none: as in memory.
    """
    dtype = dtype or model.dtype
    if model.dtype != dtype or model.device != META:
        model = copy.deepcopy(model)
        nn.Module.to(model, device=META, dtype=dtype)
    config = model.config.get_text_config()
    kind, positions = _kind_of(model)
    distribution = {"lm": "vocab_size", "classifier": "num_labels", "encoder": "hidden_size"}[kind]
    head: nn.Module | None = model.get_output_embeddings()
    heads: int = config.num_attention_heads
    parameters = sum(p.numel() for p in model.parameters())
    return Shapes(
        parameters=parameters,
        dtype=dtype,
        stored_bytes=parameters * dtype.itemsize if stored_bytes is None else stored_bytes,
        hidden=config.hidden_size,
        kind=kind,
        positions=positions if model.main_input_name == PIXELS else 0,
        inputs=replace(inputs_of(model), padding_id=None),
        vocabulary=getattr(config, distribution),
        head_parameters=0 if head is None else weight_of(head).numel(),
        linear_head=head_is_linear(model),
        attention=heads * (getattr(config, "head_dim", None) or config.hidden_size // heads),
        blocks=tuple(
            sum(weight_of(layer).numel() for layer in block.modules() if isinstance(layer, LINEAR_TYPES))
            for block in find_blocks(model)
        ),
        on_host=on_host,
        model=model,
    )


def head_is_linear(model: PreTrainedModel) -> bool:
    """Whether the logits of ``model``, on the meta device, are what its linear head makes, with nothing done to them.

    Told by identity: the tensor that the head returns is the one that the model returns.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return False
    arguments = inputs_of(model).arguments(probe(model), model)
    made: list[int] = []

    def compare() -> None:
        handle = head.register_forward_hook(lambda _, __, output: made.append(output.untyped_storage()._cdata))
        try:
            with torch.no_grad():
                logits = model(**arguments).logits
        finally:
            handle.remove()
        made.append(logits.untyped_storage()._cdata)

    peak_bytes(compare)
    return len(set(made)) == 1


def positions_of(model: PreTrainedModel) -> int:
    """Returns the positions of an image whose features ``model``, on the meta device, gives."""
    return _kind_of(model)[1]


def _kind_of(model: PreTrainedModel) -> tuple[Kind, int]:
    """Returns the kind of ``model``, on the meta device, and the positions of an example whose features are read."""
    found: list[Readout] = []
    peak_bytes(lambda: found.append(Readout(model, replace(inputs_of(model), padding_id=None), purpose="train")))
    counted: list[int] = []
    if found[0].reads_features:
        peak_bytes(lambda: counted.append(found[0].positions(probe(model))))
    return found[0].kind, counted[0] if counted else 1
