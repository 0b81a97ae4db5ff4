"""What more workers would buy, on paper: the pipeline's long stages on 1 to 1,024 GPUs.

A simulation, not a measurement. The shares are those that the fan-out and the ownership of units really make; the time
of a worker is the FLOPs of its share at assumed rates, the loading of its weights, and what it sends. The slowest
counts.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from lsp_core.allocation import uniform_parameters
from lsp_core.discovery import discover_units
from lsp_core.flops import factor_form_flops
from lsp_core.named_shapes import config_of
from lsp_core.ownership import assign_owners, orthogonal_costs
from lsp_core.sensitivity import counts_to_measure, removal_counts
from lsp_core.shapes import Shapes, shapes_of
from lsp_core.units import Unit
from tasks.markdown import markdown_table
from tasks.shares import contiguous

WORKERS = tuple(2**power for power in range(11))
STAGES = ("gather", "measure", "train", "evaluate")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What is assumed, a second: rates of one GPU, near what an H100 reaches, and of what connects several."""

    gpus_per_node: int = 8
    flops: float = 4e14  # passes through the model in bfloat16
    gradient_flops: float = 3.5e14  # of those that are differentiated
    head_flops: float = 4e13  # products with the head, in float32
    flops64: float = 4.5e13  # products in float64
    orthogonal_flops: float = 1e13  # products and solves of an orthonormalization, in float64
    weight_bytes: float = 2e9  # loaded by one worker
    store_bytes: float = 5e10  # loaded by all workers together
    node_bytes: float = 2e11  # sent between the GPUs of a node
    network_bytes: float = 2.5e10  # sent by one GPU to another node
    latency: float = 2e-5  # seconds of one exchange, for each doubling of the processes
    start: float = 15.0  # seconds until a worker's process has its libraries
    submission: float = 0.1  # seconds of one part in the scheduler, one after the other

    def load(self, num_bytes: float, workers: int) -> float:
        """Returns the seconds until ``workers`` have started and hold ``num_bytes`` each."""
        return self.start + num_bytes / min(self.weight_bytes, self.store_bytes / workers)

    def exchange(self, num_bytes: float, messages: int, processes: int) -> float:
        """Returns the seconds of broadcasting, or reducing, ``num_bytes`` in so many messages, pipelined."""
        if processes == 1:
            return 0.0
        speed = self.node_bytes if processes <= self.gpus_per_node else self.network_bytes
        return num_bytes / speed + messages * self.latency * math.log2(processes)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is compressed; the defaults are the paper's."""

    model: str = "llama-2-7b"
    ratio: float = 0.5
    sequences: int = 1024
    length: int = 2048
    allocation_sequences: int = 64
    test_sequences: int = 166
    points: int = 16
    epochs: int = 10
    batch_sequences: int = 16
    validation_sequences: int = 64


