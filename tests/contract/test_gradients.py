"""Every projector of every family learns, from either objective and in either form."""

import pytest
import torch

from lsp_core.projector import attached
from lsp_core.training import Trainer, frozen
from lsp_core.training_settings import TrainingSettings
from tests.contract.cases import MICRO_BATCH


@pytest.mark.parametrize("ramp", [0.0, 2.0], ids=["factor form", "activation form"])
@pytest.mark.parametrize("objective", ["kl", "task"])
def test_gradients_reach_every_projector(case, objective, ramp):
    """Without the penalty on V, which would hide a projector that the loss does not reach."""
    settings = TrainingSettings(
        learning_rate=1e-3,
        objective=objective,
        batch_sequences=len(case.examples),
        micro_batch=MICRO_BATCH,
        modulation_epochs=ramp,
        orthogonality=0.0,
    )
    model, vectors = case.copy_model(), case.perturbed()
    with attached(model, case.units, case.bases, case.removed) as projectors, frozen(model):
        trainer = Trainer(
            model, projectors, case.examples, case.examples[:3], settings, inputs=case.inputs, labels=case.labels
        )
        with torch.no_grad():
            for name, vector in vectors.items():
                projectors[name].v.copy_(vector)
        if objective == "task" and case.family.kind == "encoder":
            with pytest.raises(ValueError, match=f"{type(model).__name__} has no task loss"):
                trainer.accumulate(0)
            return
        loss = trainer.accumulate(0)
        assert loss > 0
        assert projectors.keys() == {unit.name for unit in case.units}
        for name, projector in projectors.items():
            gradient = projector.v.grad
            assert gradient is not None, name
            assert torch.isfinite(gradient).all(), name
            assert (gradient.abs().amax(0) > 0).any(), name
        assert all(parameter.grad is None for parameter in model.parameters())
