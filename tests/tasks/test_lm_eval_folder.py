"""lm-eval's own ``hf`` model on the folder of a compressed checkpoint gives what it gives on the model in memory."""

import json
import os
import subprocess
import sys
from functools import partial
from inspect import getsource
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lsp_core.discovery import discover_units
from lsp_core.merging import merge_model
from lsp_core.modeling import save_compressed
from tasks.models import ModelSource, load_model

CHOICE = """
task: choosing
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: choices
metric_list: [{{metric: acc}}]
"""
CONTINUATION = """
task: continuing
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{max_gen_toks: 5, do_sample: false, until: ["\\n\\n\\n"]}}
metric_list: [{{metric: exact_match}}]
"""


def answers(model: HFLM, folder: Path) -> Any:
    """Returns the accuracy of one task, and what the model answered in both."""
    found = simple_evaluate(
        model=model,
        tasks=["choosing", "continuing"],
        num_fewshot=0,
        bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
    )
    samples = {name: [each["resps"] for each in rows] for name, rows in found["samples"].items()}
    return json.loads(json.dumps([found["results"]["choosing"]["acc,none"], samples]))


STRANGER = f"""
import json, sys
from pathlib import Path
from typing import Any
sys.modules["lsp_core"] = None
import datasets
datasets.config.HF_DATASETS_CACHE = sys.argv[3] + "/cache"
import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
torch.set_num_threads(1)

{getsource(answers)}

model = HFLM(pretrained=sys.argv[1], device="cpu", batch_size=4, trust_remote_code=True)
assert type(model.model).__module__.startswith("transformers_modules")
Path(sys.argv[3], "answers.json").write_text(json.dumps(answers(model, Path(sys.argv[2]))))
"""


@pytest.fixture
def questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a folder with two tasks over the same lines; ``datasets`` caches below ``tmp_path``."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    folder = tmp_path / "tasks"
    folder.mkdir()
    words = ["alpha", "beta", "gamma", "delta", "of", "and"]
    rows = [
        {
            "question": f"number {i} is",
            "choices": [words[(i + j) % 6] + "x" * (i % 3) for j in range(3)],
            "answer": i % 3,
        }
        for i in range(12)
    ]
    (folder / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("choosing", CHOICE), ("continuing", CONTINUATION)):
        (folder / f"{name}.yaml").write_text(text.format(data=folder / "lines.jsonl"))
    return folder


@pytest.fixture
def saved(source: ModelSource, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> tuple[PreTrainedModel, Path]:
    """Returns the tiny model, merged with half of every unit's directions removed, and the folder it is saved in."""
    model = load_model(source)
    units = discover_units(model)
    generator = torch.Generator().manual_seed(1)
    vectors = {
        unit.name: torch.randn(unit.dimension, unit.dimension // 2, generator=generator, dtype=torch.float64)
        for unit in units
    }
    merge_model(model, units, vectors)
    folder = tmp_path / "checkpoint"
    save_compressed(model, units, folder)
    tokenizer.save_pretrained(folder)
    return model, folder


def test_the_folder_answers_as_the_model_in_memory(
    saved: tuple[PreTrainedModel, Path], tokenizer: PreTrainedTokenizerBase, questions: Path
) -> None:
    model, folder = saved
    wrap = partial(HFLM, device="cpu", batch_size=4)
    expected = answers(wrap(pretrained=model, tokenizer=tokenizer), questions)
    assert 0 < expected[0] < 1
    assert len({row[0][0] for row in expected[1]["continuing"]}) > 1, "the continuations must differ"
    assert answers(wrap(pretrained=str(folder)), questions) == expected
    named = simple_evaluate(
        model="hf",
        model_args=f"pretrained={folder},device=cpu",
        tasks=["choosing"],
        batch_size=4,
        task_manager=TaskManager(include_path=str(questions), include_defaults=False),
        bootstrap_iters=0,
    )
    assert named["results"]["choosing"]["acc,none"] == expected[0]


@pytest.mark.slow
def test_a_process_without_the_package_gets_the_same_answers(
    saved: tuple[PreTrainedModel, Path], tokenizer: PreTrainedTokenizerBase, questions: Path, tmp_path: Path
) -> None:
    model, folder = saved
    expected = answers(HFLM(pretrained=model, tokenizer=tokenizer, device="cpu", batch_size=4), questions)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    subprocess.run(
        [sys.executable, "-c", STRANGER, folder, questions, tmp_path],
        check=True,
        env=environment,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
    )
    assert json.loads((tmp_path / "answers.json").read_text()) == expected