class Simulation:
    """The stages of one ``job`` on one ``cluster``: seconds, by the number of workers."""

    def __init__(self, job: Job, cluster: Cluster) -> None:
        config = config_of(job.model)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self.job, self.cluster = job, cluster
        self.units: list[Unit] = discover_units(model)
        self.shapes: Shapes = shapes_of(model, on_host=False)
        self.removed = uniform_parameters(self.units, job.ratio).removed
        self.blocks = len(self.shapes.blocks)
        self.pass_seconds = [self._pass(0, stop) for stop in range(self.blocks + 1)]  # a token, through so many blocks
        self.head_seconds = self.shapes.logits() / cluster.head_flops

    def _pass(self, first: int, stop: int) -> float:
        flops = self.shapes.forward(self.job.length, first) - self.shapes.forward(self.job.length, stop)
        return flops / self.cluster.flops

    def gather(self, workers: int) -> float:
        """By blocks: a worker sums the Grams of its blocks, and runs the blocks before them."""
        tokens = self.job.sequences * self.job.length
        grams = [0.0] * self.blocks
        for unit in self.units:
            members = len(unit.members) if unit.side == "output" else 1
            grams[unit.block] += 2.0 * unit.dimension**2 * members / self.cluster.flops64
        sums = [0.0, *accumulate(grams)]

        def cost(start: int, stop: int) -> float:
            return tokens * (self.pass_seconds[stop] + sums[stop] - sums[start])

        return self._shared(workers, self.blocks, cost)

    def measure(self, workers: int) -> float:
        """By units: a worker runs the teacher, the prefix once, and for each candidate the suffix and the head."""
        job, tokens = self.job, self.job.allocation_sequences * self.job.length
        rows = []
        for unit in self.units:
            suffix = self.pass_seconds[-1] - self.pass_seconds[unit.block]
            candidates = len(counts_to_measure(unit, removal_counts(unit, job.points)))
            rows.append(candidates * (suffix + self.head_seconds))
        sums = [0.0, *accumulate(rows)]
        teacher = self.pass_seconds[-1] + 2 * self.head_seconds

        def cost(start: int, stop: int) -> float:
            prefix = self.pass_seconds[self.units[stop - 1].block]
            return tokens * (teacher + prefix + sums[stop] - sums[start])

        return self._shared(workers, len(self.units), cost)

    def evaluate(self, workers: int) -> float:
        """By windows of the test text."""
        each = self.job.length * (self.pass_seconds[-1] + self.head_seconds)
        return self._shared(workers, self.job.test_sequences, lambda start, stop: (stop - start) * each)

    def _shared(self, workers: int, count: int, cost: Callable[[int, int], float]) -> float:
        shares = contiguous(count, workers, cost)
        submitted = self.cluster.submission * (len(shares) if workers > 1 else 0)
        loaded = self.cluster.load(self.shapes.stored_bytes, len(shares))
        return submitted + loaded + max(cost(share.start, share.stop) for share in shares)

    def train(self, workers: int) -> float:
        """By sequences of the batch, the orthonormalization by units; processes beyond the batch do not start."""
        job, cluster, tokens = self.job, self.cluster, self.job.length
        processes = min(workers, job.batch_sequences)
        steps = job.epochs * math.ceil(job.sequences / job.batch_sequences)
        kept = {unit.name: float(unit.dimension - self.removed[unit.name]) for unit in self.units}
        gradient = factor_form_flops(self.shapes, self.units, kept, job.length) / cluster.gradient_flops
        passes = math.ceil(job.batch_sequences / processes) * tokens * (gradient + 2 * self.head_seconds)
        factors = sum(4.0 * kept[unit.name] * unit.parameters for unit in self.units) / cluster.gradient_flops
        exchanged = 2.0 * sum(unit.dimension * kept[unit.name] for unit in self.units)  # bfloat16
        sent = cluster.exchange(exchanged, len(self.units), processes)
        reduced = cluster.exchange(2 * exchanged, len(self.units), processes)  # float32
        validated = (
            math.ceil(job.validation_sequences / processes) * tokens * (self.pass_seconds[-1] + self.head_seconds)
        )
        step = passes + factors + self.orthogonal(processes) + sent + reduced
        return cluster.load(self.shapes.stored_bytes, processes) + steps * step + (job.epochs + 1) * validated

    def orthogonal(self, processes: int) -> float:
        """Returns the seconds a step that the most loaded owner orthonormalizes for."""
        costs = orthogonal_costs(self.units, self.removed)
        owners = assign_owners(costs, processes)
        loads = [0.0] * processes
        for name, owner in owners.items():
            loads[owner] += costs[name]
        return max(loads) / self.cluster.orthogonal_flops


def scaling(job: Job | None = None, cluster: Cluster | None = None) -> dict[str, Any]:
    """Returns the seconds of each stage by the number of workers, with the assumptions.

    Errors: ``ValueError`` for a model that is no shape.
    """
    job, cluster = job or Job(), cluster or Cluster()
    simulation = Simulation(job, cluster)
    rows = []
    for workers in WORKERS:
        seconds = {name: getattr(simulation, name)(workers) for name in STAGES}
        owned = simulation.orthogonal(min(workers, job.batch_sequences))
        rows.append({"workers": workers, **seconds, "total": sum(seconds.values()), "orthonormalization_a_step": owned})
    for row in rows:
        row["speedup"] = rows[0]["total"] / row["total"]
    return {"job": asdict(job), "cluster": asdict(cluster), "rows": rows}


def scaling_lines(content: dict[str, Any]) -> Iterator[str]:
    """Yields the lines of a scaling table for people."""
    header = ["workers", *(f"{name}, s" for name in STAGES), "all four, s", "speed-up", "efficiency"]
    body = [
        [
            f"{row['workers']:,}",
            *(f"{row[name]:,.0f}" for name in (*STAGES, "total")),
            f"{row['speedup']:.1f} x",
            f"{row['speedup'] / row['workers']:.0%}",
        ]
        for row in content["rows"]
    ]
    yield from markdown_table(header, body)


def print_scaling(content: dict[str, Any], *, as_json: bool) -> None:
    """Prints the table and what it assumes, or one JSON object."""
    if as_json:
        print(json.dumps(content))
        return
    print("\n".join(scaling_lines(content)))
    for name in ("job", "cluster"):
        print(f"{name}: " + ", ".join(f"{key} {_shown(value)}" for key, value in content[name].items()))


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
