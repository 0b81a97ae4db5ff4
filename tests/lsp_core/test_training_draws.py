"""What training draws and schedules, as functions of the seed and the step: alpha, masks, order, learning rate."""

import dataclasses
import math

import pytest
import torch

from lsp_core.training_settings import TrainingSettings, default_learning_rate
from lsp_core.vectors import Form

# 6 sequences in steps of 4: two steps an epoch
SETTINGS = TrainingSettings(learning_rate=3e-3, epochs=3, batch_sequences=4)


@pytest.mark.parametrize(("modulation", "expected"), [(1.0, [0.5, 1]), (1.5, [1 / 3, 2 / 3, 1]), (0.0, [1])])
def test_alpha_ramps_from_the_first_step_to_one(prepare, make_trainer, stack, modulation, expected):
    """alpha = min(1, t / (epochs of modulation x steps an epoch)), t from 1; at 1 the factor form takes over."""
    case = prepare("llama")
    trainer = make_trainer(case, stack, dataclasses.replace(SETTINGS, modulation_epochs=modulation))
    for step in range(6):
        plans = trainer.draws.plans(step)
        assert plans.keys() == {unit.name for unit in case.units}
        for plan in plans.values():
            assert plan.alpha == pytest.approx(expected[min(step, len(expected) - 1)])
            assert plan.form is (Form.ACTIVATION if plan.alpha < 1 else Form.FACTOR)


def test_masks_are_drawn_per_step_and_member(prepare, make_trainer, stack):
    case = prepare("llama")
    trainer = make_trainer(case, stack, dataclasses.replace(SETTINGS, dropout=0.2))
    qkv = case.units[0].name
    draws = torch.stack([trainer.draws.masks(step)[qkv] for step in range(300)]).float()
    assert draws.shape == (300, 3, 28)
    # 25200 draws: the rate is good to 4 standard deviations of 0.0025
    assert abs(draws.mean() - 0.8) <= 0.01
    for member in range(3):
        assert not torch.equal(draws[:, member], draws[:, (member + 1) % 3])
    covariance = (draws[:, 0] * draws[:, 1]).mean() - draws[:, 0].mean() * draws[:, 1].mean()
    assert abs(covariance) <= 4 * 0.16 / (300 * 28) ** 0.5  # members are independent
    assert all(torch.equal(m, trainer.draws.masks(7)[name]) for name, m in trainer.draws.masks(7).items())
    other_unit = trainer.draws.masks(7)[next(u.name for u in case.units[1:] if len(u.members) == 1)]
    assert not torch.equal(other_unit[0], trainer.draws.masks(7)[qkv][0])


@pytest.mark.parametrize(("dropout", "value"), [(0.0, True), (1.0, False)])
def test_masks_at_the_ends(prepare, make_trainer, stack, dropout, value):
    trainer = make_trainer(prepare("llama"), stack, dataclasses.replace(SETTINGS, dropout=dropout))
    assert all((mask == value).all() for mask in trainer.draws.masks(3).values())


def test_an_epoch_visits_every_sequence_once_in_an_order_of_its_own(prepare, make_trainer, stack):
    trainer = make_trainer(prepare("llama"), stack, SETTINGS)
    rows_of = trainer.draws.rows
    epochs = [torch.cat([rows_of(2 * epoch), rows_of(2 * epoch + 1)]).tolist() for epoch in range(4)]
    assert all(sorted(order) == list(range(6)) for order in epochs)
    assert len({tuple(order) for order in epochs}) > 1


def test_learning_rate_warms_up_linearly_then_falls_as_a_cosine(prepare, make_trainer, stack):
    case = prepare("llama")
    settings = dataclasses.replace(SETTINGS, epochs=10, warmup_fraction=0.2)  # 20 steps, 4 of warm-up
    trainer = make_trainer(case, stack, settings)
    rates = []
    for step in range(20):
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        if step == 0:
            trainer.accumulate(0)
        trainer.update()
    expected = [s / 4 if s < 4 else 0.5 * (1 + math.cos(math.pi * (s - 4) / 16)) for s in range(20)]
    assert rates == pytest.approx([3e-3 * e for e in expected])
    assert trainer.optimizer.param_groups[0]["weight_decay"] == 0


@pytest.mark.parametrize(
    ("parameters", "rate"), [(1, 1e-3), (499_999_999, 1e-3), (500_000_000, 1e-4), (6_000_000_000, 3e-5)]
)
def test_default_learning_rate(parameters, rate):
    assert default_learning_rate(parameters) == rate
