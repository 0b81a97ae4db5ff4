"""How fast this machine's device is at what the stages do: measured once, remembered, and used to expect times.

A decoder block near the model's width, attention and elementwise work included, stands for the passes through the
model, forward alone and with its gradients; products and softmaxes of a head, products and decompositions in the
Grams' precision, and sha256 are measured beside it. That takes about a second; the result lies in ``rates.json`` of the
cache folder. Measured on idle memory and warm caches, the rates are nearer a stage's best than its mean.
"""

import hashlib
import json
import logging
import math
import platform
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from lsp_core.costs import EIGH
from lsp_core.divergence import VOCABULARY_CHUNK
from lsp_core.shapes import Cost
from storage.places import cache_folder

log = logging.getLogger(__name__)

FILE = "rates.json"
TOKENS = 1024  # of the measured batch, fewer where a CPU's block is wide, more on an accelerator
NARROWEST, WIDEST, WIDEST_ON_CPU = 128, 4096, 1024  # width of the measured block
SECONDS_EACH = 0.1  # of each of the measurements
TEXT_BYTES_PER_SECOND = 2e6  # tokenizing, one thread; the same everywhere to a factor of two
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a device does in a second.

    ``device``: its name, and the threads on a CPU; ``width``: of the measured block; ``flops_per_second``: of passes
    through a model in the dtype that was asked for; ``gradient_flops_per_second``: of passes forward and back;
    ``head_flops_per_second``: plain products in float32 or wider; ``flops64_per_second`` and
    ``solver_flops_per_second``: products and decompositions in the Grams' precision; ``logits_per_second``: numbers
    through a softmax; ``bytes_per_second``: digesting; ``measured``: the date.
    """

    device: str
    width: int
    flops_per_second: float
    gradient_flops_per_second: float
    head_flops_per_second: float
    flops64_per_second: float
    solver_flops_per_second: float
    logits_per_second: float
    bytes_per_second: float
    measured: str


def device_rates(
    device: str, dtype: torch.dtype, *, width: int = 512, folder: Path | None = None, remeasure: bool = False
) -> Rates:
    """Returns the rates of ``device`` in ``dtype`` near a model's hidden ``width``, measured if they are not on record.

    ``folder``: where the record is, none: the cache folder; ``remeasure``: the record is not read. A record that cannot
    be read is made again.
    """
    path = (folder or cache_folder()) / FILE
    bucket = _bucket(width, device)
    key = f"{device_name(device)}, {str(dtype).removeprefix('torch.')}, width {bucket}"
    records = {} if remeasure else _read(path)
    try:
        return _checked(records[key])
    except KeyError:
        pass
    except (TypeError, ValueError) as error:
        log.warning("%s: the rates of %s are damaged (%s): they are measured again", path, key, error)
    rates = measure_rates(device, dtype, bucket)
    log.info("%s: %.3g GFLOP/s in passes through a model", key, rates.flops_per_second / 1e9)
    _write(path, _read(path) | {key: asdict(rates)})
    return rates


def seconds(cost: Cost, rates: Rates) -> float:
    """Returns the time that ``cost`` takes at ``rates``: the sum of its parts, as nothing overlaps."""
    return (
        (cost.flops - cost.gradient_flops) / rates.flops_per_second
        + cost.gradient_flops / rates.gradient_flops_per_second
        + cost.head_flops / rates.head_flops_per_second
        + cost.flops64 / rates.flops64_per_second
        + cost.solver_flops / rates.solver_flops_per_second
        + cost.logits / rates.logits_per_second
        + (cost.read_bytes + cost.written_bytes) / rates.bytes_per_second
        + cost.text_bytes / TEXT_BYTES_PER_SECOND
        + cost.more_seconds
    )


def device_memory(device: str) -> int:
    """Returns the bytes of memory that a process can have on ``device``; on a CPU never more than its cgroup allows."""
    kind = torch.device(device).type
    if kind == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if kind == "mps":
        return int(torch.mps.recommended_max_memory())
    limits = [path.read_text().strip() for path in CGROUP_LIMITS if path.is_file()]
    return min([int(psutil.virtual_memory().total), *(int(limit) for limit in limits if limit.isdecimal())])


def device_name(device: str) -> str:
    """Returns the name of the processor or the accelerator; a CPU's with the number of threads that torch uses."""
    kind = torch.device(device).type
    if kind == "cuda":
        return str(torch.cuda.get_device_name(device))
    if kind != "cpu":
        return f"{kind} of {platform.machine()}"
    return f"{_cpu_name()}, {torch.get_num_threads()} threads"


