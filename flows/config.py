"""The configuration of a compression: one model for the flow's parameters, the YAML file and the command line."""

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from flows.sources import (
    CalibrationConfig,
    EvaluationConfig,
    ImageSource,
    Section,
    TextSource,
    ValidationConfig,
    refuse_twice,
)
from storage.places import check_uri
from tasks.caching import Launch

Objective = Literal["kl", "task"]
AllocationMethod = Literal["measured_kl", "fisher", "uniform_parameters", "uniform_rank"]
InitMethod = Literal["whitened", "plain", "random"]
KVRouting = Literal["auto", "input", "output", "untied"]
Ratio = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0)]
PORT = r"(?:6553[0-5]|655[0-2]\d|65[0-4]\d\d|6[0-4]\d{3}|[1-5]?\d{1,4})"  # up to 65535
HOST_AND_PORT = rf"^[^\s:/]+:{PORT}$"


class ModelConfig(Section):
    """The model to compress: a language model, an encoder-decoder, an image classifier or an encoder."""

    name_or_path: str = Field(min_length=1, description="Local folder with config, weights and tokenizer, or a hub id.")
    revision: str | None = Field(
        None, description="Branch, tag or commit of a hub id; resolved to a commit and recorded."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = Field(
        "auto",
        description="Dtype to compute in; auto: the checkpoint's own (bfloat16 for float16), on a CPU float32.",
    )
    task: Literal["auto", "causal-lm", "seq2seq-lm", "image-classification", "encoder"] = Field(
        "auto", description="What the model is loaded as; auto: by the architecture that its config names."
    )
    trust_remote_code: bool = Field(False, description="Run the model code that travels with the checkpoint.")


class AllocationConfig(Section):
    """How the removed directions are spread over the units."""

    method: AllocationMethod = Field(
        "measured_kl",
        description="measured_kl: greedy on the measured KL grid; fisher: greedy on the diagonal Fisher's guess of it; "
        "uniform_parameters, uniform_rank: no grid.",
    )
    sequences: int = Field(64, ge=1, description="Sequences the KL grid is measured on, of the calibration set.")
    text: TextSource | None = Field(
        None, description="Another text to measure the grid on; none: the calibration set's own."
    )
    images: tuple[ImageSource, ...] = Field(
        (), description="Other images to measure the grid on; empty: the calibration set's own."
    )
    grid_points: int | None = Field(
        None, ge=2, le=64, description="n: removal fractions i/n are measured; none: 8, and 16 from 3B parameters on."
    )
    min_rank: dict[str, Annotated[int, Field(ge=1)]] = Field(
        {}, description="Least rank to keep, by shell patterns of unit or layer names; of several, the largest counts."
    )
    keep_dense: tuple[str, ...] = Field(
        (),
        description="Shell patterns of units or layers that lose nothing; the ratio counts them, unlike "
        "discovery.exclude.",
    )

    @property
    def caps(self) -> dict[str, Any]:
        """Returns the caps on single units as settings of a stage; what is not given is not said."""
        given = {"min_rank": dict(self.min_rank), "keep_dense": list(self.keep_dense)}
        return {name: value for name, value in given.items() if value}


class GroupConfig(Section):
    """Layers of one parent module that share a projector."""

    members: tuple[str, ...] = Field(
        min_length=1, description="Shell patterns of layer names; what they match is tied for each parent module."
    )
    side: Literal["input", "output"] = Field(
        description="input: they read the same tensor and share its directions; output: they share output directions."
    )


class DiscoveryConfig(Section):
    """Which layers are compressed, and what shares a projector."""

    kv_routing: KVRouting = Field(
        "auto",
        description="auto: tie Q, K and V on their input if equally wide, else K and V on their output; "
        "input, output: force one of the two; untied: no tie in attention.",
    )
    tie: bool = Field(True, description="Layers that read the same tensor share a projector.")
    include: tuple[str, ...] = Field(
        (), description="Shell patterns of layer names; only what one matches is compressed; empty: all."
    )
    exclude: tuple[str, ...] = Field((), description="Shell patterns of layer names that stay dense.")
    groups: tuple[GroupConfig, ...] = Field((), description="Layers to tie by name, whatever was discovered.")

    @property
    def arguments(self) -> dict[str, Any]:
        """Returns the settings as plain values, those without effect left out."""
        values = self.model_dump(mode="json")
        return {name: value for name, value in values.items() if value or name not in ("include", "groups")}


class TrainingConfig(Section):
    """How the projectors are trained."""

    epochs: int = Field(10, ge=1, description="Passes over the calibration sequences at most.")
    batch_sequences: int = Field(16, ge=1, description="Sequences an optimizer step.")
    epoch_sequences: int | None = Field(
        None, ge=1, description="Sequences or images an epoch, drawn anew for each; none: all."
    )
    learning_rate: Positive | tuple[Positive, ...] | None = Field(
        None,
        description="Peak learning rate; none: 1e-3 below 500M parameters, 1e-4 below 6B, 3e-5 above. Of several, each "
        "is trained with, and for every target the one that validates best is kept.",
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
    num_processes: int = Field(
        1, ge=1, description="Processes a node that train together, one a GPU; they share the batch of each step."
    )
    num_nodes: int = Field(1, ge=1, description="Nodes that train together; needs rendezvous_endpoint.")
    rendezvous_endpoint: str | None = Field(
        None,
        pattern=HOST_AND_PORT,
        description="host:port where the nodes of a training meet; none: on this machine.",
    )
    sharding: Literal["replicated", "sharded"] = Field(
        "replicated",
        description="replicated: every process holds the frozen model; sharded: each a part of every block (FSDP2).",
    )
    max_restarts: int = Field(
        3, ge=0, description="How often the processes of a training are started again after one of them died."
    )
    seed: int = Field(0, ge=0, description="Seed of the order of the data and of the masks.")

    @field_validator("learning_rate", mode="before")
    @classmethod
    def _one_rate_or_several(cls, given: Any) -> float | tuple[float, ...] | None:
        values = list(given) if isinstance(given, (list, tuple)) else [given]
        if values == [None]:
            return None
        try:
            rates = tuple(float(value) for value in values)
        except (TypeError, ValueError):
            rates = ()
        if not rates or not all(0 < rate < math.inf for rate in rates):
            raise ValueError("Input should be a number greater than 0, a list of such numbers, or null")
        refuse_twice("learning rates", [f"{rate:g}" for rate in rates])
        return rates if len(rates) > 1 else rates[0]

    @model_validator(mode="after")
    def _nodes_meet_somewhere(self) -> Self:
        if self.num_nodes > 1 and self.rendezvous_endpoint is None:
            raise ValueError(
                f"training.num_nodes={self.num_nodes} needs training.rendezvous_endpoint, the host:port where they meet"
            )
        return self

    @property
    def launch(self) -> Launch:
        """Returns on how many processes the projectors are trained, and how these find each other."""
        return Launch(**self.model_dump(include=set(Launch.model_fields)))

    @property
    def rates(self) -> tuple[float | None, ...]:
        """Returns the learning rates to train with; None is the default for the model's size."""
        return self.learning_rate if isinstance(self.learning_rate, tuple) else (self.learning_rate,)


class WorkersConfig(Section):
    """Who shares the work of gather, measure and evaluate."""

    runner: Literal["threads", "dask", "ray"] = Field(
        "threads", description="Prefect's task runner: threads of this process, or a Dask or a Ray cluster."
    )
    count: int = Field(
        1,
        ge=1,
        le=4096,
        description="Workers; 1: each stage runs as a whole, by itself. Each holds the model, and computes with as "
        "many threads as this process: set OMP_NUM_THREADS to the cores over the workers of a machine.",
    )
    address: str | None = Field(
        None, min_length=1, description="Address of a running Dask or Ray cluster; none: one on this machine."
    )

    @model_validator(mode="after")
    def _address_of_a_cluster(self) -> Self:
        if self.address is not None and self.runner == "threads":
            raise ValueError("workers.address is of a Dask or a Ray cluster: set workers.runner, or drop it")
        if self.runner != "threads" and self.count == 1:
            raise ValueError(f"workers.runner={self.runner} with workers.count=1 shares nothing out: raise the count")
        return self


class Target(Section):
    """One compressed model to make."""

    ratio: Ratio | None = Field(
        None, description="Share of the targeted layers' parameters to remove, between 0 and 1."
    )
    fit_gib: Positive | None = Field(
        None,
        description="Instead of a ratio: remove as much as makes the weights, in model.dtype, fit into so many GiB.",
    )
    max_kl: Positive | None = Field(
        None,
        description="Instead of a ratio: remove as much as keeps the KL of all cuts at once, untrained, within this "
        "many nats per token.",
    )
    objective: Objective = Field("kl", description="kl: match the dense model (LSP); task: next-token loss (LSP-T).")
    epochs: int | None = Field(
        None, ge=1, description="Epochs for this target; none: training.epochs. A light ratio needs fewer."
    )

    @model_validator(mode="after")
    def _one_amount(self) -> Self:
        if sum(amount is not None for amount in (self.ratio, self.fit_gib, self.max_kl)) != 1:
            raise ValueError("give one of ratio, fit_gib (a size) and max_kl (a divergence), not several and not none")
        return self

    @property
    def amount(self) -> str:
        """Returns how much is removed, for names of stages and folders."""
        if self.fit_gib is not None:
            return f"fit{self.fit_gib:g}GiB"
        return f"{self.ratio:g}" if self.max_kl is None else f"kl{self.max_kl:g}"

    @property
    def name(self) -> str:
        return f"{self.amount}-{self.objective}"


class AblateConfig(Section):
    """What ``ablate`` crosses; an axis without values stays at the configuration's own."""

    init: tuple[InitMethod, ...] = Field((), description="Values of init to cross.")
    tie: tuple[bool, ...] = Field((), description="Values of discovery.tie to cross.")
    allocation: tuple[AllocationMethod, ...] = Field((), description="Values of allocation.method to cross.")
    kv_routing: tuple[KVRouting, ...] = Field((), description="Values of discovery.kv_routing to cross.")
    objective: tuple[Objective, ...] = Field((), description="Objectives to cross.")
    ratio: tuple[Ratio, ...] = Field((), description="Ratios to cross.")

    @field_validator("*")
    @classmethod
    def _no_value_twice(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        refuse_twice("values", [str(value) for value in values])
        return values


class CompressConfig(Section):
    """Everything that decides a compression."""

    model: ModelConfig = Field(description="The model to compress.")
    targets: tuple[Target, ...] = Field(
        (Target(ratio=0.5),), min_length=1, description="Compressed models to make, each a ratio and an objective."
    )
    seeds: tuple[Seed, ...] = Field(
        (),
        description="Compress once for each, with calibration.seed, training.seed and init_seed set to it, and report "
        "means and standard deviations; none: once, with those three as they are.",
    )
    calibration: CalibrationConfig = Field(CalibrationConfig(), description="Token blocks for Grams and training.")
    discovery: DiscoveryConfig = Field(DiscoveryConfig(), description="Which layers are compressed.")
    precision: Literal["float64", "float32", "auto"] = Field(
        "float64", description="Dtype of Grams and bases; auto: float64 where the device has it, else float32."
    )
    init: InitMethod = Field(
        "whitened",
        description="Order of the bases: by what the layer does with its input, by the input alone, or random.",
    )
    init_seed: int = Field(0, ge=0, description="Seed of random bases.")
    allocation: AllocationConfig = Field(AllocationConfig(), description="How ranks are chosen.")
    validation: ValidationConfig = Field(ValidationConfig(), description="Held-out token blocks.")
    training: TrainingConfig = Field(TrainingConfig(), description="How the projectors are trained.")
    merge_tolerance: float = Field(
        0.0, ge=0, description="Drop singular values of the projected weights up to this value; 0: merge exactly."
    )
    evaluation: EvaluationConfig = Field(EvaluationConfig(), description="What the models are compared on.")
    ablate: AblateConfig = Field(AblateConfig(), description="What the command ablate crosses; of no effect on others.")
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
    workers: WorkersConfig = Field(WorkersConfig(), description="Who shares the work of gather, measure and evaluate.")
    offload: bool = Field(
        False,
        description="Keep the weights in host memory, one block at a time on the device; in every stage but train, "
        "fisher and decode.",
    )
    stage_timeout_minutes: Positive | None = Field(
        None, description="A stage that takes longer than this fails, its work kept; none: no limit."
    )

    @field_validator("store")
    @classmethod
    def _no_secret(cls, store: str) -> str:
        return check_uri(store)

    @field_validator("targets")
    @classmethod
    def _no_target_twice(cls, targets: tuple[Target, ...]) -> tuple[Target, ...]:
        refuse_twice("targets", [target.name for target in targets])
        return targets

    @field_validator("seeds")
    @classmethod
    def _no_seed_twice(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        refuse_twice("seeds", [str(seed) for seed in seeds])
        return seeds

    @property
    def test_length(self) -> int:
        """Returns the tokens of a test window."""
        return self.evaluation.sequence_length or self.calibration.sequence_length

    @model_validator(mode="after")
    def _subsets_fit(self) -> Self:
        own = self.allocation.text is not None or self.allocation.images
        if not own and self.allocation.sequences > self.calibration.sequences:
            raise ValueError(
                f"allocation.sequences={self.allocation.sequences} are drawn from calibration.sequences="
                f"{self.calibration.sequences}: lower the first, raise the second, or give allocation.text (or images)"
            )
        for name, part in (
            ("calibration.gram_sequences", self.calibration.gram_sequences),
            ("training.epoch_sequences", self.training.epoch_sequences),
        ):
            if part is not None and part >= self.calibration.sequences:
                raise ValueError(
                    f"{name}={part} are some of calibration.sequences={self.calibration.sequences}: lower it, or leave "
                    "it out for all"
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

    Where one of the two lists is empty, the values of ``given`` stand in for it, sizes and divergences among them;
    without them, kl and 0.5.
    """
    given = given or (Target(ratio=0.5),)
    objectives = objectives or list(dict.fromkeys(target.objective for target in given))
    amounts: list[dict[str, Any]] = [{"ratio": ratio} for ratio in ratios]
    if not ratios:
        by_amount = {target.amount: target for target in given}
        kept = {"ratio", "fit_gib", "max_kl", "epochs"}
        amounts = [target.model_dump(include=kept, exclude_none=True) for target in by_amount.values()]
    return [{**amount, "objective": objective} for objective in objectives for amount in amounts]
