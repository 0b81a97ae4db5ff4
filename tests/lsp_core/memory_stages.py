"""Real stages, each in a process of its own that tells how much memory it needed.

``python -m tests.lsp_core.memory_stages FOLDER`` imports what is needed, once. For every line of standard input, a
stage's name, it forks, and the new process, or each of those that train together, runs that stage on a tiny model, so
that libraries are loaded, and then on the one that counts. What stages read of others lies in FOLDER, as in the store.
Printed is a JSON list of one ``{"held": , "peak": }`` a process: bytes of resident memory above what there was before
the weights, with the weights alone and at the peak.
"""

import ctypes
import gc
import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import FileStore
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from lsp_core.basis import Init, ordered_basis
from lsp_core.block_grams import gather_by_blocks
from lsp_core.discovery import discover_units
from lsp_core.distributed import Group
from lsp_core.divergence import TeacherStatistic
from lsp_core.durable import write_durably
from lsp_core.fisher import Fisher
from lsp_core.gram import gather_grams
from lsp_core.losses import sum_losses
from lsp_core.merging import merge_model, outputs_of, projected_outputs, removed_directions
from lsp_core.modeling import load_compressed, save_compressed
from lsp_core.offload import offloaded
from lsp_core.sensitivity import Sensitivity
from lsp_core.teacher import cache_teacher
from lsp_core.training import Sharding, train_projectors
from lsp_core.training_settings import TrainingSettings
from lsp_core.units import Unit, weight_of


def shape(hidden: int, intermediate: int, blocks: int, vocabulary: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=blocks,
        num_attention_heads=8,
        vocab_size=vocabulary,
    )


USUAL, WIDE, DEEP = shape(512, 1408, 2, 8192), shape(1024, 1536, 1, 1024), shape(512, 1408, 4, 512)
TINY = shape(64, 96, 2, 101)
SEQUENCES, LENGTH, MICRO_BATCH, VALIDATION, PROBE = 8, 256, 4, 2, 16
PROCESSES = 2
TRAINING = TrainingSettings(
    learning_rate=1e-4, epochs=2, batch_sequences=SEQUENCES, micro_batch=MICRO_BATCH, modulation_epochs=1.0
)
CPU = torch.device("cpu")


def config_of(stage: str) -> LlamaConfig:
    """Returns the shape that ``stage`` is measured on: wide where it decomposes matrices, deep where it is split."""
    if stage == "train sharded":
        return DEEP
    return WIDE if stage.split()[0] in ("bases", "merge") else USUAL