def measure_rates(device: str, dtype: torch.dtype, width: int) -> Rates:
    """Measures the rates; takes about a second. ``width``: a power of two."""
    on_cpu = torch.device(device).type == "cpu"
    tokens = min(TOKENS, TOKENS * 256 // width) if on_cpu else 4 * TOKENS
    wide = torch.promote_types(dtype, torch.float32)
    precise = torch.float32 if torch.device(device).type == "mps" else torch.float64
    block = _Block(tokens, width, device, dtype)
    rows = torch.randn(tokens, width, device=device)
    head = torch.randn(4 * width, width, device=device, dtype=wide)
    logits = torch.randn(tokens, VOCABULARY_CHUNK, device=device, dtype=wide)
    exact = rows.to(precise)
    gram = torch.zeros(width, width, device=device, dtype=precise)
    small = exact[:, : min(width, 256)]
    matrix = small.T @ small
    data = bytes(1 << 24)
    hidden = rows.to(wide)
    gradient = block.gradient_flops / _time(block.backward, device)
    with torch.inference_mode():
        return Rates(
            device=device_name(device),
            width=width,
            flops_per_second=block.flops / _time(block.forward, device),
            gradient_flops_per_second=gradient,
            head_flops_per_second=2 * hidden.numel() * len(head) / _time(lambda: F.linear(hidden, head), device),
            flops64_per_second=2 * exact.numel() * width / _time(lambda: gram.addmm_(exact.T, exact), device),
            solver_flops_per_second=EIGH * len(matrix) ** 3 / _time(lambda: torch.linalg.eigh(matrix), device),
            logits_per_second=logits.numel() / _time(lambda: torch.logsumexp(logits, -1), device),
            bytes_per_second=len(data) / _time(lambda: hashlib.sha256(data), "cpu"),
            measured=datetime.now(UTC).date().isoformat(),
        )


class _Block:
    """A decoder block of random weights, and the FLOPs of a pass of ``tokens`` tokens through it and back."""

    def __init__(self, tokens: int, width: int, device: str, dtype: torch.dtype) -> None:
        inner = width * 11 // 4
        shapes = [*[(width, width)] * 4, (inner, width), (inner, width), (width, inner)]
        self.length, self.heads = min(tokens, 256), max(1, width // 64)
        self.x = torch.randn(tokens, width, device=device, dtype=dtype).requires_grad_()
        self.gain = torch.ones(width, device=device, dtype=dtype)
        self.weights = [
            (torch.randn(shape, device=device) / math.sqrt(shape[1])).to(dtype).requires_grad_() for shape in shapes
        ]
        products, attention = tokens * 2.0 * sum(a * b for a, b in shapes), 4.0 * tokens * self.length * width
        self.flops = products + attention
        self.gradient_flops = 3 * products + 3.5 * attention

    def forward(self) -> Tensor:  # -> (T, D)
        q, k, v, o, gate, up, down = self.weights
        normed = F.rms_norm(self.x, self.gain.shape, self.gain)
        parts = [self._split(F.linear(normed, weight)) for weight in (q, k, v)]
        attended = F.scaled_dot_product_attention(*parts, is_causal=True)
        hidden = self.x + F.linear(attended.transpose(1, 2).reshape(self.x.shape), o)
        normed = F.rms_norm(hidden, self.gain.shape, self.gain)
        return hidden + F.linear(F.silu(F.linear(normed, gate)) * F.linear(normed, up), down)

    def backward(self) -> None:
        torch.autograd.grad(self.forward().sum(), [self.x, *self.weights])

    def _split(self, y: Tensor) -> Tensor:  # (T, D) -> (B, heads, length, D / heads)
        return y.view(-1, self.length, self.heads, y.shape[-1] // self.heads).transpose(1, 2)


def _time(run: Callable[[], object], device: str) -> float:
    """Returns the median of the seconds that ``run`` takes, over ``SECONDS_EACH`` and twice at least."""
    kind = torch.device(device).type

    def once() -> float:
        started = time.perf_counter()
        run()
        if kind != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - started

    once()
    taken: list[float] = []
    while len(taken) < 2 or sum(taken) < SECONDS_EACH:
        taken.append(once())
    return median(taken)


def _bucket(width: int, device: str) -> int:
    widest = WIDEST_ON_CPU if torch.device(device).type == "cpu" else WIDEST
    nearest: int = 2 ** round(math.log2(width))
    return min(max(nearest, NARROWEST), widest)


def _checked(record: Any) -> Rates:
    rates = Rates(**record)
    for field in fields(Rates):
        value = getattr(rates, field.name)
        fits = isinstance(value, str) if field.type is str else isinstance(value, (int, float)) and 0 < value < math.inf
        if not fits:
            raise ValueError(f"{field.name} is {value!r}")
    return rates


def _read(path: Path) -> dict[str, Any]:
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(records, dict):
            raise ValueError(f"a {type(records).__name__} where records are expected")
    except FileNotFoundError:
        return {}
    except ValueError as error:
        log.warning("%s is damaged (%s): the rates are measured again", path, error)
        return {}
    return records


def _write(path: Path, records: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        temporary.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        log.warning("%s cannot be written (%s): the rates are measured again next time", path, error.strerror)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
