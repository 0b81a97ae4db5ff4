"""Projector training: what changes the result and what must not, resuming, and one step against a dense oracle."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from lsp_core import training
from lsp_core.basis import ordered_basis
from lsp_core.discovery import discover_units
from lsp_core.divergence import TeacherStatistic
from lsp_core.gram import NonFiniteError, gather_grams
from lsp_core.teacher import cache_teacher
from lsp_core.training import Trainer, train_projectors
from lsp_core.training_settings import TrainingSettings
from lsp_core.units import weight_of

# 6 sequences in steps of 4: two steps an epoch, the second one smaller
SETTINGS = TrainingSettings(learning_rate=3e-3, epochs=3, batch_sequences=4, micro_batch=4, patience=9)


class Killed(Exception):  # noqa: N818
    """Stands in for the end of the process."""


def train(case, settings=SETTINGS, **options):
    return train_projectors(
        case.model, case.units, case.bases, case.removed, case.tokens, case.tokens[:3], settings, **options
    )


def assert_close(first, second, tolerance: float) -> None:
    assert first.vectors.keys() == second.vectors.keys()
    for name, v in first.vectors.items():
        assert (v - second.vectors[name]).abs().max() <= tolerance, name
    for ours, theirs in zip(first.history, second.history, strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance)


@pytest.fixture
def _better_every_epoch(monkeypatch):
    """The last epoch's vectors are the best: what is compared has seen every step."""
    validate = Trainer._validate
    monkeypatch.setattr(
        Trainer, "_validate", lambda self: {"validation": validate(self)["validation"] / 2**self.schedule.last_epoch}
    )


@pytest.mark.parametrize("objective", ["kl", "task"])
@pytest.mark.parametrize("step", [0, 1, 3], ids=["ramping", "last, smaller batch of the ramp", "full"])
def test_gradient_of_one_step_against_dense_projectors(prepare, oracles, make_trainer, stack, objective, step):
    """Objective over the step's sequences, weighted by tokens, plus the penalty; V perturbed (traps, 'Numerics')."""
    case = prepare("qwen3")
    settings = dataclasses.replace(SETTINGS, objective=objective, micro_batch=3, dropout=0.3, orthogonality=0.05)
    teacher = case.logits()
    trainer = make_trainer(case, stack, settings, case.perturbed())
    value = trainer.accumulate(step)
    masks, rows = trainer.draws.masks(step), trainer.draws.rows(step)
    grads = {name: p.v.grad for name, p in trainer.projectors.items()}
    stack.close()

    vectors = {name: v.clone().requires_grad_() for name, v in case.perturbed().items()}
    logits = oracles.logits(case, vectors, masks, alpha=min(1.0, (step + 1) / 2))[rows]
    if objective == "kl":
        loss = oracles.kl(teacher[rows], logits).mean()
    else:
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), case.tokens[rows, 1:].flatten())
    penalty = torch.zeros(())
    for v in vectors.values():
        k = v.shape[1]
        gram = (v.T @ v).abs()
        penalty = penalty + (gram.sum() - gram.diagonal().sum()) / (k * (k - 1))
    (loss + 0.05 * penalty).backward()
    assert len(rows) == (4 if step != 1 and step != 3 else 2)
    assert value == pytest.approx(loss.item(), rel=1e-11)
    largest = max(v.grad.abs().max() for v in vectors.values())
    for name, v in vectors.items():
        assert (grads[name] - v.grad).abs().max() <= 1e-9 * largest, name  # rounding of two different QR gradients


@pytest.mark.usefixtures("_better_every_epoch")
def test_split_into_micro_batches_changes_nothing(prepare):
    case = prepare("llama")
    whole = train(case)
    assert whole.best_epoch == 3
    for micro_batch in (1, 3):
        split = train(case, dataclasses.replace(SETTINGS, micro_batch=micro_batch))
        # Adam divides by |g| + 1e-8: roundings of 1e-16 in an entry that is itself nothing become 1e-8 of a step
        assert_close(split, whole, 1e-8)


@pytest.mark.usefixtures("_better_every_epoch")
def test_cached_teacher_equals_recomputed(prepare):
    case = prepare("llama")
    seen = []
    teacher = cache_teacher(case.model, case.tokens, micro_batch=4, progress=lambda *s: seen.append(s))
    assert seen == [(4, 6), (6, 6)]
    assert teacher.m.shape == (6, 17, 48)
    assert teacher.c.shape == teacher.entropy.shape == (6, 17)
    log_p = case.logits().log_softmax(-1)
    assert (teacher.entropy + (log_p.exp() * log_p).sum(-1)).abs().max() <= 1e-12
    assert_close(train(case, teacher=teacher), train(case), 1e-8)


@pytest.mark.usefixtures("_better_every_epoch")
def test_same_seed_same_bits_and_another_seed_another_result(prepare):
    case = prepare("llama")
    first, again = train(case), train(case)
    assert first.history == again.history
    assert all(torch.equal(v, again.vectors[name]) for name, v in first.vectors.items())
    other = train(case, dataclasses.replace(SETTINGS, seed=1))
    assert other.history[0] == first.history[0]
    assert other.history[1:] != first.history[1:]


@pytest.mark.parametrize("kills", [(3,), (4,), (1, 6), (5, 7)])
def test_killed_and_resumed_equals_uninterrupted_bit_for_bit(prepare, tmp_path, kills):
    """Steps of 2 sequences: 3 steps an epoch, a checkpoint after every second step and at each epoch's end."""
    case = prepare("llama")
    settings = dataclasses.replace(
        SETTINGS, batch_sequences=2, micro_batch=2, checkpoint_steps=2, objective="task", learning_rate=1e-2
    )
    uninterrupted = train(case, settings)
    assert uninterrupted.best_epoch > 0
    started = []
    for kill in kills:

        def progress(step, total, values, kill=kill):
            started.append(step)
            if step == kill:
                raise Killed

        with pytest.raises(Killed):
            train(case, settings, work=tmp_path, progress=progress)
    started.clear()
    resumed = train(case, settings, work=tmp_path, progress=lambda step, *_: started.append(step))
    saved = {1: 0, 3: 3, 4: 4, 5: 4, 6: 6, 7: 6}[kills[-1]]
    assert started == list(range(saved + 1, 10)), "continues after the last checkpoint"
    assert resumed.history == uninterrupted.history
    assert resumed.best_epoch == uninterrupted.best_epoch
    assert all(torch.equal(v, uninterrupted.vectors[name]) for name, v in resumed.vectors.items())
    assert not list(tmp_path.glob("*.tmp"))
    finished = train(case, settings, work=tmp_path, progress=lambda *_: pytest.fail("nothing is left to do"))
    assert finished.history == uninterrupted.history


def test_resumed_after_an_early_stop_stays_stopped(prepare, tmp_path):
    case = prepare("llama")
    settings = dataclasses.replace(SETTINGS, learning_rate=1.0, patience=1)
    stopped = train(case, settings, work=tmp_path)
    again = train(case, settings, work=tmp_path, progress=lambda *_: pytest.fail("nothing is left to do"))
    assert again.history == stopped.history
    assert len(stopped.history) == 2


@pytest.mark.parametrize("patience", [1, 2])
def test_early_stop_keeps_epoch_0_where_training_only_harms(prepare, monkeypatch, patience):
    case = prepare("llama")
    perplexities = iter([10.0, 11.0, 10.5, 12.0])
    monkeypatch.setattr(Trainer, "_validate", lambda self: {"validation": next(perplexities)})
    result = train(case, dataclasses.replace(SETTINGS, patience=patience))
    assert result.best_epoch == 0
    assert [record["epoch"] for record in result.history] == list(range(patience + 1))
    for name, v in result.vectors.items():
        assert torch.equal(v, case.bases[name][:, -case.removed[name] :])


def test_best_epoch_is_kept_not_the_last(prepare, monkeypatch):
    case = prepare("llama")
    short = train(case, dataclasses.replace(SETTINGS, epochs=3))
    perplexities = iter([10.0, 8.0, 9.0, 8.5])
    monkeypatch.setattr(Trainer, "_validate", lambda self: {"validation": next(perplexities)})
    kept = []
    close = Trainer._close_epoch
    monkeypatch.setattr(Trainer, "_close_epoch", lambda self, *a: (kept.append(self._vectors()), close(self, *a)))
    result = train(case, dataclasses.replace(SETTINGS, epochs=3))
    assert result.best_epoch == 1
    assert len(result.history) == len(short.history) == 4
    for name, v in result.vectors.items():
        assert torch.equal(v, kept[0][name])
        assert not torch.equal(v, kept[2][name])


def test_validation_is_the_perplexity_of_the_full_projection(prepare, oracles):
    case = prepare("opt")
    result = train(case, dataclasses.replace(SETTINGS, epochs=1, objective="task", learning_rate=1e-2))
    initial = {n: case.bases[n][:, -k:] for n, k in case.removed.items()}
    assert result.best_epoch == 1
    for record, vectors in ((result.history[0], initial), (result.history[1], result.vectors)):
        logits = oracles.logits(case, vectors, oracles.all_removed(case), 1.0).detach()[:3]
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), case.tokens[:3, 1:].flatten())
        assert record["validation"] == pytest.approx(math.exp(loss), rel=1e-10)


