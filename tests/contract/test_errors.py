"""Models that break an assumption: an error that names it, or the right answer by the longer way."""

import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from lsp_core.discovery import Group, discover, discover_units
from lsp_core.gram import gather_grams
from lsp_core.inputs import inputs_of
from lsp_core.merging import merge_model, outputs_of, projected_outputs
from lsp_core.sensitivity import Sensitivity, projected_weight
from lsp_core.units import weight_of

WIDTH, VOCABULARY = 24, 31
FFN = VOCABULARY  # so that a layer can share the embedding's weight


class ToyConfig(PreTrainedConfig):
    model_type = "toy"
    vocab_size = VOCABULARY
    plan = "ordinary"


class ToyAttention(nn.Module):
    """Two query heads of 12, one key head, by hand: no softmax that a trace could follow."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 12)
        self.v, self.o = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x).unflatten(-1, (2, 12)), self.k(x), self.v(x)
        weights = torch.einsum("bthd,bsd->bhts", q, k).div(12**0.5).tril().exp().tril()
        weights = weights / weights.sum(-1, keepdim=True)
        return self.o(torch.einsum("bhts,bsd->bthd", weights, v).flatten(2))


class ToyBlock(nn.Module):
    def __init__(self, plan: str) -> None:
        super().__init__()
        self.plan = plan
        self.attention = ToyAttention() if plan == "by hand" else None
        self.up, self.down = nn.Linear(WIDTH, FFN), nn.Linear(FFN, WIDTH)

    def forward(self, x: Tensor, beside: Tensor | None = None) -> Tensor:
        if self.attention is not None:
            x = x + self.attention(x)
        up = self.up(input=x) if self.plan == "by keyword" else self.up(x)
        return x + self.down(torch.tanh(up)) + (0 if beside is None else 0.5 * beside)


class ToyModel(PreTrainedModel, GenerationMixin):
    config_class = ToyConfig
    main_input_name = "input_ids"

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        blocks = [ToyBlock(config.plan) for _ in range(3)]
        self.blocks = nn.Sequential(*blocks) if config.plan == "no list" else nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.post_init()
        if config.plan == "tied":
            self.blocks[1].up.weight = self.embed.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> CausalLMOutput:
        embedded = x = self.embed(input_ids)
        blocks = list(self.blocks)
        order = {"twice": [0, 1, 1, 2, 0], "backwards": [2, 1, 0]}.get(self.config.plan, [0, 1, 2])
        kept = x
        for place, index in enumerate(order):
            beside = kept if self.config.plan == "across" and place == 2 else None
            kept = x if place == 1 else kept
            x = blocks[index](x, beside)
        if self.config.plan == "around":
            x = x + embedded
        return CausalLMOutput(logits=self.head(x))


class SoundModel(ToyModel):
    main_input_name = "input_features"


def toy(plan: str, kind: type[ToyModel] = ToyModel) -> ToyModel:
    torch.manual_seed(3)
    model = kind(ToyConfig(plan=plan)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape))
    return model


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, VOCABULARY, (5, 7), generator=torch.Generator().manual_seed(4))


def test_no_repeated_blocks():
    with pytest.raises(ValueError, match="ToyModel has no repeated blocks with linear layers"):
        discover_units(toy("no list"))


def test_neither_tokens_nor_pixels():
    with pytest.raises(ValueError, match=r"SoundModel reads input_features: .*input_ids or pixel_values"):
        inputs_of(toy("ordinary", SoundModel))


def test_grouped_queries_that_no_trace_can_follow():
    """The error names the layers and the remedy, and the remedy works."""
    model = toy("by hand")
    with pytest.raises(ValueError, match=r"cannot tell which of blocks\.0\.attention\.q, .*explicit groups"):
        discover_units(model)
    groups = [Group(members=("*.attention.k", "*.attention.v"), side="output")]
    units = [unit for unit in discover_units(model, groups=groups) if unit.block == 0]
    found = {unit.name.removeprefix("blocks.0."): (unit.side, unit.dimension) for unit in units}
    assert found == {
        "attention.k+v": ("output", 12),
        "attention.q": ("output", 24),
        "attention.o": ("output", 24),
        "up": ("input", 24),
        "down": ("output", 24),
    }


def test_a_layer_that_shares_its_weight_with_the_embedding():
    found = discover(toy("tied"))
    assert found.left_alone == {"blocks.1.up": "shares its weight with an embedding"}
    assert len(found.units) == 5


def test_a_layer_that_is_called_by_keyword():
    """It is left alone, and said to be; where no other is left, that is an error."""
    found = discover(toy("by keyword"))
    assert [unit.members for unit in found.units] == [(f"blocks.{index}.down",) for index in range(3)]
    assert found.left_alone == dict.fromkeys(
        [f"blocks.{index}.up" for index in range(3)], "called otherwise than with one positional tensor"
    )
    with pytest.raises(ValueError, match="no targetable layer"):
        discover_units(toy("by keyword"), exclude=["*.down"])


@pytest.mark.parametrize("plan", ["ordinary", "twice", "backwards", "across", "around"])
def test_blocks_that_do_not_follow_one_another(plan, ids):
    """Blocks called twice or in another order, or joined by more than the hidden state: exact all the same."""
    model = toy(plan)
    units = discover_units(model)
    assert sorted(name for unit in units for name in unit.members) == sorted(
        f"blocks.{index}.{leaf}" for index in range(3) for leaf in ("up", "down")
    )
    grams = gather_grams(model, units, ids, micro_batch=2)
    bases = {unit.name: torch.linalg.eigh(grams[unit.name]).eigenvectors.flip(-1) for unit in units}
    dense = outputs_of(model, ids).log_softmax(-1)
    sensitivity = Sensitivity(model, units, bases, ids, micro_batch=2)
    for unit in sorted(units, key=lambda unit: unit.block):
        ours = sensitivity.measure(unit.name, 15)
        (layer,) = (model.get_submodule(name) for name in unit.members)
        original = weight_of(layer).clone()
        with torch.no_grad():
            weight_of(layer).copy_(projected_weight(original, bases[unit.name], 15, unit))
            truncated = outputs_of(model, ids).log_softmax(-1)
            weight_of(layer).copy_(original)
        expected = (dense.exp() * (dense - truncated)).sum(-1).mean().item()
        assert expected > 1e-6
        assert ours == pytest.approx(expected, rel=1e-9), unit.name
    vectors = {unit.name: bases[unit.name][:, -15:] for unit in units}
    projected = projected_outputs(model, units, vectors, ids)
    merge_model(model, units, vectors)
    assert (outputs_of(model, ids) - projected).abs().max() <= 1e-12 * projected.abs().max()
