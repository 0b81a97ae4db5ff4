"""The subcommands: options generated from the configuration models, each calling one function of ``flows``.

Nothing heavy is imported before a subcommand runs, so that ``--help`` answers at once.
"""

import os
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AliasChoices, BaseModel, Field, create_model, model_validator
from pydantic_settings import CliApp, CliImplicitFlag, CliPositionalArg, CliSubCommand

from flows.config import (
    HOST_AND_PORT,
    AblateConfig,
    AllocationMethod,
    CompressConfig,
    InitMethod,
    KVRouting,
    Objective,
    Ratio,
    cross_product,
)
from flows.evaluate_config import EvaluateConfig
from flows.printing import print_facts, print_table
from flows.server import import_prefect
from flows.settings_file import merged, read_yaml

Json = CliImplicitFlag[bool]
Bound = Annotated[float, Field(allow_inf_nan=False)]
OVERRIDES = {  # what ``ablate`` takes from the command line beside its axes, two of which have a section's name
    name: (field.annotation, field)
    for name, field in CompressConfig.model_fields.items()
    if name not in {"model", "targets", "ablate", *AblateConfig.model_fields}
}
Overrides: type[BaseModel] = create_model("Overrides", **OVERRIDES)  # type: ignore[call-overload]


class Compress(CompressConfig):
    """Compress the model of a configuration file. Every field of it can be overridden here."""

    config: CliPositionalArg[Path] = Field(description="YAML file with the configuration.")
    ratio: tuple[Ratio, ...] = Field((), description="Ratio to compress by, may be repeated; replaces targets.")
    objective: tuple[Objective, ...] = Field(
        (), description="Objective to train for, may be repeated; replaces targets."
    )

    def cli_cmd(self) -> None:
        import_prefect()
        from flows.compress import compress

        config = self.to_config()
        content = compress(config)
        print_table(content, config.output)

    def to_config(self) -> CompressConfig:
        """Returns the configuration proper, with the cross product of ratios and objectives as its targets."""
        values = {name: getattr(self, name) for name in CompressConfig.model_fields}
        if self.ratio or self.objective:
            given = self.targets if "targets" in self.model_fields_set else None
            values["targets"] = cross_product(list(self.ratio), list(self.objective), given)
        return CompressConfig.model_validate(values)


class Plan(Compress):
    """Say for every stage of a configuration whether it is in the store, why not, and what it would cost.

    Exit status 3 if a stage cannot fit into the device's memory.
    """

    device_gib: float | None = Field(
        None,
        gt=0,
        validation_alias=AliasChoices("device-gib", "device_gib"),
        description="Memory of the device, in GiB; none: as found.",
    )
    remeasure: CliImplicitFlag[bool] = Field(False, description="Measure the device's rates anew.")
    json_: Json = Field(False, alias="json", description="Print one JSON object instead of a table.")

    def cli_cmd(self) -> None:
        from flows.plan import CANNOT_FIT, plan, print_plan

        content = plan(self.to_config(), device_gib=self.device_gib, remeasure=self.remeasure)
        print_plan(content, as_json=self.json_)
        if not content["fits"]:
            raise SystemExit(CANNOT_FIT)


class Curve(Compress):
    """Say what every ratio would cost before any training, in divergence and in size; targets are left aside."""

    points: int = Field(12, ge=2, le=200, description="Ratios to measure, the last the largest that can be reached.")
    json_: Json = Field(False, alias="json", description="Print one JSON object instead of a table.")

    def cli_cmd(self) -> None:
        import_prefect()
        from flows.curve import measure_curve, print_curve

        config = self.to_config()
        print_curve(measure_curve(config, self.points), as_json=self.json_)
        if not self.json_:
            print(f"\ntable, plot and JSON: {config.output}")


class Evaluate(EvaluateConfig):
    """Evaluate one language model, dense or compressed, in a folder or on the hub. Every field can be overridden."""

    config: CliPositionalArg[Path] = Field(description="YAML file with the configuration.")
    json_: Json = Field(False, alias="json", description="Print one JSON object instead of a table.")

    def cli_cmd(self) -> None:
        import_prefect()
        from flows.deployed_evaluate import evaluate_flow, print_evaluation

        values = {name: getattr(self, name) for name in EvaluateConfig.model_fields}
        print_evaluation(evaluate_flow(EvaluateConfig.model_validate(values)), as_json=self.json_)


