"""Speed and memory against the obvious alternative, both measured in the same run, each arm in a process of its own.

``grid``: the streamed KL grid against a full forward pass per candidate with stored dense logits.
``train``: one optimizer step against the loop that runs the teacher, ``torch.linalg.qr`` and full logits in every
micro-batch.
"""

import logging
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import OPTConfig, OPTForCausalLM

from lsp_core.allocation import uniform_parameters
from lsp_core.discovery import discover_units
from lsp_core.divergence import TeacherStatistic
from lsp_core.projector import attached
from lsp_core.sensitivity import Sensitivity, truncated
from lsp_core.teacher import cache_teacher
from lsp_core.training import Trainer, frozen
from lsp_core.training_settings import TrainingSettings
from lsp_core.units import Unit

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The model and data of a benchmark; the defaults are OPT-125M's, randomly initialized."""

    blocks: int = 12
    hidden: int = 768
    feed_forward: int = 3072
    heads: int = 12
    vocabulary: int = 50_272
    sequences: int = 16  # of the grid
    length: int = 512
    candidates_per_block: int = 2  # one count for each of so many units of a block
    micro_batches: int = 4  # of the training step, two sequences each
    ratio: float = 0.7
    check_length: int = 96  # tokens a sequence of the float64 comparison of gradients
    device: str = "cuda" if torch.cuda.is_available() else "cpu"

    def model(self, dtype: torch.dtype = torch.float32) -> OPTForCausalLM:
        """Returns the model with weights that are a function of the shape alone."""
        torch.manual_seed(0)
        config = OPTConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            ffn_dim=self.feed_forward,
            num_hidden_layers=self.blocks,
            num_attention_heads=self.heads,
            word_embed_proj_dim=self.hidden,
            max_position_embeddings=self.length,
        )
        return OPTForCausalLM(config).to(self.device, dtype).eval()

    def tokens(self, sequences: int, length: int) -> Tensor:
        """Returns random token ids (sequences, length)."""
        return torch.randint(3, self.vocabulary, (sequences, length), generator=torch.Generator().manual_seed(1))


def grid(shape: Shape | None = None) -> dict[str, Any]:
    """Returns the comparison of the streamed with the naive grid; ``max_difference`` in nats over their points."""
    shape = shape or Shape()
    streamed, naive = _in_own_process(_streamed_grid, shape), _in_own_process(_naive_grid, shape)
    differences = [abs(a - b) for a, b in zip(streamed["values"], naive["values"], strict=True)]
    return _comparison("grid", streamed, naive, shape) | {
        "max_difference": max(differences),
        "max_difference_unit": "nats per token",
        "points": len(differences),
        "largest_kl": max(naive["values"]),
    }


def train(shape: Shape | None = None) -> dict[str, Any]:
    """Returns the comparison of one optimizer step; ``max_difference`` is relative, of V's float64 gradients."""
    shape = shape or Shape()
    ours, obvious = _in_own_process(_our_step, shape), _in_own_process(_obvious_step, shape)
    return _comparison("train", ours, obvious, shape) | {
        "max_difference": _in_own_process(_gradient_difference, shape),
        "teacher_seconds": ours["teacher_seconds"],
    }


def _comparison(name: str, ours: dict[str, Any], other: dict[str, Any], shape: Shape) -> dict[str, Any]:
    arms = [{key: arm[key] for key in ("name", "seconds", "peak_bytes")} for arm in (ours, other)]
    device = torch.cuda.get_device_name() if shape.device == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    return {
        "benchmark": name,
        "arms": arms,
        "ratio": other["seconds"] / ours["seconds"],
        "memory_ratio": ours["peak_bytes"] / other["peak_bytes"],
        "device": device,
    }


def _in_own_process(function: Callable[[Shape], Any], shape: Shape) -> Any:
    log.info("%s", (function.__doc__ or "").splitlines()[0])
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, shape).result()


