"""Trains the demo model from nothing, resumably.

A Llama-architecture network and a byte-level BPE on the text of ``demo_text``. AdamW, linear warm-up and cosine, bf16
autocast where the processor has it. The order of the data is a function of the seed and the epoch, so a checkpoint
(weights, Adam's state, the best weights, the step) is all that a resumed run needs to repeat an uninterrupted one.
"""

import hashlib
import json
import logging
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lsp_core.durable import DamagedFileError, Saved, digest_tensors, read_checked, write_durably
from lsp_core.gram import NonFiniteError

END_OF_TEXT = "<|endoftext|>"
CHECKPOINT, PREVIOUS = "checkpoint.safetensors", "checkpoint.previous.safetensors"
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


@dataclass(kw_only=True)
class State:
    """Where training stands after ``step`` steps; ``weights``: the best, in bf16, of validation loss ``best``."""

    step: int = 0
    best: float = math.inf
    weights: dict[str, Tensor] = field(default_factory=dict)
    records: list[dict[str, float]] = field(default_factory=list)


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

    ``work`` holds the tokenizer and the newest two checkpoints; a second call continues from there. Errors:
    ``ValueError`` if there is too little text for one step; ``NonFiniteError`` where the loss diverges.
    """
    output.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(work, _texts(splits["train"]), settings.vocabulary)
    tokens = {split: _token_stream(path, tokenizer) for split, path in splits.items()}
    run = {"settings": asdict(settings), "data": digest_tensors(tokens)}

    torch.manual_seed(settings.seed)
    model = LlamaForCausalLM(_config(settings, tokenizer))
    optimizer = torch.optim.AdamW(_parameter_groups(model, settings), lr=settings.learning_rate, betas=(0.9, 0.95))
    steps_per_epoch = (
        tokens["train"].numel() // settings.positions - 1
    ) // settings.batch  # an offset costs one window
    total_steps = steps_per_epoch * settings.epochs
    if total_steps < 1:
        least = settings.positions * (settings.batch + 1)
        raise ValueError(f"{splits['train']} has {tokens['train'].numel()} tokens, a step takes {least}: add text")
    state = _restore(work, run, model, optimizer)
    log.info(
        "%d parameters, %d training tokens, step %d of %d",
        model.num_parameters(),
        tokens["train"].numel(),
        state.step,
        total_steps,
    )

    model.train()
    started, losses = time.monotonic(), []
    while state.step < total_steps:
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * _schedule(state.step, settings.warmup_steps, total_steps)
        batch = _batch(tokens["train"], *divmod(state.step, steps_per_epoch), settings)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=_has_fast_bf16()):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        state.step += 1
        if state.step % settings.evaluate_every == 0 or state.step == total_steps:
            validation_loss = mean_loss(model, tokens["validation"][: settings.evaluation_tokens], settings.positions)
            if not math.isfinite(validation_loss):
                raise NonFiniteError(f"the validation loss is {validation_loss} at step {state.step}: it diverges")
            record = {
                "step": state.step,
                "epoch": round(state.step / steps_per_epoch, 3),
                "train_loss": round(torch.stack(losses).mean().item(), 4),
                "validation_loss": round(validation_loss, 4),
                "seconds": round(time.monotonic() - started, 1),
            }
            log.info("%s", record)
            state.records.append(record)
            if validation_loss < state.best:
                state.best = validation_loss
                state.weights = {n: p.detach().to(torch.bfloat16, copy=True) for n, p in model.named_parameters()}
            _checkpoint(work, run, model, optimizer, state)
            started, losses = time.monotonic(), []
    return _publish(model, state, output, tokenizer, tokens, settings)


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


def _tokenizer(work: Path, texts: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of ``texts``, trained or from ``work``, where it appears whole and under their digest."""
    digest = hashlib.sha256(json.dumps([vocabulary, *texts]).encode()).hexdigest()
    folder = work / f"tokenizer-{digest[:16]}"
    if not folder.is_dir():
        partial = work / "tokenizer.tmp"
        shutil.rmtree(partial, ignore_errors=True)
        train_tokenizer(iter(texts), vocabulary).save_pretrained(partial)
        partial.rename(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


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
    work: Path, run: dict[str, Any], model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, state: State
) -> None:
    tensors = {f"model.{name}": tensor.detach() for name, tensor in model.named_parameters()}
    tensors |= {f"best.{name}": tensor for name, tensor in state.weights.items()}
    for index, moments in optimizer.state_dict()["state"].items():
        tensors |= {f"adam.{index}.{name}": tensor for name, tensor in moments.items()}
    fields = {"run": run, "step": state.step, "best": state.best, "log": state.records}
    write_durably(work / CHECKPOINT, tensors, fields, previous=work / PREVIOUS)


def _restore(work: Path, run: dict[str, Any], model: LlamaForCausalLM, optimizer: torch.optim.Optimizer) -> State:
    """Fills model and optimizer from the newest whole checkpoint of this training, if there is one."""
    saved = _newest(work, run)
    if saved is None:
        return State()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(saved.tensors[f"model.{name}"])
    adam: dict[int, dict[str, Tensor]] = {}
    for name, tensor in saved.tensors.items():
        if name.startswith("adam."):
            _, index, moment = name.split(".")
            adam.setdefault(int(index), {})[moment] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": adam})
    return State(
        step=saved.fields["step"],
        best=saved.fields["best"],
        weights={name: saved.tensors[f"best.{name}"] for name, _ in model.named_parameters()},
        records=saved.fields["log"],
    )


def _newest(work: Path, run: dict[str, Any]) -> Saved | None:
    """Returns the newest checkpoint that is whole and of this ``run``; any other is deleted, and said in the log."""
    for path in (work / CHECKPOINT, work / PREVIOUS):
        try:
            saved = read_checked(path)
            if saved.fields["run"] != run:
                raise DamagedFileError(f"{path} is the checkpoint of another text or of other settings")
        except FileNotFoundError:
            continue
        except DamagedFileError as error:
            log.warning("%s: it is deleted", error)
            path.unlink()
            continue
        return saved
    return None


def _publish(
    model: LlamaForCausalLM,
    state: State,
    output: Path,
    tokenizer: PreTrainedTokenizerFast,
    tokens: dict[str, Tensor],
    settings: DemoTraining,
) -> Path:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state.weights[name])
    limit = settings.evaluation_tokens
    summary = {
        "settings": asdict(settings),
        "parameters": model.num_parameters(),
        "tokens": {split: stream.numel() for split, stream in tokens.items()},
        "loss": {
            split: round(mean_loss(model, stream[:limit], settings.positions), 4) for split, stream in tokens.items()
        },
        "log": state.records,
    }
    model.to(torch.bfloat16).save_pretrained(output)
    tokenizer.save_pretrained(output)
    (output / "training_log.json").write_text(json.dumps(summary, indent=1) + "\n")
    return output