class Ablate(Overrides):
    """Cross some settings of a configuration file, every other one being equal, and print what each cell costs.

    An axis that is not named here or in the file's section ``ablate`` stays at the configuration's value.
    """

    config: CliPositionalArg[Path] = Field(description="YAML file with the configuration.")
    init: tuple[InitMethod, ...] = Field((), description="Order of the bases, may be repeated.")
    tie: tuple[bool, ...] = Field((), description="Whether layers that read the same tensor share a projector.")
    allocation: tuple[AllocationMethod, ...] = Field((), description="How ranks are chosen, may be repeated.")
    kv_routing: tuple[KVRouting, ...] = Field(
        (),
        validation_alias=AliasChoices("kv-routing", "kv_routing"),
        description="Ties in attention, may be repeated.",
    )
    objective: tuple[Objective, ...] = Field((), description="Objective to train for, may be repeated.")
    ratio: tuple[Ratio, ...] = Field((), description="Ratio to compress by, may be repeated.")
    json_: Json = Field(False, alias="json", description="Print one JSON object instead of a table.")

    def cli_cmd(self) -> None:
        import_prefect()
        from flows.ablate import ablate, print_ablation

        print_ablation(ablate(self.to_config()), as_json=self.json_)

    def to_config(self) -> CompressConfig:
        """Returns the file's configuration with what is given here in its place."""
        values = read_yaml(self.config)
        axes = {name: list(getattr(self, name)) for name in AblateConfig.model_fields if getattr(self, name)}
        given = self.model_dump(mode="json", include=set(OVERRIDES), exclude_unset=True)
        return CompressConfig.model_validate(merged(merged(values, given), {"ablate": axes}))


class Demo(BaseModel):
    """Compress the demo model on the text that every Python carries, and print what it cost."""

    text: Path | None = Field(None, description="Folder of text to use instead; split by a hash of each file's name.")
    retrain: CliImplicitFlag[bool] = Field(False, description="Train the demo model from nothing first; resumable.")
    vision: CliImplicitFlag[bool] = Field(
        False, description="Compress a small vision transformer on handwritten digits instead; trains it first."
    )
    output: Path = Field(Path("runs/demo"), description="Folder for report, plots, checkpoints and Prefect's database.")
    store: str = Field("runs/demo/store", description="Where artifacts are kept.")

    @model_validator(mode="after")
    def _images_of_its_own(self) -> Self:
        if self.vision and (self.text is not None or self.retrain):
            raise ValueError("demo --vision has images and a model of its own: drop --text and --retrain")
        return self

    def cli_cmd(self) -> None:
        home = Path(os.environ.setdefault("PREFECT_HOME", str((self.output / "prefect").resolve())))
        home.mkdir(parents=True, exist_ok=True)
        import_prefect()
        if self.vision:
            from flows.demo_vision import demo_vision

            demo_vision(output=self.output / "vision", store=self.store)
            return
        from flows.demo import demo

        demo(text=self.text, retrain=self.retrain, output=self.output, store=self.store)


class StoreOptions(BaseModel):
    """What every ``store`` command needs."""

    store: str = Field(".lsp", description="The store: a folder, a URI, or block://remote-file-system/NAME.")
    json_: Json = Field(False, alias="json", description="Print one JSON object instead of a table.")


class StoreList(StoreOptions):
    """List the artifacts, the newest first."""

    kind: str | None = Field(None, description="Only those of one stage.")

    def cli_cmd(self) -> None:
        from flows.upkeep import list_artifacts

        list_artifacts(self.store, self.kind, as_json=self.json_)


class StoreShow(StoreOptions):
    """Show one artifact and everything that it was made of, back to the model and the calibration text."""

    key: CliPositionalArg[str] = Field(description="Its key, or the beginning of it.")

    def cli_cmd(self) -> None:
        from flows.upkeep import show

        show(self.store, self.key, as_json=self.json_)


class StoreVerify(StoreOptions):
    """Read every byte of every artifact. What is damaged is withdrawn: the next run that needs it computes it again.

    Exit status 1 if anything is damaged.
    """

    def cli_cmd(self) -> None:
        from flows.upkeep import verify_store

        raise SystemExit(verify_store(self.store, as_json=self.json_))


class StoreGc(StoreOptions):
    """Say what nobody needs any more, and delete it with --delete."""

    last: int | None = Field(
        None,
        ge=1,
        description="Keep what this many finished runs, the newest, need. Unfinished ones are kept for 7 days.",
    )
    report: tuple[Path, ...] = Field((), description="Keep what this report.json needs, may be repeated.")
    grace_hours: float = Field(
        1.0,
        ge=0,
        validation_alias=AliasChoices("grace-hours", "grace_hours"),
        description="Keep whatever was written within these hours: a run may be under way.",
    )
    delete: CliImplicitFlag[bool] = Field(False, description="Delete it, instead of saying what would go.")

    def cli_cmd(self) -> None:
        from flows.upkeep import collect

        collect(
            self.store,
            last=self.last,
            reports=self.report,
            grace_hours=self.grace_hours,
            delete_=self.delete,
            as_json=self.json_,
        )


class StoreCommands(BaseModel):
    """Look after a store: list, show, verify, gc."""

    list_: CliSubCommand[StoreList] = Field(alias="list")
    show: CliSubCommand[StoreShow]
    verify: CliSubCommand[StoreVerify]
    gc: CliSubCommand[StoreGc]

    def cli_cmd(self) -> None:
        CliApp.run_subcommand(self)


