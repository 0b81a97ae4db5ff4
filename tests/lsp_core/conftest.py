"""Tiny random models, prepared for compression, and the dense oracles they are compared with."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    PreTrainedModel,
    Qwen3Config,
)

from lsp_core.basis import ordered_basis
from lsp_core.discovery import discover_units
from lsp_core.gram import gather_grams
from lsp_core.projector import attached
from lsp_core.training import Trainer, frozen
from lsp_core.units import Side, Unit, weight_of

VOCABULARY = 101
HEADS = {"hidden_size": 48, "num_attention_heads": 4, "vocab_size": VOCABULARY}
FAMILIES = {
    # Q/K/V and gate/up tied on their input, o and down single, no biases
    "llama": lambda: LlamaConfig(**HEADS, intermediate_size=80, num_hidden_layers=3),
    # biases everywhere, a learned position offset, tied embeddings
    "opt": lambda: OPTConfig(
        **HEADS, ffn_dim=96, num_hidden_layers=3, word_embed_proj_dim=48, max_position_embeddings=32
    ),
    # Conv1D layers, all of them single units
    "gpt2": lambda: GPT2Config(
        n_embd=48, n_head=4, n_layer=3, n_positions=32, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0
    ),
    # grouped-query attention: K and V tied on their output
    "qwen3": lambda: Qwen3Config(
        **HEADS,
        intermediate_size=80,
        num_hidden_layers=2,
        num_key_value_heads=2,
        head_dim=12,
        tie_word_embeddings=False,
    ),
    # soft-capped logits: the head is not linear; its attention is eager
    "gemma2": lambda: Gemma2Config(
        **HEADS,
        intermediate_size=80,
        num_hidden_layers=2,
        num_key_value_heads=4,
        head_dim=12,
        final_logit_softcapping=2.0,
    ),
}


@dataclass
class Case:
    """A tiny model and what the stages before training make of it. ``removed``: 60 % of the directions of each unit."""

    model: PreTrainedModel
    units: list[Unit]
    tokens: Tensor
    grams: dict[str, Tensor]
    bases: dict[str, Tensor]
    removed: dict[str, int]
    by_name: dict[str, Unit] = field(init=False)

    def __post_init__(self) -> None:
        self.by_name = {unit.name: unit for unit in self.units}

    def logits(self) -> Tensor:
        with torch.no_grad():
            return self.model(input_ids=self.tokens, use_cache=False).logits

    def perturbed(self, size: float = 0.05) -> dict[str, Tensor]:
        """Returns vectors (D, K) near the initial ones, neither orthonormal nor of unit length."""
        torch.manual_seed(7)
        last = {n: self.bases[n][:, -k:] for n, k in self.removed.items()}
        return {n: v + size * torch.randn_like(v) for n, v in last.items()}


def build_model(family: str, dtype: torch.dtype = torch.float64, *, gain: float = 6.0) -> PreTrainedModel:
    """Returns a random model whose weights are large enough for its layers to matter."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(gain)
            else:  # biases and norms away from 0 and 1
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def build_unit(side: Side, dimension: int, others: tuple[int, ...]) -> Unit:
    """Returns a unit of layers m0, m1, ... that belong to no model."""
    count = len(others)
    members = tuple(f"m{i}" for i in range(count))
    return Unit(
        name="a.unit", side=side, members=members, dimension=dimension, others=others, block=0, roles=("",) * count
    )


@cache
def _prepared(family: str) -> Case:
    model = build_model(family)
    units = discover_units(model, kv_routing="input" if family == "gemma2" else "auto")
    tokens = torch.randint(3, VOCABULARY, (6, 17), generator=torch.Generator().manual_seed(1))
    grams = gather_grams(model, units, tokens, micro_batch=4)
    bases = {}
    for unit in units:
        weights = [weight_of(model.get_submodule(name)).detach() for name in unit.members]
        bases[unit.name] = ordered_basis(unit, grams[unit.name], weights).q
    removed = {unit.name: int(0.6 * unit.dimension) for unit in units}
    return Case(model, units, tokens, grams, bases, removed)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Tensors of a few thousand numbers: a second thread only waits, and waits long where the cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def make_model() -> Callable[..., PreTrainedModel]:
    return build_model