def _peak_bytes(shape: Shape) -> int:
    """Returns the most memory this process held: device memory on a GPU, else resident memory, weights included."""
    if shape.device == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _now(shape: Shape) -> float:
    if shape.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _candidates(shape: Shape, units: list[Unit]) -> list[tuple[str, int]]:
    """Returns the first units of every block, each at half of its directions."""
    chosen = [[u for u in units if u.block == block][: shape.candidates_per_block] for block in range(shape.blocks)]
    return [(unit.name, unit.dimension // 2) for block in chosen for unit in block]


def _random_bases(units: list[Unit], dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    squares = {u.name: torch.randn(u.dimension, u.dimension, generator=generator, dtype=torch.float64) for u in units}
    return {name: torch.linalg.qr(square).Q.to(device, dtype) for name, square in squares.items()}


def _streamed_grid(shape: Shape) -> dict[str, Any]:
    """Streamed grid: the suffix of each candidate's block, the teacher as D + 2 numbers a token."""
    model, tokens = shape.model(), shape.tokens(shape.sequences, shape.length)
    units = discover_units(model)
    bases = _random_bases(units, torch.float32, shape.device)
    started = _now(shape)
    sensitivity = Sensitivity(model, units, bases, tokens, micro_batch=4)
    values = [sensitivity.measure(name, count) for name, count in _candidates(shape, units)]
    return {"name": "streamed", "seconds": _now(shape) - started, "peak_bytes": _peak_bytes(shape), "values": values}


@torch.inference_mode()
def _naive_grid(shape: Shape) -> dict[str, Any]:
    """Naive grid: a full forward pass per candidate against stored dense logits."""
    model, tokens = shape.model(), shape.tokens(shape.sequences, shape.length).to(shape.device)
    units = {unit.name: unit for unit in discover_units(model)}
    bases = _random_bases(list(units.values()), torch.float32, shape.device)
    started = _now(shape)
    dense = [model(input_ids=batch, use_cache=False).logits for batch in tokens.split(4)]
    values = []
    for name, count in _candidates(shape, list(units.values())):
        total = 0.0
        with truncated(model, {name: count}, units, bases):
            for batch, reference in zip(tokens.split(4), dense, strict=True):
                logits = model(input_ids=batch, use_cache=False).logits
                kl = F.kl_div(logits.log_softmax(-1), reference.log_softmax(-1), log_target=True, reduction="none").sum(
                    -1
                )
                total += kl.sum(dtype=torch.float64).item()
        values.append(total / tokens.numel())
    return {"name": "naive", "seconds": _now(shape) - started, "peak_bytes": _peak_bytes(shape), "values": values}


@dataclass(frozen=True, kw_only=True)
class _Case:
    """One training problem: everything that both arms start from."""

    model: OPTForCausalLM
    units: list[Unit]
    bases: dict[str, Tensor]
    removed: dict[str, int]
    tokens: Tensor
    settings: TrainingSettings


def _case(shape: Shape, dtype: torch.dtype, length: int) -> _Case:
    model = shape.model(dtype)
    units = discover_units(model)
    sequences = 2 * shape.micro_batches
    return _Case(
        model=model,
        units=units,
        bases=_random_bases(units, dtype, shape.device),
        removed=uniform_parameters(units, shape.ratio).removed,
        tokens=shape.tokens(sequences, length),
        settings=TrainingSettings(
            learning_rate=1e-3, batch_sequences=sequences, micro_batch=2, modulation_epochs=0, orthogonality=0
        ),
    )


def _our_step(shape: Shape) -> dict[str, Any]:
    """Our optimizer step: QR once, factor form, stored teacher statistic, chunked divergence."""
    case = _case(shape, torch.float32, shape.length)
    started = _now(shape)
    teacher = cache_teacher(case.model, case.tokens, micro_batch=2)
    teacher_seconds = _now(shape) - started
    with _trainer(case, teacher) as trainer:
        started = _now(shape)
        trainer.accumulate(0)
        trainer.update()
        seconds = _now(shape) - started
    return {"name": "ours", "seconds": seconds, "peak_bytes": _peak_bytes(shape), "teacher_seconds": teacher_seconds}


def _obvious_step(shape: Shape) -> dict[str, Any]:
    """Obvious optimizer step: teacher, QR and full logits in every micro-batch."""
    case = _case(shape, torch.float32, shape.length)
    masks = _masks(case)
    started = _now(shape)
    vectors = _obvious(case, masks)
    torch.optim.Adam(vectors.values(), lr=1e-3).step()
    return {"name": "obvious", "seconds": _now(shape) - started, "peak_bytes": _peak_bytes(shape)}


@contextmanager
def _trainer(case: _Case, teacher: TeacherStatistic | None) -> Iterator[Trainer]:
    with attached(case.model, case.units, case.bases, case.removed) as projectors, frozen(case.model):
        yield Trainer(case.model, projectors, case.tokens, case.tokens, case.settings, teacher=teacher)


def _masks(case: _Case) -> dict[str, Tensor]:
    with _trainer(case, None) as trainer:
        return {name: mask.to(case.model.dtype) for name, mask in trainer.draws.masks(0).items()}


def _obvious(case: _Case, masks: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns V of every unit with the gradient of one step, by hooks on the dense model."""
    vectors = {
        u.name: case.bases[u.name][:, u.dimension - case.removed[u.name] :].clone().requires_grad_() for u in case.units
    }
    current: dict[str, Tensor] = {}
    handles = []
    for unit in case.units:
        for index, name in enumerate(unit.members):

            def project(x: Tensor, unit: Unit = unit, index: int = index) -> Tensor:
                u = current[unit.name]
                return x - ((x @ u) * masks[unit.name][index]) @ u.T

            def on_output(module: Any, _: Any, output: Tensor, project: Any = project) -> Tensor:
                return project(output - module.bias) + module.bias if current else output

            def on_input(_: Any, args: tuple[Tensor, ...], project: Any = project) -> tuple[Tensor, ...]:
                return (project(args[0]),) if current else args

            layer = case.model.get_submodule(name)
            side = (
                layer.register_forward_pre_hook(on_input)
                if unit.side == "input"
                else layer.register_forward_hook(on_output)
            )
            handles.append(side)
    with frozen(case.model):
        for batch in case.tokens.to(case.model.device).split(case.settings.micro_batch):
            current.clear()
            with torch.no_grad():
                reference = case.model(input_ids=batch, use_cache=False).logits.log_softmax(-1)
            for name, v in vectors.items():
                q, r = torch.linalg.qr(v)
                current[name] = q * r.diagonal().sign()
            logits = case.model(input_ids=batch, use_cache=False).logits
            kl = F.kl_div(logits.log_softmax(-1), reference, log_target=True, reduction="sum") / case.tokens.numel()
            kl.backward()
    for handle in handles:
        handle.remove()
    return vectors


def _gradient_difference(shape: Shape) -> float:
    """Comparing the gradients of both in float64."""
    case = _case(shape, torch.float64, shape.check_length)
    theirs = _obvious(case, _masks(case))
    with _trainer(case, None) as trainer:
        trainer.accumulate(0)
        pairs = [(trainer.projectors[name].v.grad, v.grad) for name, v in theirs.items()]
    return max(((ours - theirs).norm() / theirs.norm()).item() for ours, theirs in pairs)
