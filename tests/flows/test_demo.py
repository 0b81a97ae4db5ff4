"""The demo's text is split by name alone, its model is what the log says, and its training resumes."""

import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from flows.demo import COMMITTED_MODEL
from flows.demo_text import Document, folder_documents, python_documents, split_of, write_splits
from flows.demo_training import CHECKPOINT, PREVIOUS, DemoTraining, train_demo_model
from lsp_core.durable import read_checked
from tests.flows.processes import Run

SEED = 5
LATEST = 0.7  # of a share of the training's time: it may be faster next time
TINY = DemoTraining(
    vocabulary=300,
    hidden_size=16,
    intermediate_size=24,
    blocks=2,
    heads=2,
    positions=16,
    batch=4,
    epochs=2,
    warmup_steps=3,
    evaluate_every=3,
    evaluation_tokens=64,
)


def test_splits_depend_on_the_name_alone() -> None:
    shares = [split_of(f"document {i}") for i in range(4000)]
    # 5 % of 4000 is 200; five standard deviations are 69
    assert 131 < shares.count("test") < 269
    assert 131 < shares.count("validation") < 269
    assert Document(name="library/heapq.py", text="a").split == Document(name="library/heapq.py", text="b").split


def test_python_carries_enough_text() -> None:
    documents = list(python_documents())
    names = [document.name for document in documents]
    assert len(set(names)) == len(names)
    assert not [name for name in names if "/test/" in name or "/tests/" in name or "site-packages" in name]
    assert sum(len(document.text) for document in documents) > 5_000_000


def test_too_few_documents_to_hold_some_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no text"):
        list(folder_documents(tmp_path))
    (tmp_path / "one.txt").write_text("alone")
    with pytest.raises(ValueError, match="no document fell into"):
        write_splits(folder_documents(tmp_path), tmp_path / "splits")


def test_committed_model_is_what_its_log_says() -> None:
    log = json.loads((COMMITTED_MODEL / "training_log.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(COMMITTED_MODEL)
    assert model.dtype == torch.bfloat16
    assert sum(p.numel() for p in model.parameters()) == log["parameters"]
    assert 4_000_000 <= log["parameters"] <= 10_000_000
    assert sum(file.stat().st_size for file in COMMITTED_MODEL.iterdir()) < 20_000_000
    text = "def read(self, size=-1):\n    naïve\t"
    tokenizer = AutoTokenizer.from_pretrained(COMMITTED_MODEL)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def write_texts(folder: Path, *, words: int) -> dict[str, Path]:
    """Returns splits of some words each."""
    splits = {}
    for split, count in (("train", words), ("validation", 60), ("test", 60)):
        splits[split] = folder / f"{split}.jsonl"
        splits[split].write_text(json.dumps({"text": " ".join(f"word{i * i % 17}" for i in range(count))}) + "\n")
    return splits


def results(folder: Path) -> dict[str, bytes]:
    """Returns the files of a trained model; of the log all but the times."""
    log = json.loads((folder / "training_log.json").read_text())
    log["log"] = [{name: value for name, value in record.items() if name != "seconds"} for record in log["log"]]
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return files | {"training_log.json": json.dumps(log).encode()}


def test_interrupted_training_repeats_an_uninterrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    splits = write_texts(tmp_path, words=300)
    whole = train_demo_model(splits, tmp_path / "whole", tmp_path / "work1", TINY)
    steps = 0
    step = torch.optim.AdamW.step

    def counted(self: torch.optim.AdamW, *args: object) -> object:
        nonlocal steps
        steps += 1
        if steps == 8:
            raise KeyboardInterrupt
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", counted)
    with pytest.raises(KeyboardInterrupt):
        train_demo_model(splits, tmp_path / "parts", tmp_path / "work2", TINY)
    steps = 8  # not again
    parts = train_demo_model(splits, tmp_path / "parts", tmp_path / "work2", TINY)
    assert results(parts) == results(whole)


@pytest.mark.parametrize("damaged", [1, 2])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    tmp_path: Path, damaged: int, caplog: pytest.LogCaptureFixture
) -> None:
    splits, work = write_texts(tmp_path, words=300), tmp_path / "work"
    whole = results(train_demo_model(splits, tmp_path / "whole", work, TINY))
    newest, previous = (read_checked(work / name).fields["step"] for name in (CHECKPOINT, PREVIOUS))
    for name in (CHECKPOINT, PREVIOUS)[:damaged]:
        content = bytearray((work / name).read_bytes())
        content[-7] ^= 1
        (work / name).write_bytes(content)
    with caplog.at_level("INFO", logger="flows.demo_training"):
        again = results(train_demo_model(splits, tmp_path / "again", work, TINY))
    assert f"step {previous if damaged == 1 else 0} of {newest}" in caplog.text
    assert caplog.text.count("it is deleted") == damaged
    assert again == whole


@pytest.mark.parametrize("change", ["text", "settings"])
def test_work_on_another_text_or_with_other_settings_is_not_continued(tmp_path: Path, change: str) -> None:
    work, words, chosen = tmp_path / "work", 300, TINY
    train_demo_model(write_texts(tmp_path, words=words), tmp_path / "first", work, TINY)
    if change == "text":
        words = 400
    else:
        chosen = replace(TINY, seed=1)
    splits = write_texts(tmp_path, words=words)
    continued = train_demo_model(splits, tmp_path / "second", work, chosen)
    assert results(continued) == results(train_demo_model(splits, tmp_path / "fresh", tmp_path / "other", chosen))


def test_too_little_text_for_one_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="add text"):
        train_demo_model(write_texts(tmp_path, words=20), tmp_path / "model", tmp_path / "work", TINY)


