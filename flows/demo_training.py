"""Trains the demo model from nothing, resumably.

A Llama-architecture network and a byte-level BPE on the text of ``demo_text``. AdamW, linear warm-up and cosine, bf16
autocast where the processor has it. The order of the data is a function of the seed and the epoch, so a checkpoint
(weights, Adam's state, the step) is all that a resumed run needs to repeat an uninterrupted one.
"""

import copy
import json
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DemoTraining:
    """Everything that decides the demo model."""

    vocabulary: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 512
    blocks: int = 6
    heads: int = 4
    positions: int = 256
    batch: int = 16  # sequences a step
    epochs: int = 5
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    warmup_steps: int = 200
    evaluate_every: int = 200  # steps; also how often a checkpoint is written
    evaluation_tokens: int = 40_960
    seed: int = 0


def train_tokenizer(texts: Iterator[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE of ``vocabulary`` tokens; any text round-trips through it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)


def train_demo_model(splits: dict[str, Path], output: Path, work: Path, settings: DemoTraining) -> Path:
    """Trains on ``splits`` (JSON lines with ``text``) and writes model, tokenizer and log to ``output``; returns it.

    ``work`` holds the newest checkpoint and the best weights so far; a second call continues from there.
    """
    output.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "tokenizer.json").exists():
        train_tokenizer(iter(_texts(splits["train"])), settings.vocabulary).save_pretrained(work)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work)
    tokens = {split: _token_stream(path, tokenizer) for split, path in splits.items()}

    torch.manual_seed(settings.seed)
    model = LlamaForCausalLM(_config(settings, tokenizer))
    optimizer = torch.optim.AdamW(_parameter_groups(model, settings), lr=settings.learning_rate, betas=(0.9, 0.95))
    steps_per_epoch = (
        tokens["train"].numel() // settings.positions - 1
    ) // settings.batch  # an offset costs one window
    total_steps = steps_per_epoch * settings.epochs
    step, best, records = _restore(work, model, optimizer)
    log.info(
        "%d parameters, %d training tokens, step %d of %d",
        model.num_parameters(),
        tokens["train"].numel(),
        step,
        total_steps,
    )

    model.train()
    started, losses = time.monotonic(), []
    while step < total_steps:
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * _schedule(step, settings.warmup_steps, total_steps)
        batch = _batch(tokens["train"], *divmod(step, steps_per_epoch), settings)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=_has_fast_bf16()):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        step += 1
        if step % settings.evaluate_every == 0 or step == total_steps:
            validation_loss = mean_loss(model, tokens["validation"][: settings.evaluation_tokens], settings.positions)
            record = {
                "step": step,
                "epoch": round(step / steps_per_epoch, 3),
                "train_loss": round(torch.stack(losses).mean().item(), 4),
                "validation_loss": round(validation_loss, 4),
                "seconds": round(time.monotonic() - started, 1),
            }
            log.info("%s", record)
            records.append(record)
            if validation_loss < best:
                best = validation_loss
                copy.deepcopy(model).to(torch.bfloat16).save_pretrained(work / "best")
            _checkpoint(work, model, optimizer, step, best, records)
            started, losses = time.monotonic(), []
    return _publish(work, output, tokenizer, tokens, records, settings)


def mean_loss(model: LlamaForCausalLM, tokens: Tensor, positions: int) -> float:
    """Returns the mean next-token cross-entropy, in nats, over non-overlapping windows of ``tokens`` (T,)."""
    windows = tokens[: tokens.numel() // positions * positions].view(-1, positions)
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=_has_fast_bf16()):
        losses = [model(input_ids=batch, labels=batch).loss.item() * len(batch) for batch in windows.split(8)]
    model.train()
    return sum(losses) / len(windows)


def _config(settings: DemoTraining, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=settings.vocabulary,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.blocks,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        max_position_embeddings=settings.positions,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def _texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def _token_stream(path: Path, tokenizer: PreTrainedTokenizerFast) -> Tensor:  # -> (T,)
    encoded = tokenizer(_texts(path), add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return torch.tensor([token for document in encoded for token in (*document, tokenizer.eos_token_id)])


def _parameter_groups(model: LlamaForCausalLM, settings: DemoTraining) -> list[dict[str, object]]:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def _schedule(step: int, warmup: int, total: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def _batch(tokens: Tensor, epoch: int, index: int, settings: DemoTraining) -> Tensor:  # -> (B, positions)
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + epoch)
    offset = int(torch.randint(settings.positions, (), generator=generator))
    windows = (tokens.numel() - offset) // settings.positions
    order = torch.randperm(windows, generator=generator)
    chosen = order[index * settings.batch : (index + 1) * settings.batch]
    return tokens[offset + chosen[:, None] * settings.positions + torch.arange(settings.positions)]


def _has_fast_bf16() -> bool:
    return torch.cpu.get_capabilities().get("avx512_bf16", False)


def _checkpoint(
    work: Path,
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    step: int,
    best: float,
    records: list[dict[str, float]],
) -> None:
    state = {f"model.{name}": tensor.detach() for name, tensor in model.named_parameters()}
    for index, moments in optimizer.state_dict()["state"].items():
        state |= {f"adam.{index}.{name}": tensor for name, tensor in moments.items()}
    save_file(
        state, work / "checkpoint.tmp", metadata={"step": str(step), "best": repr(best), "log": json.dumps(records)}
    )
    (work / "checkpoint.tmp").replace(work / "checkpoint.safetensors")


def _restore(
    work: Path, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer
) -> tuple[int, float, list[dict[str, float]]]:
    path = work / "checkpoint.safetensors"
    if not path.exists():
        return 0, math.inf, []
    state = load_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[f"model.{name}"])
    adam: dict[int, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        if name.startswith("adam."):
            _, index, moment = name.split(".")
            adam.setdefault(int(index), {})[moment] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": adam})
    return int(metadata["step"]), float(metadata["best"]), json.loads(metadata["log"])


def _publish(
    work: Path,
    output: Path,
    tokenizer: PreTrainedTokenizerFast,
    tokens: dict[str, Tensor],
    records: list[dict[str, float]],
    settings: DemoTraining,
) -> Path:
    model = LlamaForCausalLM.from_pretrained(work / "best", dtype=torch.bfloat16)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    model.to(torch.float32)
    limit = settings.evaluation_tokens
    summary = {
        "settings": asdict(settings),
        "parameters": model.num_parameters(),
        "tokens": {split: stream.numel() for split, stream in tokens.items()},
        "loss": {
            split: round(mean_loss(model, stream[:limit], settings.positions), 4) for split, stream in tokens.items()
        },
        "log": records,
    }
    (output / "training_log.json").write_text(json.dumps(summary, indent=1) + "\n")
    return output