def removed_of(units: list[Unit]) -> dict[str, int]:
    """Returns how many directions each unit loses."""
    return {unit.name: unit.dimension // 2 for unit in units}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a stage works on; ``folder`` holds what it reads of other stages, and takes what it writes."""

    model: PreTrainedModel
    units: list[Unit]
    tokens: Tensor
    folder: Path
    group: Group

    def read(self, name: str) -> dict[str, Tensor]:
        return load_file(self.folder / f"{name}.safetensors")

    @property
    def removed(self) -> dict[str, int]:
        return removed_of(self.units)


def gather(case: Case) -> None:
    gather_grams(case.model, case.units, case.tokens, micro_batch=MICRO_BATCH)


def gather_offloaded(case: Case) -> None:
    gather_by_blocks(case.model, case.units, case.tokens, micro_batch=MICRO_BATCH, home=CPU)


def bases(case: Case, init: Init) -> None:
    """Grams are read one by one, and each basis is written to a file of its own."""
    for number, unit in enumerate(case.units):
        write_basis(case, unit, case.folder / f"basis-{number}.safetensors", init)


def write_basis(case: Case, unit: Unit, file: Path, init: Init) -> None:
    gram = case.read("grams")[unit.name]
    weights = [weight_of(case.model.get_submodule(name)).detach() for name in unit.members]
    basis = ordered_basis(unit, gram, weights, init=init)
    write_durably(file, {unit.name: basis.q}, {"ridge": basis.ridge})


def measure(case: Case, home: torch.device | None = None) -> None:
    sensitivity = Sensitivity(
        case.model, case.units, case.read("bases"), case.tokens, micro_batch=MICRO_BATCH, home=home
    )
    for unit in case.units:
        sensitivity.measure(unit.name, unit.dimension // 2)


def fisher(case: Case) -> None:
    found = Fisher(case.model, case.units, case.read("bases"), case.tokens)
    for unit in case.units:
        found.measure(unit.name, unit.dimension // 2)


def joint(case: Case, home: torch.device | None = None) -> None:
    """As the largest ratio within a bound is looked for: the teacher once, truncations one after the other."""
    sensitivity = Sensitivity(
        case.model, case.units, case.read("bases"), case.tokens, micro_batch=MICRO_BATCH, home=home
    )
    for _ in range(2):
        sensitivity.joint(case.removed)


def teacher(case: Case) -> None:
    cache_teacher(case.model, case.tokens, micro_batch=MICRO_BATCH)


def train(case: Case, sharding: Sharding = "replicated") -> None:
    """With the dense outputs and checkpoints, as a stage does."""
    train_projectors(
        case.model,
        case.units,
        case.read("bases"),
        case.removed,
        case.tokens,
        case.tokens[:VALIDATION],
        TRAINING,
        teacher=TeacherStatistic(**case.read("teacher")),
        work=case.folder / "checkpoint",
        group=case.group,
        sharding=sharding,
    )


def merge(case: Case) -> None:
    vectors, examples = case.read("vectors"), case.tokens[:1, :PROBE]
    projected_outputs(case.model, case.units, vectors, examples)
    merge_model(case.model, case.units, vectors)
    outputs_of(case.model, examples)
    save_compressed(case.model, case.units, case.folder / "checkpoint")


def evaluate(case: Case) -> None:
    """Perplexity."""
    sequences = len(case.tokens)
    for start in range(0, sequences, MICRO_BATCH):
        sum_losses(case.model, case.tokens, range(start, min(start + MICRO_BATCH, sequences)))


def evaluate_untrained(case: Case) -> None:
    """Joint divergence, merge and perplexity."""
    sensitivity = Sensitivity(case.model, case.units, case.read("bases"), case.tokens, micro_batch=MICRO_BATCH)
    sensitivity.joint(case.removed)
    del sensitivity
    vectors = {name: removed_directions(q, case.removed[name]) for name, q in case.read("bases").items()}
    merge_model(case.model, case.units, vectors)
    del vectors
    evaluate(case)


STAGES: dict[str, Callable[[Case], None]] = {
    "gather": gather,
    "gather offloaded": gather_offloaded,
    "bases": partial(bases, init="whitened"),
    "bases plain": partial(bases, init="plain"),
    "measure": measure,
    "measure offloaded": partial(measure, home=CPU),
    "fisher": fisher,
    "joint": joint,
    "joint offloaded": partial(joint, home=CPU),
    "teacher": teacher,
    "teacher offloaded": teacher,
    "train": train,
    "train replicated": train,
    "train sharded": partial(train, sharding="sharded"),
    "merge": merge,
    "evaluate": evaluate,
    "evaluate offloaded": evaluate,
    "evaluate untrained": evaluate_untrained,
    "evaluate merged": evaluate,
}
TOGETHER = ("train replicated", "train sharded")


def write_inputs(stage: str, config: LlamaConfig, folder: Path, tokens: Tensor) -> None:
    """Writes what ``stage`` reads of others."""
    with torch.device("meta"):
        units = discover_units(AutoModelForCausalLM.from_config(config))
    removed = removed_of(units)
    squares = {}
    for dimension in {unit.dimension for unit in units}:
        rows = torch.randn(2 * dimension, dimension, dtype=torch.float64)
        squares[dimension] = rows.T @ rows, torch.linalg.qr(rows[:dimension]).Q.contiguous()
    of_unit = {unit.name: squares[unit.dimension] for unit in units}
    folder.mkdir(parents=True)
    tensors = {
        "grams": {name: gram.clone() for name, (gram, _) in of_unit.items()},
        "bases": {name: q.clone() for name, (_, q) in of_unit.items()},
        "vectors": {name: removed_directions(q, removed[name]).float() for name, (_, q) in of_unit.items()},
        "teacher": {"m": torch.randn(*tokens.shape, config.hidden_size)}
        | {name: torch.randn(tokens.shape) for name in ("c", "entropy")},
    }
    for name, found in tensors.items():
        save_file({key: tensor.contiguous() for key, tensor in found.items()}, folder / f"{name}.safetensors")
    if stage == "evaluate merged":
        model = AutoModelForCausalLM.from_config(config)
        merge_model(model, units, tensors["vectors"])
        save_compressed(model, units, folder / "merged")


def run(stage: str, config: LlamaConfig, folder: Path, tokens: Tensor, group: Group) -> dict[str, int]:
    """Runs a stage; returns the memory held with the weights alone and at the peak, above that before the weights."""
    before = settle()
    if stage == "evaluate merged":
        model = load_compressed(folder / "merged").model
    else:
        model = AutoModelForCausalLM.from_config(config).eval()
    model.requires_grad_(False)
    case = Case(model=model, units=discover_units(model), tokens=tokens, folder=folder, group=group)
    del model
    with offloaded(case.model, "cpu") if "offloaded" in stage else nullcontext():
        held = settle()
        STAGES[stage](case)
        return {"held": held - before, "peak": resident("VmHWM") - before}


def make_product(rows: int, inner: int, columns: int) -> None:
    """Makes the largest product of all: the library keeps the buffers that it packs operands in."""
    F.linear(torch.ones(rows, inner), torch.ones(columns, inner))


def settle() -> int:
    """Returns the resident memory, in bytes, once what is free is given back, and starts its peak anew."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def in_this_process(stage: str, folder: Path, rank: int, size: int) -> dict[str, int]:
    """Runs ``stage`` as process ``rank`` of ``size``."""
    group = Group()
    if size > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "MASTER_ADDR": "localhost"}
        group = Group.from_environment("cpu", store=FileStore(str(folder / "store"), size))
    found = {}
    for name, config, shape in (("tiny", TINY, (2 * size, PROBE)), ("whole", config_of(stage), (SEQUENCES, LENGTH))):
        torch.manual_seed(0)
        tokens = torch.randint(config.vocab_size, shape)
        if group.leader:
            write_inputs(stage, config, folder / name, tokens)
        group.sums([0.0])  # all wait for the files
        make_product(MICRO_BATCH * LENGTH, USUAL.hidden_size, USUAL.vocab_size)
        found = run(stage, config, folder / name, tokens, group)
    group.close()
    return found


def in_new_processes(stage: str, folder: Path) -> list[dict[str, int]]:
    """Runs ``stage`` in processes forked off this one. Errors: ``RuntimeError`` if one of them fails."""
    size = PROCESSES if stage in TOGETHER else 1
    folder.mkdir()
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            try:
                found = in_this_process(stage, folder, rank, size)
                (folder / f"{rank}.json").write_text(json.dumps(found))
                os._exit(0)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
        children.append(child)
    failed = [child for child in children if os.waitpid(child, 0)[1]]
    if failed:
        raise RuntimeError(f"{stage}: a process failed")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        stage = line.strip()
        print(json.dumps(in_new_processes(stage, folder / stage.replace(" ", "-"))), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