class Efficiency(BaseModel):
    """Memory, cache and FLOPs of a model before and after compression, from its config alone."""

    model: CliPositionalArg[str] = Field(
        description="Model folder, hub id, config.json, or a shape such as llama-2-7b."
    )
    ratio: Ratio = Field(0.5, description="Share of the targeted layers' parameters to remove.")
    allocation: Literal["uniform_parameters", "uniform_rank"] = Field(
        "uniform_parameters", description="How ranks are chosen."
    )
    kv_routing: Literal["auto", "input", "output", "untied"] = Field(
        "auto",
        validation_alias=AliasChoices("kv-routing", "kv_routing"),
        description="Ties in attention, as in compress.",
    )
    device_gib: float = Field(
        95.5,
        gt=0,
        validation_alias=AliasChoices("device-gib", "device_gib"),
        description="Memory of the device, in GiB, for the longest context.",
    )
    json_: Json = Field(False, alias="json", description="Print one JSON object instead of a table.")

    def cli_cmd(self) -> None:
        from flows.efficiency import efficiency

        print_facts(
            efficiency(self.model, self.ratio, self.allocation, self.kv_routing, self.device_gib), as_json=self.json_
        )


class Export(BaseModel):
    """Write a compressed checkpoint in another form, and check that it computes the same."""

    folder: CliPositionalArg[Path] = Field(description="Folder of a compressed checkpoint.")
    dense: CliImplicitFlag[bool] = Field(
        False, description="As an ordinary dense checkpoint of the base architecture, for any runtime."
    )
    output: Path | None = Field(None, description="A new or empty folder; none: FOLDER-dense, beside the checkpoint.")
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = Field(
        None, description="Dtype of the weights; none: the checkpoint's own."
    )
    json_: Json = Field(False, alias="json", description="Print one JSON object instead of a table.")

    def cli_cmd(self) -> None:
        from flows.export import export

        facts = export(self.folder, dense=self.dense, output=self.output, dtype=self.dtype)
        print_facts(facts, as_json=self.json_)


class Check(BaseModel):
    """Say whether the figures of a finished run keep within bounds, for CI.

    Exit status 1 if one does not.
    """

    run: CliPositionalArg[str] = Field(
        description="A report.json or its folder; with --store the id or the name of a run in that store."
    )
    store: str | None = Field(None, description="The store that the run is in: a folder, a URI, or a Prefect block.")
    target: str | None = Field(None, description="Name of one target, such as 0.5-kl; none: every one.")
    max_: dict[str, Bound] = Field(
        {}, alias="max", description="Largest value of a figure, such as perplexity=20; may be repeated."
    )
    min_: dict[str, Bound] = Field(
        {}, alias="min", description="Least value of a figure, such as accuracy=0.9; may be repeated."
    )
    json_: Json = Field(False, alias="json", description="Print one JSON list instead of lines.")

    def cli_cmd(self) -> None:
        from flows.check import check

        maxima, minima = self.max_, self.min_
        raise SystemExit(
            check(self.run, store=self.store, target=self.target, maxima=maxima, minima=minima, as_json=self.json_)
        )


class Join(BaseModel):
    """Take part, on this machine, in the trainings of a flow that runs on another one, with training.num_nodes above 1.

    Exit status 1 if this machine's part of one failed, 2 if none waited there.
    """

    endpoint: CliPositionalArg[str] = Field(
        pattern=HOST_AND_PORT, description="host:port where they meet: training.rendezvous_endpoint of the flow."
    )
    num_processes: int = Field(
        1,
        ge=1,
        validation_alias=AliasChoices("num-processes", "num_processes"),
        description="Processes on this machine, one a GPU.",
    )
    wait_minutes: float = Field(
        10.0,
        gt=0,
        validation_alias=AliasChoices("wait-minutes", "wait_minutes"),
        description="End when no training has begun for so long.",
    )
    trainings: int | None = Field(None, ge=1, description="End after so many trainings; none: go on.")

    def cli_cmd(self) -> None:
        from flows.join import join

        raise SystemExit(
            join(
                self.endpoint,
                num_processes=self.num_processes,
                wait_minutes=self.wait_minutes,
                trainings=self.trainings,
            )
        )


class Versions(BaseModel):
    """Say which stages' source has changed since it was recorded; for those who change the stages.

    Exit status 1 if any has.
    """

    bump: CliImplicitFlag[bool] = Field(
        False, description="Record the source as it is and give each changed stage a new version."
    )
    same_result: CliImplicitFlag[bool] = Field(
        False,
        validation_alias=AliasChoices("same-result", "same_result"),
        description="Record the source as it is and keep the versions: the outputs are the same, by your word.",
    )
    json_: Json = Field(False, alias="json", description="Print one JSON object instead of a table.")

    def cli_cmd(self) -> None:
        from flows.versions import versions

        raise SystemExit(versions(bump=self.bump, same_result=self.same_result, as_json=self.json_))
