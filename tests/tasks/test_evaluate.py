import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lsp_core.discovery import discover_units
from lsp_core.gram import NonFiniteError
from lsp_core.losses import sum_losses
from lsp_core.merging import merge_model
from lsp_core.modeling import load_compressed, save_compressed
from storage.grid import save_tokens
from storage.manifest import ArtifactRef
from tasks.artifacts import read_json
from tasks.caching import Runtime, Work
from tasks.evaluate import EVALUATION, continue_prompt, evaluate
from tasks.models import ModelSource, load_model
from tasks.sums import keep_sums, mean_of
from tasks.zero_shot import TASKS, find_task_folder, run_tasks

WINDOWS, LENGTH = 7, 13
TASK = """
task: odd_one
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: choices
metric_list:
  - metric: acc
"""


def random_windows(below: int = 256) -> Tensor:
    return torch.randint(0, below, (WINDOWS, LENGTH), generator=torch.Generator().manual_seed(3))


def measured_perplexity(work: Work, model: PreTrainedModel, windows: Tensor, micro_batch: int) -> float:
    """Returns the perplexity by what the stage calls."""
    work = replace(work, runtime=Runtime(micro_batch=micro_batch))

    def compute(batches: list[range], take: Callable[[float, int], None]) -> None:
        for batch in batches:
            take(*sum_losses(model, windows, batch))

    return math.exp(mean_of(keep_sums(work, "losses", range(len(windows)), compute, lambda *_: None)))


def plain_perplexity(model: PreTrainedModel, windows: Tensor) -> float:
    """Returns the perplexity by a loop over single tokens in float64; leaves ``model`` in float64."""
    model.double()
    losses = []
    with torch.no_grad():
        for window in windows:
            logits = model(input_ids=window[None]).logits[0]
            for position in range(len(window) - 1):
                row = logits[position].numpy()
                largest = row.max()
                normalizer = largest + math.log(np.exp(row - largest).sum())
                losses.append(normalizer - row[window[position + 1]])
    return math.exp(math.fsum(losses) / len(losses))


@pytest.mark.parametrize("micro_batch", [1, 3, 50])
def test_perplexity_is_that_of_a_plain_loop(source: ModelSource, work: Work, micro_batch: int) -> None:
    model, windows = load_model(source), random_windows()
    measured = measured_perplexity(work, model, windows, micro_batch)
    with torch.no_grad():
        largest = model(windows).logits.abs().max().item()
    # every logit carries some tens of float32 roundings, relative to the largest; exp hands them on as they are
    tolerance = 64 * torch.finfo(torch.float32).eps * largest
    assert measured == pytest.approx(plain_perplexity(model, windows), rel=tolerance)