@pytest.fixture
def make_unit() -> Callable[..., Unit]:
    return build_unit


@pytest.fixture
def prepare() -> Callable[[str], Case]:
    """Hands out a fresh copy of a prepared case in float64: tests may change it."""
    return lambda family: copy.deepcopy(_prepared(family))


def positive_qf(v: Tensor) -> Tensor:
    """The orthogonal factor with a positive diagonal of R, by LAPACK and autograd."""
    q, r = torch.linalg.qr(v)
    return q * torch.sign(r.diagonal())


def explicit_projectors(v: Tensor, masks: Tensor, alpha: float) -> list[Tensor]:
    """I - alpha U diag(m) UT as dense matrices, one a member."""
    u = positive_qf(v)
    eye = torch.eye(len(v), dtype=v.dtype)
    return [eye - alpha * u @ torch.diag(mask.to(v)) @ u.T for mask in masks]


def projected_weights(
    model: nn.Module, units: Sequence[Unit], vectors: Mapping[str, Tensor], masks: Mapping[str, Tensor], alpha: float
) -> dict[str, Tensor]:
    """The members' weights W P or P W under their parameter names, for ``torch.func.functional_call``."""
    weights: dict[str, Tensor] = {}
    for unit in units:
        if unit.name not in vectors:
            continue
        projectors = explicit_projectors(vectors[unit.name], masks[unit.name], alpha)
        for name, projector in zip(unit.members, projectors, strict=True):
            layer = model.get_submodule(name)
            w = weight_of(layer).detach()
            w = w @ projector if unit.side == "input" else projector @ w
            weights[f"{name}.weight"] = w if isinstance(layer, nn.Linear) else w.T
    return weights


@dataclass(frozen=True)
class Oracles:
    """The dense oracles of this file, for tests that several files share."""

    positive_qf: Callable[[Tensor], Tensor] = positive_qf
    explicit_projectors: Callable[[Tensor, Tensor, float], list[Tensor]] = explicit_projectors

    @staticmethod
    def logits(case: Case, vectors: Mapping[str, Tensor], masks: Mapping[str, Tensor], alpha: float) -> Tensor:
        weights = projected_weights(case.model, case.units, vectors, masks, alpha)
        return torch.func.functional_call(
            case.model, weights, kwargs={"input_ids": case.tokens, "use_cache": False}
        ).logits

    @staticmethod
    def all_removed(case: Case) -> dict[str, Tensor]:
        """Masks of ones (members, K)."""
        return {u.name: torch.ones(len(u.members), case.removed[u.name]) for u in case.units if u.name in case.removed}

    @staticmethod
    def kl(teacher: Tensor, student: Tensor) -> Tensor:
        """KL(teacher || student) in nats for each token, from full logits (..., V)."""
        log_p, log_q = teacher.log_softmax(-1), student.log_softmax(-1)
        return (log_p.exp() * (log_p - log_q)).sum(-1)


@pytest.fixture
def oracles() -> Oracles:
    return Oracles()


def random_gram(size: int, rank: int | None = None, *, seed: int = 0, condition: float = 1e3) -> Tensor:
    """A float64 Gram matrix X^T X with a spread of eigenvalues; of lower rank where asked."""
    generator = torch.Generator().manual_seed(seed)
    rank = size if rank is None else rank
    rotation = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q[:, :rank]
    return rotation @ torch.diag(torch.logspace(0, -math.log10(condition), rank, dtype=torch.float64)) @ rotation.T


@pytest.fixture
def make_gram() -> Callable[..., Tensor]:
    return random_gram


@pytest.fixture
def make_trainer():
    """Opens a trainer on attached projectors."""

    def make(case, stack, settings, vectors=None, **options) -> Trainer:
        projectors = stack.enter_context(attached(case.model, case.units, case.bases, case.removed))
        stack.enter_context(frozen(case.model))
        trainer = Trainer(
            case.model,
            projectors,
            case.tokens,
            case.tokens[:3],
            settings,
            **{"teacher": None, "progress": None} | options,
        )
        with torch.no_grad():
            for name, v in (vectors or {}).items():
                projectors[name].v.copy_(v)
        return trainer

    return make


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack
