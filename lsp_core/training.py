"""Joint training of all projectors against the frozen model's output (paper, section 'Training procedure').

One optimizer step: U = qf(V) once a unit, micro-batches differentiate leaves that depend on U, one backward through the
QR, Adam on V. Alpha and the masks are drawn per step, the order of the data per epoch, both as functions of the seed,
so the split into micro-batches changes nothing and a resumed run repeats an uninterrupted one. Where the paper draws
alpha and masks per micro-batch, this draws them per optimizer step.

Several processes share out the sequences of a step and of the validation. Each unit has one owner, which alone holds V
and Adam's moments, makes the basis of the step and receives its gradient.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel, get_cosine_schedule_with_warmup

from lsp_core.checkpoint import Checkpoints, TrainingState
from lsp_core.distributed import Group
from lsp_core.divergence import TeacherStatistic
from lsp_core.draws import Draws
from lsp_core.durable import digest_tensors
from lsp_core.exchange import Exchange
from lsp_core.gram import NonFiniteError, evaluating
from lsp_core.inputs import Inputs
from lsp_core.ownership import assign_owners, orthogonal_costs
from lsp_core.projector import Projector, attached, dense
from lsp_core.readout import Readout
from lsp_core.sharding import shard_blocks
from lsp_core.training_settings import Metric, TrainingSettings, is_better
from lsp_core.units import Unit
from lsp_core.vectors import Form, Plan

Sharding = Literal["replicated", "sharded"]
LARGEST_LOSS = 700.0  # nats; the perplexity of a greater one is no float64


class TrainingProgress(Protocol):
    """Called after each optimizer step with the step, their number, and what to show."""

    def __call__(self, step: int, total: int, values: Mapping[str, float]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What training gave.

    ``vectors``: the best epoch's V (D, K) by unit, at the leader of a group, elsewhere nothing; ``history``: one record
    an epoch, 0 being the initialization, with the ``metric`` as ``validation``, and beside an accuracy the objective on
    the validation set as ``validation_loss``; ``diverged``: how training broke off, where the settings say to keep what
    there is.
    """

    vectors: dict[str, Tensor]
    history: list[dict[str, float]]
    best_epoch: int
    metric: Metric
    diverged: str | None = None


def train_projectors(
    model: PreTrainedModel,
    units: Sequence[Unit],
    bases: Mapping[str, Tensor],
    removed: Mapping[str, int],
    examples: Tensor,
    validation: Tensor,
    settings: TrainingSettings,
    *,
    inputs: Inputs | None = None,
    labels: Tensor | None = None,
    validation_labels: Tensor | None = None,
    teacher: TeacherStatistic | None = None,
    work: Path | None = None,
    progress: TrainingProgress | None = None,
    on_checkpoint: Callable[[], None] | None = None,
    group: Group | None = None,
    sharding: Sharding = "replicated",
    replicate_orthonormalization: bool = False,
) -> TrainingResult:
    """Trains the V of every unit with ``removed`` > 0 and returns the best by the validation metric.

    ``examples`` and ``validation`` (B, ...), read as ``inputs`` says; ``labels`` (B,) of a classifier. The metric is
    the perplexity of a language model, the accuracy of a classifier with ``validation_labels``, else the KL. ``bases``
    (D, D) by unit; ``teacher`` as ``cache_teacher`` gives it, recomputed for each micro-batch where it is None.
    ``work`` keeps the newest two checkpoints, from which a second call continues, in a ``group`` of any size;
    ``on_checkpoint`` is called after each, by the leader.
    ``group``: the processes that call this together, with the same arguments; without one this process is alone. Of
    ``bases`` each reads those of its own units. ``sharding``: "sharded" leaves each process its part of the blocks'
    weights, and the model so; its alpha = 1 is computed in the activation form. ``replicate_orthonormalization``: every
    process owns every unit.
    Errors: ``NonFiniteError`` where the loss diverges; ``ValueError`` for the task objective without a task; both in
    every process.
    """
    group = group or Group()
    names = list(orthogonal_costs(units, removed))
    owners: dict[str, int | None] = dict.fromkeys(names)
    if not replicate_orthonormalization:
        owners |= assign_owners(orthogonal_costs(units, removed), group.size)
    owned = [name for name, owner in owners.items() if owner in (None, group.rank)]
    if sharding == "sharded":
        shard_blocks(model, group)
    with attached(model, units, bases, removed, owned) as projectors, frozen(model), evaluating(model):
        trainer = Trainer(
            model,
            projectors,
            examples,
            validation,
            settings,
            inputs=inputs,
            labels=labels,
            validation_labels=validation_labels,
            teacher=teacher,
            progress=progress,
            exchange=Exchange(group=group, projectors=projectors, owners=owners),
            sharding=sharding,
        )
        return trainer.run(work, on_checkpoint)