def test_bfloat16_logits_are_summed_in_a_wider_type(source: ModelSource, work: Work) -> None:
    model = load_model(source.model_copy(update={"dtype": "bfloat16"}))
    windows = random_windows()
    with torch.no_grad():
        logits = torch.cat([model(window[None], use_cache=False).logits for window in windows])[:, :-1].double()
    losses = -logits.log_softmax(-1).gather(-1, windows[:, 1:, None])
    assert measured_perplexity(work, model, windows, 1) == pytest.approx(losses.mean().exp().item(), rel=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_name_the_window(source: ModelSource, work: Work, value: float) -> None:
    model, windows = load_model(source), random_windows(below=200)
    model.get_input_embeddings().weight[211] = value
    windows[4, 6] = 211
    with pytest.raises(NonFiniteError, match="the logits of test window 4 hold a NaN or an infinity"):
        measured_perplexity(work, model, windows, 3)


def test_an_infinite_logit_that_no_loss_shows_is_an_error_too(source: ModelSource, work: Work) -> None:
    model, windows = load_model(source), random_windows(below=200)

    def cut(_module: object, _arguments: object, logits: Tensor) -> Tensor:
        logits[..., 230] = -math.inf  # a token that no window holds: the loss stays finite
        return logits

    model.get_output_embeddings().register_forward_hook(cut)
    with pytest.raises(NonFiniteError, match="test window 0"):
        measured_perplexity(work, model, windows, 3)


@pytest.fixture(scope="module")
def merged(source: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the tiny model with half of every unit's directions removed at random."""
    model = load_model(source)
    units = discover_units(model)
    generator = torch.Generator().manual_seed(1)
    vectors = {
        unit.name: torch.linalg.qr(
            torch.randn(unit.dimension, unit.dimension, generator=generator, dtype=torch.float64)
        ).Q[:, : unit.dimension // 2]
        for unit in units
    }
    merge_model(model, units, vectors)
    folder = tmp_path_factory.mktemp("merged")
    save_compressed(model, units, folder)
    return folder


def question(index: int) -> dict[str, Any]:
    words = ["alpha", "beta", "gamma", "delta", "of", "and"]
    choices = [words[(index + step) % 6] + "x" * (index % 3) for step in range(2 + index % 2)]
    return {"question": f"number {index} is", "choices": choices, "answer": index % len(choices)}


@pytest.fixture
def task_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[dict[str, Any]]], Path]:
    """Returns a maker of lm-eval task folders over given questions; ``datasets`` caches below ``tmp_path``."""
    only_local = partial(lm_eval.tasks.TaskManager, include_defaults=False)  # to index lm-eval's own takes seconds
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", only_local)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)

    def make(questions: list[dict[str, Any]]) -> Path:
        folder = tmp_path / "tasks"
        folder.mkdir(exist_ok=True)
        data = folder / "questions.jsonl"
        data.write_text("".join(json.dumps(record) + "\n" for record in questions))
        (folder / "odd_one.yaml").write_text(TASK.format(data=data))
        return folder

    return make


def plain_accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: list[dict[str, Any]]
) -> float:
    """Returns how often the right choice has the highest log-probability after the question."""
    right = 0
    for record in questions:
        start = len(tokenizer(record["question"])["input_ids"])
        scores = []
        for choice in record["choices"]:
            ids = torch.tensor([tokenizer(f"{record['question']} {choice}")["input_ids"]])
            with torch.no_grad():
                logs = model(ids).logits[0, :-1].double().log_softmax(-1)
            scores.append(logs[torch.arange(start - 1, ids.shape[1] - 1), ids[0, start:]].sum().item())
        right += int(np.argmax(scores)) == record["answer"]
    return right / len(questions)


def test_the_stage_measures_a_merged_checkpoint_on_a_local_task(
    work: Work,
    published: Callable[..., ArtifactRef],
    source: ModelSource,
    tokenizer: PreTrainedTokenizerBase,
    merged: Path,
    task_folder: Callable[[list[dict[str, Any]]], Path],
) -> None:
    questions = [question(index) for index in range(11)]
    windows = random_windows()
    tokens = published("calibrate", lambda folder: save_tokens(folder, windows.numpy(), {}))

    def copy(folder: Path) -> None:
        for file in merged.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())

    checkpoint = published("merge", copy)
    evaluate.function(
        work,
        model=source,
        tokens=tokens,
        checkpoint=checkpoint,
        prompt="alpha",
        prompt_tokens=5,
        tasks=["odd_one"],
        task_folder=find_task_folder(task_folder(questions)),
    )
    result = read_json(work.output / EVALUATION)
    model = load_compressed(merged)
    assert result["tasks"] == {"odd_one": {"acc": pytest.approx(plain_accuracy(model, tokenizer, questions))}}
    assert result["continuation"] == continue_prompt(model, tokenizer, "alpha", 5)
    assert result["parameters"] == sum(p.numel() for p in model.parameters())
    assert result["parameters"] < sum(p.numel() for p in load_model(source).parameters())
    assert (result["tokens"], result["windows"]) == (WINDOWS * LENGTH, WINDOWS)
    assert result["perplexity"] == pytest.approx(plain_perplexity(model, windows), rel=1e-4)


