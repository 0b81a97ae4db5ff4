"""Training by several processes against one, and orthonormalization by owners against the same in every process.

``python -m lsp_core.distributed_benchmark --processes 2`` runs where only torch and transformers are installed. One
group of torchrun does everything, on a random Llama with random bases: in each round the arms take turns at the same
global batch, from the same start: ``one`` (the first process alone, while the others wait), ``owned`` and
``replicated`` (all of them). Every process has one thread.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lsp_core.allocation import uniform_parameters
from lsp_core.discovery import discover_units
from lsp_core.distributed import Group
from lsp_core.divergence import TeacherStatistic
from lsp_core.exchange import Exchange
from lsp_core.ownership import assign_owners, orthogonal_costs
from lsp_core.projector import attached
from lsp_core.teacher import cache_teacher
from lsp_core.training import Trainer, frozen
from lsp_core.training_settings import TrainingSettings
from lsp_core.units import Unit
from lsp_core.vectors import Plan

ARMS = ("one", "owned", "replicated")
FILE = "result.json"


@dataclass(frozen=True, kw_only=True)
class DistributedSettings:
    """What is measured. ``steps`` of an arm in a round, after one that is not counted; ``ratio`` removed."""

    processes: int = 2
    device: str = "cpu"
    hidden: int = 384
    intermediate: int = 1024
    blocks: int = 4
    heads: int = 6
    vocabulary: int = 4096
    sequences: int = 16
    length: int = 128
    micro_batch: int = 4
    ratio: float = 0.5
    steps: int = 2
    rounds: int = 3

    def __post_init__(self) -> None:
        if self.processes < 2 or min(self.steps, self.rounds) < 1:
            raise ValueError("at least 2 processes, a step and a round are needed to compare anything")
        if torch.device(self.device).type == "cuda" and torch.cuda.device_count() < self.processes:
            raise ValueError(f"{self.processes} processes need a GPU each, and {torch.cuda.device_count()} are here")


def distributed(settings: DistributedSettings) -> dict[str, Any]:
    """Starts the processes and returns what they measured.

    Seconds are medians over rounds and steps, until the slowest process is done; bytes those of the most loaded
    process; differences of V the largest norm of a unit, relative to that of what one process moved of it.
    Errors: ``RuntimeError`` if a process fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(settings.processes), "-m", "lsp_core.distributed_benchmark"]
        command += [part for name, value in asdict(settings).items() for part in (_flag(name), str(value))]
        done = subprocess.run(
            [*command, "--worker", folder],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"a process of the benchmark failed:\n{done.stderr[-4000:]}")
        result: dict[str, Any] = json.loads((Path(folder) / FILE).read_text(encoding="utf-8"))
    return result


@dataclass(frozen=True, kw_only=True)
class _Timed(Exchange):
    """Notes the seconds of bases, their gradients and what is exchanged; all processes begin at once."""

    seconds: list[float] = field(default_factory=list)

    def set_forms(self, plans: Mapping[str, Plan]) -> None:
        started = _now(self.group)
        super().set_forms(plans)
        self.seconds.append(_now(self.group) - started)

    def backward(self) -> None:
        started = _now(self.group)
        super().backward()
        self.seconds.append(_now(self.group) - started)


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """Seconds of each step, of its orthonormalization, the bytes that V and its like take, and V at the end."""

    steps: list[float]
    orthonormalizing: list[float]
    held_bytes: int
    vectors: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class _Case:
    model: LlamaForCausalLM
    units: Sequence[Unit]
    bases: Mapping[str, Tensor]
    removed: Mapping[str, int]
    tokens: Tensor
    teacher: TeacherStatistic
    settings: TrainingSettings


def _case(settings: DistributedSettings, device: torch.device) -> _Case:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=settings.hidden,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.blocks,
        num_attention_heads=settings.heads,
        vocab_size=settings.vocabulary,
    )
    model = LlamaForCausalLM(config)
    model.train(False)
    units = discover_units(model)
    bases = {unit.name: torch.linalg.qr(torch.randn(unit.dimension, unit.dimension).double()).Q for unit in units}
    tokens = torch.randint(settings.vocabulary, (settings.sequences, settings.length))
    torch.nn.Module.to(model, device)
    return _Case(
        model=model,
        units=units,
        bases=bases,
        removed=uniform_parameters(units, settings.ratio).removed,
        tokens=tokens,
        teacher=cache_teacher(model, tokens, micro_batch=settings.micro_batch),
        settings=TrainingSettings(
            learning_rate=1e-3,
            epochs=1 + settings.steps,
            batch_sequences=settings.sequences,
            micro_batch=settings.micro_batch,
            warmup_fraction=0.0,
            modulation_epochs=0.0,
        ),
    )