@contextmanager
def frozen(model: torch.nn.Module) -> Iterator[None]:
    """Switches the gradient of every pretrained parameter off inside the ``with`` block."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


class Trainer:
    """The loop of ``train_projectors`` over attached ``projectors``, the model being frozen."""

    def __init__(
        self,
        model: PreTrainedModel,
        projectors: Mapping[str, Projector],
        examples: Tensor,
        validation: Tensor,
        settings: TrainingSettings,
        *,
        inputs: Inputs | None = None,
        labels: Tensor | None = None,
        validation_labels: Tensor | None = None,
        teacher: TeacherStatistic | None = None,
        progress: TrainingProgress | None = None,
        exchange: Exchange | None = None,
        sharding: Sharding = "replicated",
    ) -> None:
        self.model = model
        self.projectors = projectors
        self.exchange = exchange or Exchange(group=Group(), projectors=projectors, owners=dict.fromkeys(projectors, 0))
        self.group = self.exchange.group
        self.owned = {name: p.vectors for name, p in projectors.items() if p.vectors is not None}
        self.sharded = sharding == "sharded"
        self.readout = Readout(model, inputs, purpose="train")
        self.examples, self.validation = examples, validation
        self.labels, self.validation_labels = labels, validation_labels
        classifies = self.readout.kind == "classifier" and validation_labels is not None
        self.metric: Metric = "perplexity" if self.readout.kind == "lm" else "accuracy" if classifies else "kl"
        self.settings = settings
        self.teacher = teacher
        self.progress = progress
        self.draws = Draws(settings=settings, projectors=projectors, examples=len(examples), factored=not self.sharded)
        self.steps_per_epoch = self.draws.steps
        self.total_steps = self.steps_per_epoch * settings.epochs
        parameters = {"params": [vectors.v for vectors in self.owned.values()]}  # a process may own none
        self.optimizer = torch.optim.Adam([parameters], lr=settings.learning_rate)
        warmup = round(settings.warmup_fraction * self.total_steps)
        self.schedule = get_cosine_schedule_with_warmup(self.optimizer, warmup, self.total_steps)

    def run(self, work: Path | None, on_checkpoint: Callable[[], None] | None = None) -> TrainingResult:
        """Trains to the end or to the early stop, from the newest whole checkpoint in ``work`` if there is one."""
        checkpoints = None if work is None else self._checkpoints(work)
        saved_at = time.monotonic()

        def save(state: TrainingState) -> None:
            nonlocal saved_at
            if checkpoints is not None:
                checkpoints.save(state)
                saved_at = time.monotonic()
                if on_checkpoint is not None and self.group.leader:
                    on_checkpoint()

        state = None if checkpoints is None else checkpoints.load()
        if state is None:
            history: list[dict[str, float]] = [{"epoch": 0, **self._validate()}]
            state = TrainingState(step=0, best_epoch=0, best=self._vectors(), history=history)
            save(state)
        diverged: str | None = None
        while state.step < self.total_steps and not self._stops_early(state):
            epoch, within = divmod(state.step + 1, self.steps_per_epoch)
            try:
                state.loss_sum += self.accumulate(state.step)
                self.update()
                state.step += 1
                if within == 0:
                    self._close_epoch(state, epoch)
            except NonFiniteError as error:
                if not self.settings.keep_diverged:
                    raise
                diverged = str(error)
                break
            by_time = time.monotonic() - saved_at >= 60 * self.settings.checkpoint_minutes
            by_time = checkpoints is not None and self.group.from_leader(by_time)
            if within == 0 or by_time or state.step % self.settings.checkpoint_steps == 0:
                save(state)
            if self.progress is not None:
                last = state.history[-1]["validation"]
                self.progress(state.step, self.total_steps, {"epoch": epoch, f"validation {self.metric}": last})
        return TrainingResult(
            vectors=self.exchange.collected(state.best),
            history=state.history,
            best_epoch=state.best_epoch,
            metric=self.metric,
            diverged=diverged,
        )

    def _checkpoints(self, folder: Path) -> Checkpoints:
        data = {"examples": self.examples, "validation": self.validation}
        removed = {name: [p.unit.dimension, p.removed] for name, p in self.projectors.items()}
        for name, labels in (("labels", self.labels), ("validation_labels", self.validation_labels)):
            if labels is not None:
                data[name] = labels
        return Checkpoints(
            folder=folder,
            group=self.group,
            vectors={name: vectors.v for name, vectors in self.owned.items()},
            saved=[name for name in self.owned if self.exchange.owners[name] == self.group.rank or self.group.leader],
            optimizer=self.optimizer,
            schedule=self.schedule,
            run={"settings": self.settings.recorded(), "data": digest_tensors(data), "removed": removed},
        )

    def _close_epoch(self, state: TrainingState, epoch: int) -> None:
        loss = state.loss_sum / self.steps_per_epoch
        state.history.append({"epoch": epoch, **self._validate(), "train_loss": loss})
        if is_better(state.history[-1], state.history[state.best_epoch], self.metric):
            state.best, state.best_epoch = self._vectors(), epoch
        state.loss_sum = 0.0

    def _stops_early(self, state: TrainingState) -> bool:
        within_epoch = state.step % self.steps_per_epoch
        return within_epoch == 0 and state.step // self.steps_per_epoch - state.best_epoch >= self.settings.patience

    def _vectors(self) -> dict[str, Tensor]:
        return {name: vectors.v.detach().cpu().clone() for name, vectors in self.owned.items()}

    def accumulate(self, step: int) -> float:
        """Fills the gradient of every V for optimizer step ``step``, from 0; returns the mean objective in nats."""
        self.exchange.set_forms(self.draws.plans(step))
        rows = self.draws.rows(step)
        targets = self.readout.count(self.examples[rows], task=self.settings.objective == "task")
        mean = 0.0
        for micro, counts in self._micro_batches(rows):
            loss = self._loss(micro).sum() / targets
            if not counts:
                loss = 0.0 * loss
            loss.backward()
            mean += loss.item()
        (mean,) = self.group.sums([mean])
        if not math.isfinite(mean):
            raise NonFiniteError(f"the training loss is {mean} at step {step + 1}: lower the learning rate")
        self.exchange.backward()
        if self.owned:
            penalty = self.settings.orthogonality * torch.stack([v.penalty() for v in self.owned.values()]).sum()
            penalty.backward()
        return mean

    def update(self) -> None:
        """One step of Adam and of the learning-rate schedule on the accumulated gradients."""
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _micro_batches(self, rows: Tensor) -> Iterator[tuple[Tensor, bool]]:
        """Yields this process's part of ``rows`` (B,) in micro-batches that count.

        The weights of sharded blocks are put together for a pass of all processes at once: one with fewer micro-batches
        than others repeats a row, which does not count.
        """
        own = rows[self.group.part(len(rows))]
        passes = math.ceil(len(own) / self.settings.micro_batch)
        yield from ((micro, True) for micro in own.split(self.settings.micro_batch)[:passes])
        if self.sharded:
            most = math.ceil(self.group.largest_part(len(rows)) / self.settings.micro_batch)
            yield from ((rows[:1], False) for _ in range(most - passes))

    def _loss(self, rows: Tensor) -> Tensor:  # (B,) -> one value a target
        batch = self.examples[rows]
        if self.settings.objective == "task":
            return self.readout.losses(batch, None if self.labels is None else self.labels[rows])
        teacher = self._statistic(batch) if self.teacher is None else self.teacher[rows].to(self.model.device)
        return self.readout.divergence(self.readout.outputs(batch), teacher, self.readout.kept(batch))

    @torch.no_grad()
    def _statistic(self, batch: Tensor) -> TeacherStatistic:
        """Returns what the dense model gives: the same network with its projectors off."""
        with dense(self.projectors):
            return self.readout.statistic(self.readout.outputs(batch))

    @torch.no_grad()
    def _validate(self) -> dict[str, float]:
        """Returns the metric on the validation examples, and the loss, at alpha = 1 without masks."""
        plan = Plan(form=Form.ACTIVATION if self.sharded else Form.FACTOR)
        self.exchange.set_forms(dict.fromkeys(self.projectors, plan))
        mean = self._validation_mean(self._validation_losses)
        found = {"validation": math.exp(mean) if self.metric == "perplexity" else mean}
        if self.metric == "accuracy":
            found = {"validation": self._validation_mean(self._told_right), "validation_loss": mean}
        for projector in self.projectors.values():
            projector.set_dense()
        return found

    def _validation_mean(self, values_of: Callable[[Tensor, Tensor | None], Tensor]) -> float:
        total, count = 0.0, 0.0
        for rows, counts in self._micro_batches(torch.arange(len(self.validation))):
            labels = None if self.validation_labels is None else self.validation_labels[rows]
            values = values_of(self.validation[rows], labels)
            if counts:
                total += values.sum(dtype=torch.float64).item()
                count += values.numel()
        total, count = self.group.sums([total, count])
        mean = total / count
        if not mean < LARGEST_LOSS:
            raise NonFiniteError(
                f"the validation loss is {mean} nats: lower the learning rate, or check the model's dtype"
            )
        return mean

    def _validation_losses(self, batch: Tensor, labels: Tensor | None) -> Tensor:  # (B, ...) -> (n,)
        if self.metric == "perplexity" or (self.metric == "accuracy" and self.settings.objective == "task"):
            return self.readout.losses(batch, labels)
        return self.readout.divergence(self.readout.outputs(batch), self._statistic(batch), self.readout.kept(batch))

    def _told_right(self, batch: Tensor, labels: Tensor | None) -> Tensor:  # (B, ...), (B,) -> (B,)
        assert labels is not None
        return self.readout.class_logits(batch).argmax(-1) == labels.to(self.model.device)