@pytest.fixture(scope="module")
def fitted():
    """A small model in float32 that has learned a language: the next token is mostly a function of the last two."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=17
    )
    model = LlamaForCausalLM(config)
    tables = torch.stack([torch.randperm(17), torch.randperm(17)])
    ids = torch.randint(17, (160, 24))
    for position in range(2, 24):
        follows = tables[ids[:, position - 2] % 2, ids[:, position - 1]]
        ids[:, position] = torch.where(torch.rand(160) < 0.9, follows, ids[:, position])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(200):
        batch = ids[(torch.arange(32) + 32 * step) % 128]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    units = discover_units(model)
    tokens, validation = ids[:128], ids[128:]
    grams = gather_grams(model, units, tokens, micro_batch=64)
    bases = {}
    for unit in units:
        weights = [weight_of(model.get_submodule(name)).detach() for name in unit.members]
        bases[unit.name] = ordered_basis(unit, grams[unit.name], weights).q
    return model, units, bases, {unit.name: int(0.8 * unit.dimension) for unit in units}, tokens, validation


@pytest.mark.parametrize("objective", ["kl", "task"])
def test_training_lowers_the_validation_perplexity_of_a_fitted_model(fitted, objective):
    model, units, bases, removed, tokens, validation = fitted
    with torch.no_grad():
        dense = math.exp(model(input_ids=validation, labels=validation).loss)
    settings = TrainingSettings(learning_rate=1e-2, epochs=5, batch_sequences=16, micro_batch=16, objective=objective)
    result = train_projectors(model, units, bases, removed, tokens, validation, settings)
    initial, best = (result.history[epoch]["validation"] for epoch in (0, result.best_epoch))
    assert dense < 0.6 * 17  # it did learn: a uniform guess has 17
    assert initial > 1.1 * dense  # and the truncation hurts
    assert best - dense < 0.7 * (initial - dense)
    losses = [record["train_loss"] for record in result.history[2:]]
    assert losses[-1] < losses[0]


def test_divergence_is_an_error_that_says_what_to_do(prepare):
    case = prepare("llama")
    teacher = cache_teacher(case.model, case.tokens, micro_batch=6)
    broken = TeacherStatistic(m=teacher.m, c=teacher.c, entropy=teacher.entropy * torch.nan)
    before = dict(case.model.named_modules())
    with pytest.raises(NonFiniteError, match="nan at step 1: lower the learning rate"):
        train(case, teacher=broken)
    assert dict(case.model.named_modules()) == before


@pytest.mark.parametrize("loss", [math.nan, math.inf, 1e4])
def test_validation_loss_without_a_perplexity_is_an_error(prepare, monkeypatch, loss):
    case = prepare("llama")
    monkeypatch.setattr(Trainer, "_validation_losses", lambda self, batch, labels: torch.full((3,), loss))
    with pytest.raises(NonFiniteError, match="validation loss"):
        train(case)


def test_vectors_that_blow_up_are_an_error(prepare):
    case = prepare("llama")
    with pytest.raises(ValueError, match="lower the learning rate"):
        train(case, dataclasses.replace(SETTINGS, learning_rate=1e308, warmup_fraction=0))


def test_pretrained_parameters_are_neither_changed_nor_marked(prepare):
    case = prepare("opt")
    frozen_before = case.model.get_input_embeddings().weight.requires_grad_(False)
    case.model.train()
    flags = {name: p.requires_grad for name, p in case.model.named_parameters()}
    state = {name: tensor.clone() for name, tensor in case.model.state_dict().items()}
    train(case)
    assert case.model.training
    assert not frozen_before.requires_grad
    assert {name: p.requires_grad for name, p in case.model.named_parameters()} == flags
    assert all(p.grad is None for p in case.model.parameters())
    assert all(torch.equal(tensor, state[name]) for name, tensor in case.model.state_dict().items())


def test_vectors_start_at_the_basis_and_leave_it_alone(prepare):
    case = prepare("llama")
    bases = {name: q.clone() for name, q in case.bases.items()}
    result = train(case)
    assert all(torch.equal(q, case.bases[name]) for name, q in bases.items())
    assert result.vectors.keys() == case.removed.keys()
    assert all(v.shape == (case.by_name[n].dimension, case.removed[n]) for n, v in result.vectors.items())
    math.exp(training.LARGEST_LOSS)  # no overflow
