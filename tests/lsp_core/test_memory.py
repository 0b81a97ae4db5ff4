"""The peaks of memory that the stages are said to have, against those of real processes.

Compared is the working memory beside the weights; where a stage does not keep its weights as they were, because its
processes split them or because it reads merged ones, all that it holds. Of decoding the peak is not measured.
"""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lsp_core import costs, training_costs
from lsp_core.discovery import discover_units
from lsp_core.shapes import shapes_of
from tests.lsp_core.memory_stages import (
    LENGTH,
    MICRO_BATCH,
    PROCESSES,
    SEQUENCES,
    STAGES,
    TOGETHER,
    TRAINING,
    VALIDATION,
    config_of,
    removed_of,
)

ROOT = Path(__file__).parents[2]
BATCHES = {"sequences": SEQUENCES, "length": LENGTH, "micro_batch": MICRO_BATCH}
FLOAT64 = {"precision_bytes": 8}
REPORT = "LSP_MEMORY_REPORT"
WHOLE = ("train sharded", "evaluate merged")


def stated(stage):
    """The peak of ``stage`` that a plan states, and the bytes of its weights."""
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config_of(stage))
    units, shapes = discover_units(skeleton), shapes_of(skeleton, dtype=torch.float32)
    removed = removed_of(units)
    gather = partial(costs.gather_cost, shapes, units, **BATCHES, **FLOAT64)
    bases = partial(costs.bases_cost, shapes, units, **FLOAT64)
    measure = partial(costs.measure_cost, shapes, units, points=2, **BATCHES, **FLOAT64)
    evaluate = partial(costs.evaluate_cost, shapes, units, **BATCHES)
    joint = partial(costs.joint_cost, shapes, units, removed, measurements=2, **BATCHES, **FLOAT64)
    teacher = partial(training_costs.teacher_cost, shapes, **BATCHES)
    train = partial(
        training_costs.train_cost,
        shapes,
        units,
        removed,
        **BATCHES,
        **FLOAT64,
        epochs=TRAINING.epochs,
        batch_sequences=TRAINING.batch_sequences,
        validation_sequences=VALIDATION,
        modulation_epochs=TRAINING.modulation_epochs,
        dropout=TRAINING.dropout,
    )
    figures = {
        "gather": gather,
        "gather offloaded": partial(gather, offload=True),
        "bases": bases,
        "bases plain": partial(bases, init="plain"),
        "measure": measure,
        "measure offloaded": partial(measure, offload=True),
        "fisher": partial(costs.fisher_cost, shapes, units, points=2, sequences=SEQUENCES, length=LENGTH, **FLOAT64),
        "joint": joint,
        "joint offloaded": partial(joint, offload=True),
        "teacher": teacher,
        "teacher offloaded": partial(teacher, offload=True),
        "train": train,
        "train replicated": partial(train, processes=PROCESSES),
        "train sharded": partial(train, processes=PROCESSES, sharded=True),
        "merge": partial(costs.merge_cost, shapes, units, removed, **FLOAT64),
        "evaluate": evaluate,
        "evaluate offloaded": partial(evaluate, offload=True),
        "evaluate untrained": partial(evaluate, removed=removed, kl_sequences=SEQUENCES),
        "evaluate merged": partial(evaluate, removed=removed, checkpoint=True),
    }
    return figures[stage]().peak_bytes, shapes.weight_bytes


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Runs a stage in new processes; returns what each held and needed.

    The C library hands tensors of 64 KiB and more back as soon as they die there; otherwise holes in its heap count as
    much as the tensors at this size.
    """
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": str(1 << 16),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
    }
    command = [sys.executable, "-m", "tests.lsp_core.memory_stages", str(tmp_path_factory.mktemp("stages"))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as process:

        def run(stage):
            process.stdin.write(f"{stage}\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield run
        process.stdin.close()


@pytest.fixture(scope="module")
def figures():
    """Collects what was found, and writes it to the file that LSP_MEMORY_REPORT names."""
    found = {}
    yield found
    if os.environ.get(REPORT):
        Path(os.environ[REPORT]).write_text(json.dumps(found, indent=2) + "\n")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak of resident memory")
@pytest.mark.parametrize("stage", STAGES)
def test_the_peak_is_what_a_process_needs(stage, measured, figures):
    """Within 15 %; of several processes the one that needs most."""
    peak, weights = stated(stage)
    found = measured(stage)
    assert len(found) == (PROCESSES if stage in TOGETHER else 1)
    expected = peak if stage in WHOLE else peak - weights
    needed = max(one["peak"] - (0 if stage in WHOLE else one["held"]) for one in found)
    figures[stage] = {"stated_bytes": expected, "measured_bytes": needed, "ratio": expected / needed}
    assert expected == pytest.approx(needed, rel=0.15)
