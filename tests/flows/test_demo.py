"""The demo's text is split by name alone, its model is what the log says, and its training resumes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from flows.demo import COMMITTED_MODEL
from flows.demo_text import Document, folder_documents, python_documents, split_of, write_splits
from flows.demo_training import DemoTraining, train_demo_model


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


def test_interrupted_training_repeats_an_uninterrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = DemoTraining(
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
    splits = {}
    for split, words in (("train", 300), ("validation", 60), ("test", 60)):
        splits[split] = tmp_path / f"{split}.jsonl"
        splits[split].write_text(json.dumps({"text": " ".join(f"word{i % 17}" for i in range(words))}) + "\n")
    whole = train_demo_model(splits, tmp_path / "whole", tmp_path / "work1", settings)

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
        train_demo_model(splits, tmp_path / "parts", tmp_path / "work2", settings)
    parts = train_demo_model(splits, tmp_path / "parts", tmp_path / "work2", settings)
    one, two = load_file(whole / "model.safetensors"), load_file(parts / "model.safetensors")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