def test_a_task_that_a_part_or_an_earlier_attempt_finished_is_not_run_again(
    work: Work,
    published: Callable[..., ArtifactRef],
    source: ModelSource,
    tokenizer: PreTrainedTokenizerBase,
    task_folder: Callable[[list[dict[str, Any]]], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    questions = [question(index) for index in range(7)]
    tokens = published("calibrate", lambda folder: save_tokens(folder, random_windows().numpy(), {}))
    arguments: dict[str, Any] = {"model": source, "tokens": tokens, "tasks": ["odd_one"], "task_limit": 5}
    arguments["task_folder"] = find_task_folder(task_folder(questions))
    assert evaluate.parts is not None
    shares = evaluate.parts.plan(work, 2, **arguments)
    assert shares == [[["loss", 0, WINDOWS]], [["task", "odd_one"]]]  # too few windows for two
    for share in shares:
        evaluate.parts.run(work, share, **arguments)
    asked: list[str] = []
    simple_evaluate = lm_eval.simple_evaluate

    def counted(**given: Any) -> Any:
        asked.extend(given["tasks"])
        return simple_evaluate(**given)

    assert evaluate.parts.plan(work, 2, **arguments) == []
    monkeypatch.setattr(lm_eval, "simple_evaluate", counted)
    evaluate.function(work, **arguments)
    assert asked == []
    expected = plain_accuracy(load_model(source), tokenizer, questions[:5])
    assert read_json(work.output / EVALUATION)["tasks"] == {"odd_one": {"acc": pytest.approx(expected)}}
    (kept,) = (work.scratch / TASKS / "odd_one").iterdir()
    kept.write_bytes(kept.read_bytes()[:-3])
    evaluate.function(work, **arguments)
    assert asked == ["odd_one"]
    assert "the task odd_one may be run again" in caplog.text


def test_results_and_digest_follow_the_data_of_the_task(
    work: Work,
    source: ModelSource,
    tokenizer: PreTrainedTokenizerBase,
    merged: Path,
    task_folder: Callable[[list[dict[str, Any]]], Path],
) -> None:
    model = load_compressed(merged)
    questions = [question(2 * index) for index in range(9)]  # two choices each
    turned = [record | {"answer": 1 - record["answer"]} for record in questions]
    measured, digests = [], set()
    for asked in (questions, turned):
        folder = find_task_folder(task_folder(asked))
        assert folder is not None
        digests.add(folder.digest)
        measured.append(run_tasks(work, model, source, ["odd_one"], folder, None)["odd_one"]["acc"])
    assert measured[0] == pytest.approx(plain_accuracy(model, tokenizer, questions))
    assert sum(measured) == pytest.approx(1.0)
    assert len(digests) == 2
    folder = find_task_folder(task_folder(questions))
    limited = run_tasks(work, model, source, ["odd_one"], folder, 4)
    assert limited["odd_one"]["acc"] == pytest.approx(plain_accuracy(model, tokenizer, questions[:4]))


def test_an_unknown_task_or_folder_is_a_clear_error(work: Work, source: ModelSource, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"evaluation\.tasks: lm-eval knows no nonesuch, neither: list its tasks"):
        run_tasks(work, load_model(source), source, ["piqa", "nonesuch", "neither"], None, None)
    with pytest.raises(ValueError, match=r"evaluation\.task_folder='.*none': there is no such folder"):
        find_task_folder(tmp_path / "none")
    assert find_task_folder(None) is None


def test_a_prompt_is_continued_by_the_most_likely_tokens(
    source: ModelSource, tokenizer: PreTrainedTokenizerBase
) -> None:
    model = load_model(source)
    ids = tokenizer("some text", return_tensors="pt")["input_ids"]
    generated = model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False, eos_token_id=None)
    expected = tokenizer.decode(generated[0, ids.shape[1] :])
    assert continue_prompt(model, tokenizer, "some text", 6) == expected
