"""Tiny random models of every kind, saved as users save theirs, the data that they read, and configs to compress them.

Widths are odd where the family allows it; weights are large enough for a truncation to be seen.
"""

import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
    ViTModel,
)

from flows.config import CompressConfig

LENGTH, POSITIONS, IMAGE = 16, 32, 8
BYTES = 257  # the tokens of the tests' byte-level tokenizer
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = {"greek": ["alpha", "beta", "gamma"], "colours": ["red", "green", "blue"]}
CLASSES = ("cat", "dog", "owl")
BRIGHTNESS = {"cat": 0, "dog": 80, "owl": 160, "ash": 0, "elm": 160, "fir": 80, "all": 40}
SPREAD = {"initializer_range": 0.2}
Save = Callable[[Path, Path], None]


def save_llama(folder: Path, tokenizer: Path) -> None:
    """Four query heads and two of keys and values."""
    config = LlamaConfig(
        vocab_size=BYTES,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        **SPREAD,
    )
    _save(LlamaForCausalLM, config, folder, tokenizer)


def save_moe(folder: Path, tokenizer: Path) -> None:
    """Experts in the first block, an ordinary MLP in the second."""
    config = Qwen3MoeConfig(
        vocab_size=BYTES,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        moe_intermediate_size=12,
        num_experts=3,
        num_experts_per_tok=2,
        mlp_only_layers=[1],
        max_position_embeddings=POSITIONS,
        **SPREAD,
    )
    _save(Qwen3MoeForCausalLM, config, folder, tokenizer)


def save_t5(folder: Path, tokenizer: Path) -> None:
    """An encoder-decoder without a limit of positions."""
    config = T5Config(
        vocab_size=BYTES,
        d_model=24,
        d_kv=5,
        d_ff=40,
        num_heads=4,
        num_layers=2,
        num_decoder_layers=1,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=None,
    )
    _save(T5ForConditionalGeneration, config, folder, tokenizer)


def save_bert(folder: Path, tokenizer: Path, *, padding: int = 0) -> None:
    """A masked language model, whose checkpoint has no pooler; ``padding``: the token that its config pads with."""
    config = BertConfig(
        vocab_size=len(SPECIAL) + sum(map(len, WORDS.values())),
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        pad_token_id=padding,
        **SPREAD,
    )
    _save(BertForMaskedLM, config, folder, None)
    word_piece().save_pretrained(folder)


def save_vit(folder: Path, tokenizer: Path, *, head: bool = True) -> None:
    """An image classifier, or without ``head`` an encoder."""
    config = ViTConfig(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=IMAGE,
        patch_size=4,
        id2label=dict(enumerate(CLASSES)),
        label2id={name: number for number, name in enumerate(CLASSES)},
        **SPREAD,
    )
    if head:
        _save(ViTForImageClassification, config, folder, None)
    else:
        _save(lambda config: ViTModel(config, add_pooling_layer=False), config, folder, None)
    ViTImageProcessorPil(size={"height": IMAGE, "width": IMAGE}).save_pretrained(folder)


def _save(make: Callable[..., PreTrainedModel], config: Any, folder: Path, tokenizer: Path | None) -> None:
    torch.manual_seed(0)
    make(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json") if tokenizer is not None else ():
        shutil.copyfile(tokenizer / name, folder / name)


def word_piece() -> PreTrainedTokenizerFast:
    """Returns a tokenizer like BERT's, of a few words."""
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *(w for words in WORDS.values() for w in words)])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def write_documents(path: Path, count: int, seed: int) -> Path:
    """Writes labelled records of 3 to 24 words of their class, to a plain file as paragraphs without labels."""
    draw = random.Random(seed)
    records = []
    for _ in range(count):
        label = draw.choice(list(WORDS))
        records.append((" ".join(draw.choices(WORDS[label], k=draw.randint(3, 24))), label))
    lines = [json.dumps({"text": text, "label": label}) for text, label in records]
    path.write_text("\n".join(lines) if path.suffix == ".jsonl" else "\n\n".join(text for text, _ in records))
    return path


def write_images(folder: Path, classes: Sequence[str], each: int, seed: int) -> Path:
    """Writes noise into class folders, every class with a brightness of its own."""
    generator = np.random.default_rng(seed)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for index in range(each):
            pixels = generator.integers(BRIGHTNESS[name], BRIGHTNESS[name] + 90, (11, 9, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index:03}.png")
    return folder


def write_data(folder: Path) -> dict[str, Path]:
    """Writes documents, and folders of images: the classifier's own classes, others, and images without any."""
    data = {name: write_documents(folder / name, 160, seed) for seed, name in enumerate(("train.jsonl", "test.jsonl"))}
    data["test.txt"] = write_documents(folder / "test.txt", 20, 2)
    data["images"] = write_images(folder / "images", CLASSES, 24, 3)
    data["test-images"] = write_images(folder / "test-images", CLASSES, 5, 4)
    data["others"] = write_images(folder / "others", ("ash", "elm"), 12, 5)
    data["other-tests"] = write_images(folder / "other-tests", ("elm", "ash", "fir"), 4, 6)
    data["plain"] = write_images(folder / "plain", ("all",), 30, 7) / "all"
    return data


BOTH = [{"ratio": 0.3, "objective": "kl"}, {"ratio": 0.3, "objective": "task"}]
KINDS: dict[str, tuple[Save, str]] = {  # how it is saved, and which data it reads
    "llama": (save_llama, "text"),
    "moe": (save_moe, "text"),
    "t5": (save_t5, "text"),
    "bert": (save_bert, "documents"),
    "vit": (save_vit, "images"),
    "vit-encoder": (lambda folder, tokenizer: save_vit(folder, tokenizer, head=False), "images"),
}


def sections(kind: str, data: dict[str, Path], text: dict[str, Path]) -> dict[str, Any]:
    """Returns the sections of a config that name what a kind reads, and its targets."""
    drawn = {"sequences": 12, "sequence_length": LENGTH}
    reads, targets = KINDS[kind][1], BOTH if kind in ("llama", "t5", "vit") else BOTH[:1]
    if reads == "images":
        pair = {"train": {"path": data["others"]}, "test": {"path": data["other-tests"]}}
        return {
            "targets": targets,
            "calibration": {"images": [{"path": data["images"]}], **drawn},
            "evaluation": {"images": {"path": data["test-images"]}, "transfer": {"trees": pair}},
        }
    if reads == "documents":
        pair = {"train": {"path": data["train.jsonl"]}, "test": {"path": data["test.jsonl"]}}
        return {
            "targets": targets,
            "calibration": {"text": {"path": data["train.jsonl"]}, **drawn},
            "evaluation": {"text": {"path": data["test.txt"]}, "text_transfer": {"topics": pair}},
        }
    return {
        "targets": targets,
        "calibration": {"text": {"path": text["train"]}, **drawn},
        "evaluation": {"text": {"path": text["test"]}, "tasks": ()},
    }


def tiny(model: Path, folder: Path, values: dict[str, Any], **changes: Any) -> CompressConfig:
    """Returns a config that compresses ``model`` in seconds; ``values`` and ``changes`` are sections."""
    settings: dict[str, Any] = {
        "model": {"name_or_path": str(model)},
        "allocation": {"sequences": 4, "grid_points": 4},
        "validation": {"sequences": 4},
        "training": {"epochs": 2, "batch_sequences": 6, "learning_rate": 1e-2},
        "store": str(folder / "store"),
        "output": folder / "output",
        "device": "cpu",
    }
    return CompressConfig.model_validate(settings | values | changes)