PROGRAM = """
import json, logging, sys
from pathlib import Path
from flows.demo_training import DemoTraining, train_demo_model
logging.basicConfig(level=logging.INFO)
splits, output, work, settings = sys.argv[1:]
splits = {split: Path(path) for split, path in json.loads(splits).items()}
train_demo_model(splits, Path(output), Path(work), DemoTraining(**json.loads(settings)))
"""


@pytest.mark.slow
def test_killed_training_repeats_an_uninterrupted_one(tmp_path: Path) -> None:
    """Six kills spread over the training by chance, and one each in the tokenizer, a checkpoint and the result."""
    splits = write_texts(tmp_path, words=6000)
    settings = replace(TINY, epochs=8, evaluate_every=20)
    whole, parts, work = (tmp_path / name for name in ("whole", "parts", "work"))

    def start(output: Path, work: Path) -> Run:
        texts = json.dumps({split: str(path) for split, path in splits.items()})
        return Run(["-c", PROGRAM, texts, str(output), str(work), json.dumps(asdict(settings))])

    def began(run: Run) -> bool:
        return "training tokens, step" in run.text()

    reference = start(whole, tmp_path / "other")
    reference.until(lambda: began(reference))
    beginning = time.monotonic()
    assert reference.wait() == 0, reference.text()
    duration = time.monotonic() - beginning

    chance, kills, steps = random.Random(SEED), 6, [0]

    def killed(reached: Callable[[Run], bool], delay: float = 0.0) -> None:
        run = start(parts, work)
        run.until(lambda: reached(run), pause=0)
        time.sleep(delay)
        run.kill()
        saved = work / CHECKPOINT
        steps.append(read_checked(saved).fields["step"] if saved.exists() else 0)

    killed(lambda _: any(work.glob("tokenizer*")))
    for _ in range(kills):
        killed(began, delay=LATEST * duration / kills * chance.random())
    killed(lambda _: (work / f"{CHECKPOINT}.tmp").exists())
    killed(lambda run: began(run) and any(parts.glob("*")))
    last = start(parts, work)
    assert last.wait() == 0, last.text()

    assert steps == sorted(steps)
    assert steps[-2] > 0
    print(f"\nseed {SEED}: {len(steps) - 1} kills, checkpoints at steps {steps[1:]}")
    assert results(parts) == results(whole)
    assert not [path.name for path in work.iterdir() if path.name.endswith(".tmp")]