def _measure(case: _Case, group: Group, *, replicated: bool) -> _Measured:
    """Runs the steps, from the start, in this process as one of ``group``."""
    owners: dict[str, int | None] = dict.fromkeys(orthogonal_costs(case.units, case.removed))
    if not replicated:
        owners |= assign_owners(orthogonal_costs(case.units, case.removed), group.size)
    owned = [name for name, owner in owners.items() if owner in (None, group.rank)]
    steps, orthonormalizing = [], []
    with attached(case.model, case.units, case.bases, case.removed, owned) as projectors, frozen(case.model):
        exchange = _Timed(group=group, projectors=projectors, owners=owners)
        trainer = Trainer(
            case.model, projectors, case.tokens, case.tokens, case.settings, teacher=case.teacher, exchange=exchange
        )
        for step in range(case.settings.epochs):
            exchange.seconds.clear()
            started = _now(group)
            trainer.accumulate(step)
            updating = _now(group)
            trainer.update()
            ended = _now(group)
            steps.append(ended - started)
            orthonormalizing.append(sum(exchange.seconds) + ended - updating)
        held = [p.vectors for p in projectors.values() if p.vectors is not None]
        moments = [t for state in trainer.optimizer.state.values() for t in state.values()]
        tensors = [*moments, *(vectors.v for vectors in held), *(vectors.start for vectors in held)]
        return _Measured(
            steps=steps[1:],
            orthonormalizing=orthonormalizing[1:],
            held_bytes=sum(tensor.numel() * tensor.itemsize for tensor in tensors),
            vectors={name: p.v.detach().cpu() for name, p in projectors.items() if p.vectors is not None},
        )


def _now(group: Group) -> float:
    """Returns the seconds of a clock when all processes have come here."""
    if group.device is not None and group.device.type == "cuda":
        torch.cuda.synchronize(group.device)
    group.sums([0.0])
    return time.perf_counter()


def _work(settings: DistributedSettings, folder: Path) -> None:
    """What each process does; the leader writes the result."""
    torch.set_num_threads(1)
    group = Group.from_environment(settings.device)
    assert group.device is not None
    case = _case(settings, group.device)
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    parts: dict[str, list[float]] = {arm: [] for arm in ARMS}
    held: dict[str, int] = {}
    vectors: dict[str, dict[str, Tensor]] = {}
    for _ in range(settings.rounds):
        for arm in ARMS:
            alone = arm == "one"
            measured = None
            if group.leader or not alone:
                members = Group(device=group.device) if alone else group
                measured = _measure(case, members, replicated=arm == "replicated")
                seconds[arm] += measured.steps
                parts[arm] += measured.orthonormalizing
                vectors[arm] = measured.vectors
            held[arm] = max(group.gathered(0 if measured is None else measured.held_bytes))
    reference = group.from_leader(vectors.get("one", {}))
    differences = {
        arm: max(group.gathered(_difference(vectors[arm], reference, case.bases))) for arm in ("owned", "replicated")
    }
    if group.leader:
        median = {arm: statistics.median(values) for arm, values in seconds.items()}
        part = {arm: statistics.median(values) for arm, values in parts.items()}
        result = {
            "settings": asdict(settings),
            "threads_per_process": 1,
            "parameters": sum(p.numel() for p in case.model.parameters()),
            "units": len(case.removed),
            "step_seconds": median,
            "speed_up": median["one"] / median["owned"],
            "largest_relative_difference": differences,
            "orthonormalization_seconds": part,
            "orthonormalization_speed_up": part["replicated"] / part["owned"],
            "held_bytes": held,
            "held_share": held["owned"] / held["replicated"],
        }
        (folder / FILE).write_text(json.dumps(result), encoding="utf-8")
    group.close()


def _difference(vectors: Mapping[str, Tensor], reference: Mapping[str, Tensor], bases: Mapping[str, Tensor]) -> float:
    """Returns the largest |V - V_1| over the norm of what training moved of V_1."""
    largest = 0.0
    for name, v in vectors.items():
        moved = reference[name] - bases[name][:, -v.shape[1] :].to(v)
        largest = max(largest, ((v - reference[name]).norm() / moved.norm()).item())
    return largest


def table(result: Mapping[str, Any]) -> list[str]:
    """Returns the lines of a table."""
    settings = result["settings"]
    size = f"{result['parameters'] / 1e6:.1f}M parameters, {result['units']} units"
    batch = f"{settings['sequences']} sequences of {settings['length']} tokens a step"
    lines = [
        f"{size}, {batch}; {settings['processes']} processes of 1 thread on {settings['device']}",
        f"{'arm':>10} {'s a step':>9} {'of it qf, Adam':>15} {'V, Adam, start':>15} {'V differs by':>13}",
    ]
    for arm in ARMS:
        differs = result["largest_relative_difference"].get(arm)
        lines.append(
            f"{arm:>10} {result['step_seconds'][arm]:9.3f} {result['orthonormalization_seconds'][arm]:15.3f} "
            f"{result['held_bytes'][arm] / 2**20:11.1f} MiB {'' if differs is None else f'{differs:.1e}':>13}"
        )
    lines.append(
        f"speed-up {result['speed_up']:.2f} x, of the orthonormalization over replicated "
        f"{result['orthonormalization_speed_up']:.2f} x at {result['held_share']:.2f} of its memory a process"
    )
    return lines


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lsp_core.distributed_benchmark", description=__doc__)
    for each in fields(DistributedSettings):
        parser.add_argument(_flag(each.name), type=type(each.default), default=each.default)
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of a table.")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = vars(parser.parse_args())
    as_json, worker = options.pop("json"), options.pop("worker")
    try:
        settings = DistributedSettings(**options)
    except ValueError as error:
        parser.error(str(error))
    if worker is not None:
        _work(settings, worker)
        return
    result = distributed(settings)
    print(json.dumps(result) if as_json else "\n".join(table(result)))


if __name__ == "__main__":
    main()
