"""The sets of examples that a run draws: to train on, to validate on, to measure the KL grid on, and to test on."""

from dataclasses import dataclass, field, replace
from typing import Any

from flows.prepared import Prepared, Runner, mixed, transferred
from storage.manifest import ArtifactRef
from tasks.calibrate import calibrate, calibrate_test
from tasks.images import calibrate_images
from tasks.labelled import calibrate_labelled
from tasks.mixing import apportion
from tasks.text import Part

POOL = 4  # windows are drawn from the first POOL times as many as are asked for


@dataclass(frozen=True, kw_only=True)
class Test:
    """What models are tested on.

    ``transfer``: by a name, a set that a linear probe is fitted on and one that it is tested on; ``dense``: the dense
    model's evaluation, where the others are compared with its features.
    """

    examples: ArtifactRef
    transfer: dict[str, tuple[ArtifactRef, ArtifactRef]] = field(default_factory=dict)
    dense: ArtifactRef | None = None


@dataclass(frozen=True, kw_only=True)
class Sets:
    """The sets of one run."""

    training: ArtifactRef
    validation: ArtifactRef
    allocation: ArtifactRef
    test: Test

    def compared_with(self, dense: ArtifactRef) -> "Sets":
        """Returns the sets with the dense model's evaluation beside the test set."""
        return replace(self, test=replace(self.test, dense=dense))


def draw(stages: Runner, prepared: Prepared, test: Test) -> Sets:
    """Describes the stages that draw every set but the test sets, which depend on no seed."""
    return Sets(
        training=calibration_examples(stages, prepared),
        validation=validation_examples(stages, prepared),
        allocation=allocation_examples(stages, prepared),
        test=test,
    )


def calibration_examples(stages: Runner, prepared: Prepared) -> ArtifactRef:
    """Returns the sequences that Grams are gathered on and projectors are trained on."""
    count = prepared.config.calibration.sequences
    return _draw(stages, prepared, "training", "calibration", _calibration_part(prepared), take=count, among=count)


def validation_examples(stages: Runner, prepared: Prepared) -> ArtifactRef:
    """Returns held-out sequences, of the calibration text where no other is given."""
    count = prepared.config.validation.sequences
    role, part = ("validation", "all") if "validation" in prepared.roles else ("calibration", "validation")
    return _draw(stages, prepared, "validation", role, part, take=count, among=count)


def allocation_examples(stages: Runner, prepared: Prepared) -> ArtifactRef:
    """Returns the sequences that the KL grid is measured on: some of the calibration set, or of a text of their own."""
    count = prepared.config.allocation.sequences
    if "allocation" in prepared.roles:
        return _draw(stages, prepared, "allocation", "allocation", "all", take=count, among=count)
    among = prepared.config.calibration.sequences
    return _draw(stages, prepared, "allocation", "calibration", _calibration_part(prepared), take=count, among=among)


def test_examples(stages: Runner, prepared: Prepared) -> Test:
    """Returns what models are tested on."""
    if prepared.model.processor is not None:
        examples = _images(stages, prepared, "test", "test", "all", take=None)
    else:
        examples = stages.run(
            calibrate_test,
            "test",
            text=prepared.texts["test"],
            tokenizer=prepared.model.own_tokenizer,
            length=prepared.config.test_length,
            max_tokens=prepared.config.evaluation.max_tokens,
            **(_packing(prepared) or {"bos": prepared.config.evaluation.bos}),
        )
    return Test(examples=examples, transfer={name: _transfer(stages, prepared, name) for name in prepared.transfer})


def _transfer(stages: Runner, prepared: Prepared, name: str) -> tuple[ArtifactRef, ArtifactRef]:
    def one(purpose: str) -> ArtifactRef:
        role, label = transferred(name, purpose), f"{name} {purpose}"
        if prepared.model.processor is not None:
            return _images(stages, prepared, label, role, "all", take=None)
        return stages.run(
            calibrate_labelled,
            label,
            text=prepared.texts[role],
            tokenizer=prepared.model.own_tokenizer,
            length=prepared.config.test_length,
        )

    return one("train"), one("test")


def _images(stages: Runner, prepared: Prepared, label: str, role: str, part: Part, *, take: int | None) -> ArtifactRef:
    return stages.run(
        calibrate_images,
        label,
        images=prepared.images[role],
        processor=prepared.model.processor,
        take=take,
        part=part,
        seed=prepared.config.calibration.seed if take is not None else 0,
    )


def _draw(
    stages: Runner, prepared: Prepared, label: str, role: str, part: Part, *, take: int, among: int
) -> ArtifactRef:
    """Returns ``take`` sequences of a text, or of the calibration's mix: some of those that ``among`` would give."""
    calibration = prepared.config.calibration
    if prepared.model.processor is not None:
        return _images(stages, prepared, label, role, part, take=take)
    if role == "calibration" and calibration.mix:
        texts = [prepared.texts[mixed(index)] for index in range(len(calibration.mix))]
        pools = [POOL * count for count in apportion(among, calibration.shares)]
        drawn = {"text": texts, "take": apportion(take, calibration.shares), "pool": pools}
    else:
        drawn = {"text": prepared.texts[role], "take": take, "pool": POOL * among}
    return stages.run(
        calibrate,
        label,
        tokenizer=prepared.model.own_tokenizer,
        length=calibration.sequence_length,
        part=part,
        seed=calibration.seed,
        **drawn,
        **_packing(prepared),
    )


def _packing(prepared: Prepared) -> dict[str, Any]:
    """Returns how sequences are made, where it is not the usual way: an encoder reads documents."""
    return {"packing": "documents"} if prepared.model.task == "encoder" else {}


def _calibration_part(prepared: Prepared) -> Part:
    return "all" if "validation" in prepared.roles else "calibration"
