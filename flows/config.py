"""The configuration of a compression: one model for the flow's parameters, the YAML file and the command line."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from storage.places import check_uri

Objective = Literal["kl", "task"]
AllocationMethod = Literal["measured_kl", "uniform_parameters", "uniform_rank"]
Ratio = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]

ZERO_SHOT_TASKS = ("openbookqa", "arc_easy", "winogrande", "hellaswag", "piqa", "mathqa")


class Section(BaseModel):
    """A part of the configuration: immutable, and no key that is not listed."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)  # it may be a secret


class ModelConfig(Section):
    """The model to compress: anything that ``AutoModelForCausalLM`` loads."""

    name_or_path: str = Field(min_length=1, description="Local folder with config, weights and tokenizer, or a hub id.")
    revision: str | None = Field(
        None, description="Branch, tag or commit of a hub id; resolved to a commit and recorded."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = Field(
        "auto",
        description="Dtype to compute in; auto: the checkpoint's own (bfloat16 for float16), on a CPU float32.",
    )
    trust_remote_code: bool = Field(False, description="Run the model code that travels with the checkpoint.")


class TextSource(Section):
    """Where text comes from: a hub dataset, or a local file or folder."""

    dataset: str | None = Field(None, description="Dataset id on the hub, for instance Salesforce/wikitext.")
    config: str | None = Field(None, description="Configuration of the hub dataset, for instance wikitext-2-raw-v1.")
    split: str = Field("train", description="Split of the hub dataset.")
    revision: str | None = Field(None, description="Revision of the hub dataset; resolved to a commit and recorded.")
    path: Path | None = Field(None, description="Local .txt, .jsonl or .parquet file, or a folder of such files.")
    field: str = Field("text", min_length=1, description="Field that holds the text (hub datasets, .jsonl, .parquet).")
    separator: str = Field("\n\n", description="Text put between documents; may be a special token of the tokenizer.")

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.dataset is None) == (self.path is None):
            raise ValueError("give either dataset (hub id) or path (local file or folder), not both and not neither")
        return self


WIKITEXT = {"dataset": "Salesforce/wikitext", "config": "wikitext-2-raw-v1"}


class CalibrationConfig(Section):
    """The token blocks that Grams are gathered on and projectors are trained on."""

    text: TextSource = Field(TextSource(**WIKITEXT), description="Text to calibrate on.")
    sequences: int = Field(1024, ge=1, description="Number of sequences, drawn without overlap.")
    sequence_length: int = Field(2048, ge=2, description="Tokens a sequence, at most the model's positions.")
    seed: int = Field(0, ge=0, description="Seed of the draw.")
    checkpoint_sequences: int = Field(
        128,
        ge=1,
        description="Sequences between two checkpoints of gather and of the dense outputs; no effect on the result.",
    )


class AllocationConfig(Section):
    """How the removed directions are spread over the units."""

    method: AllocationMethod = Field(
        "measured_kl",
        description="measured_kl: greedy on the measured KL grid; uniform_parameters, uniform_rank: no grid.",
    )
    sequences: int = Field(64, ge=1, description="Sequences the KL grid is measured on, of the calibration set.")
    text: TextSource | None = Field(
        None, description="Another text to measure the grid on; none: the calibration set's own."
    )
    grid_points: int | None = Field(
        None, ge=2, le=64, description="n: removal fractions i/n are measured; none: 8, and 16 from 3B parameters on."
    )


class ValidationConfig(Section):
    """The held-out token blocks that choose the best epoch; never the test split."""

    text: TextSource | None = Field(
        None, description="Text to validate on; none: held-out sequences of the calibration text."
    )
    sequences: int = Field(64, ge=1, description="Number of sequences.")


class EvaluationConfig(Section):
    """What the dense and the compressed models are compared on."""

    text: TextSource = Field(TextSource(**WIKITEXT, split="test"), description="Test text of the perplexity.")
    max_tokens: int | None = Field(None, ge=2, description="Use at most this many tokens of the test text; none: all.")
    sequence_length: int | None = Field(
        None, ge=2, description="Tokens a window; none: the calibration's sequence length."
    )
    bos: Literal["none", "first", "every_window"] = Field(
        "first",
        description="Where a beginning-of-sequence token goes: nowhere, before the text, or before every window.",
    )
    prompt: str | None = Field(
        None, min_length=1, description="Text that every evaluated model continues, for the eye; none: no text."
    )
    prompt_tokens: int = Field(48, ge=1, description="Tokens that the prompt is continued by, the most likely ones.")
    tasks: tuple[str, ...] = Field(ZERO_SHOT_TASKS, description="lm-eval tasks, zero-shot; empty: perplexity alone.")
    task_folder: Path | None = Field(
        None, description="Folder with local lm-eval task files; they may run code, so name one you trust."
    )
    task_limit: int | None = Field(None, ge=1, description="Use at most this many examples a task; none: all.")
    task_batch_size: int = Field(8, ge=1, description="Batch size of the lm-eval tasks.")


class DiscoveryConfig(Section):
    """Which layers are compressed, and what shares a projector."""

    kv_routing: Literal["auto", "input", "output", "untied"] = Field(
        "auto",
        description="auto: tie Q, K and V on their input if equally wide, else K and V on their output; "
        "input, output: force one of the two; untied: no tie in attention.",
    )
    tie: bool = Field(True, description="Layers that read the same tensor share a projector.")
    exclude: tuple[str, ...] = Field((), description="Shell patterns of layer names that stay dense.")


class TrainingConfig(Section):
    """How the projectors are trained."""

    epochs: int = Field(10, ge=1, description="Passes over the calibration sequences at most.")
    batch_sequences: int = Field(16, ge=1, description="Sequences an optimizer step.")
    learning_rate: float | None = Field(
        None, gt=0, description="Peak learning rate; none: 1e-3 below 500M parameters, 1e-4 below 6B, 3e-5 above."
    )
    warmup_fraction: float = Field(
        0.05, ge=0, lt=1, description="Share of the steps with a linearly rising learning rate."
    )
    dropout: float = Field(0.05, ge=0, lt=1, description="Probability that a removed direction is kept for one step.")
    orthogonality: float = Field(0.05, ge=0, description="Weight of the orthogonality penalty on V.")
    modulation_epochs: float = Field(1.0, ge=0, description="Epochs over which alpha rises from 0 to 1.")
    patience: int = Field(3, ge=1, description="Stop after this many epochs without a better validation.")
    checkpoint_steps: int = Field(
        50, ge=1, description="Optimizer steps between two checkpoints of a running training."
    )
    checkpoint_minutes: float = Field(10.0, gt=0, description="A checkpoint is also written after this long.")
    seed: int = Field(0, ge=0, description="Seed of the order of the data and of the masks.")


class Target(Section):
    """One compressed model to make."""

    ratio: Ratio = Field(description="Share of the targeted layers' parameters to remove, between 0 and 1.")
    objective: Objective = Field("kl", description="kl: match the dense model (LSP); task: next-token loss (LSP-T).")
    epochs: int | None = Field(
        None, ge=1, description="Epochs for this target; none: training.epochs. A light ratio needs fewer."
    )

    @property
    def name(self) -> str:
        return f"{self.ratio:g}-{self.objective}"


class CompressConfig(Section):
    """Everything that decides a compression."""

    model: ModelConfig = Field(description="The model to compress.")
    targets: tuple[Target, ...] = Field(
        (Target(ratio=0.5),), min_length=1, description="Compressed models to make, each a ratio and an objective."
    )
    calibration: CalibrationConfig = Field(CalibrationConfig(), description="Token blocks for Grams and training.")
    discovery: DiscoveryConfig = Field(DiscoveryConfig(), description="Which layers are compressed.")
    precision: Literal["float64", "float32", "auto"] = Field(
        "float64", description="Dtype of Grams and bases; auto: float64 where the device has it, else float32."
    )
    init: Literal["whitened", "plain"] = Field(
        "whitened", description="Order of the bases: by what the layer does with its input, or by the input alone."
    )
    allocation: AllocationConfig = Field(AllocationConfig(), description="How ranks are chosen.")
    validation: ValidationConfig = Field(ValidationConfig(), description="Held-out token blocks.")
    training: TrainingConfig = Field(TrainingConfig(), description="How the projectors are trained.")
    merge_tolerance: float = Field(
        0.0, ge=0, description="Drop singular values of the projected weights up to this value; 0: merge exactly."
    )
    evaluation: EvaluationConfig = Field(EvaluationConfig(), description="What the models are compared on.")
    store: str = Field(
        ".lsp",
        min_length=1,
        description="Where artifacts are kept: a folder, a URI such as s3://bucket/path, or a Prefect block with its "
        "secrets, block://remote-file-system/NAME.",
    )
    verify: bool = Field(
        False, description="Digest every artifact, model and text file anew, instead of trusting sizes and file times."
    )
    output: Path = Field(Path("runs/compress"), description="Folder for report, plots and checkpoints.")
    device: str = Field(
        "auto", description="auto: an accelerator if there is one, else the CPU; or cpu, cuda, cuda:1, mps."
    )
    micro_batch: int = Field(
        4, ge=1, description="Sequences a forward pass; changes memory and speed, the result by rounding."
    )
    teacher_cache_gib: float = Field(
        8.0, ge=0, description="Keep the dense model's outputs on the training set in the store up to this size."
    )

    @field_validator("store")
    @classmethod
    def _no_secret(cls, store: str) -> str:
        return check_uri(store)

    @field_validator("targets")
    @classmethod
    def _no_target_twice(cls, targets: tuple[Target, ...]) -> tuple[Target, ...]:
        names = [target.name for target in targets]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"targets listed twice: {', '.join(twice)}")
        return targets

    @model_validator(mode="after")
    def _subsets_fit(self) -> Self:
        if self.allocation.text is None and self.allocation.sequences > self.calibration.sequences:
            raise ValueError(
                f"allocation.sequences={self.allocation.sequences} are drawn from calibration.sequences="
                f"{self.calibration.sequences}: lower the first, raise the second, or give allocation.text"
            )
        if self.discovery.kv_routing == "input" and not self.discovery.tie:
            raise ValueError(
                "discovery.kv_routing=input ties Q, K and V, discovery.tie=false forbids ties: drop one of the two"
            )
        return self


def cross_product(
    ratios: list[float], objectives: list[Objective], given: tuple[Target, ...] | None
) -> list[dict[str, Any]]:
    """Returns the targets that command-line ratios and objectives ask for, as plain values still to be validated.

    Where one of the two lists is empty, the values of ``given`` stand in for it; without them, kl and 0.5.
    """
    given = given or (Target(ratio=0.5),)
    ratios = ratios or list(dict.fromkeys(target.ratio for target in given))
    objectives = objectives or list(dict.fromkeys(target.objective for target in given))
    return [{"ratio": ratio, "objective": objective} for objective in objectives for ratio in ratios]
