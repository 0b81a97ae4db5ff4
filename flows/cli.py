"""The command line: one subcommand a flow, its options generated from the configuration models.

Nothing heavy is imported before a subcommand runs, so that ``--help`` answers at once.
"""

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import AliasChoices, BaseModel, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliImplicitFlag,
    CliPositionalArg,
    CliSubCommand,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from flows.config import CompressConfig, Objective, Ratio, cross_product

BAD_INPUT, INTERRUPTED = 2, 130
REPORTED = (ValueError, OSError)  # an input that is wrong, a place that cannot be read or written, a hub out of reach
PREFECT_DEFAULTS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",  # its first start migrates a database
}


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


class Demo(BaseModel):
    """Compress the demo model on the text that every Python carries, and print what it cost."""

    text: Path | None = Field(None, description="Folder of text to use instead; split by a hash of each file's name.")
    retrain: CliImplicitFlag[bool] = Field(False, description="Train the demo model from nothing first; resumable.")
    output: Path = Field(Path("runs/demo"), description="Folder for report, plots, checkpoints and Prefect's database.")
    store: str = Field("runs/demo/store", description="Where artifacts are kept.")

    def cli_cmd(self) -> None:
        home = Path(os.environ.setdefault("PREFECT_HOME", str((self.output / "prefect").resolve())))
        home.mkdir(parents=True, exist_ok=True)
        import_prefect()
        from flows.demo import demo

        demo(text=self.text, retrain=self.retrain, output=self.output, store=self.store)


class Efficiency(BaseModel):
    """Memory, cache and FLOPs of a model before and after compression, from its config alone."""

    model: CliPositionalArg[str] = Field(description="Model folder, hub id, or a config.json.")
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
    json_: CliImplicitFlag[bool] = Field(False, alias="json", description="Print one JSON object instead of a table.")

    def cli_cmd(self) -> None:
        from flows.efficiency import efficiency

        print_facts(
            efficiency(self.model, self.ratio, self.allocation, self.kv_routing, self.device_gib), as_json=self.json_
        )


class Benchmark(BaseModel):
    """Time and peak memory of the method's two expensive stages against the obvious alternative, in one run."""

    what: CliPositionalArg[Literal["grid", "train"]] = Field(
        description="grid: measuring the KL grid; train: one optimizer step."
    )
    json_: CliImplicitFlag[bool] = Field(False, alias="json", description="Print one JSON object instead of a table.")

    def cli_cmd(self) -> None:
        from flows import benchmark

        print_facts({"grid": benchmark.grid, "train": benchmark.train}[self.what](), as_json=self.json_)


class YamlSource(PydanticBaseSettingsSource):
    """The values of the file that ``compress`` names, below those of the command line."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, False  # the file is read as a whole, by __call__

    def __call__(self) -> dict[str, Any]:
        given = self.current_state.get("compress")
        path = given.get("config") if isinstance(given, dict) else None
        if path is None:
            return {}
        return {"compress": read_yaml(Path(path))}


class Commands(BaseSettings):
    """Compress pretrained language models by learnable subspace projections."""

    model_config = SettingsConfigDict(
        cli_prog_name="python -m flows",
        cli_parse_args=True,
        cli_exit_on_error=False,
        cli_parse_none_str="null",
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_use_class_docs_for_groups=True,
        cli_implicit_flags=False,
        extra="forbid",
    )

    compress: CliSubCommand[Compress]
    demo: CliSubCommand[Demo]
    efficiency: CliSubCommand[Efficiency]
    benchmark: CliSubCommand[Benchmark]

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        **_: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, YamlSource(settings_cls)

    def cli_cmd(self) -> None:
        CliApp.run_subcommand(self)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns the exit status: 0, 2 for bad input, 130 for an interruption."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        CliApp.run(Commands, cli_args=sys.argv[1:] if arguments is None else arguments)
    except ValidationError as error:
        for problem in error.errors():
            print(f"error: {describe(problem)}", file=sys.stderr)
        return BAD_INPUT
    except REPORTED as error:
        print(
            f"error: {str(error).removeprefix('Error: ').removeprefix('error parsing CLI: ').rstrip()}", file=sys.stderr
        )
        return BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted: what is finished is kept, the same command continues from there", file=sys.stderr)
        return INTERRUPTED
    return 0


def describe(problem: Any) -> str:
    """Returns one line that names the field, what is wrong with it, and what was given."""
    place = ".".join(
        str(part) for part in problem["loc"] if part not in ("compress", "demo", "efficiency", "benchmark")
    )
    if problem["type"] == "extra_forbidden":
        return f"{place}: there is no such setting; `python -m flows compress --help` lists them"
    if problem["type"] == "missing":
        return f"{place}: this setting is required"
    message = str(problem["msg"]).removeprefix("Value error, ")
    return f"{place}: {message} (given: {problem['input']!r})" if place else message


def read_yaml(path: Path) -> dict[str, Any]:
    """Returns the mapping in a YAML file.

    Errors: ``ValueError`` if there is no such file, or no mapping in it.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no mapping of settings: start it with `model:`")
    return values


def import_prefect() -> None:
    """Imports Prefect with our defaults for what the environment leaves open, and with a quieter log."""
    for name, value in PREFECT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    import prefect  # noqa: F401
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    start_server()
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(worth_a_line)


def start_server() -> None:
    """Starts Prefect's temporary server, where the user's profile names none, out of the reach of Ctrl-C.

    A terminal interrupts every process of its group. The server must outlive the run, to be told how that ended.
    """
    from prefect.client.orchestration import get_client

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by the server's process
    try:
        get_client(sync_client=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def worth_a_line(record: logging.LogRecord) -> bool:
    """Drops the lines that our own repeat: the end of each task, and a user's mistake, which ``main`` reports."""
    mistake = record.exc_info is not None and isinstance(record.exc_info[1], REPORTED)
    return not mistake and not record.getMessage().startswith(("Finished in state", "Crash detected"))


def print_table(content: dict[str, Any], output: Path) -> None:
    from tasks.report import table

    print("\n" + "\n".join(table(content)) + f"\n\nreport, plots and checkpoints: {output}")


def print_facts(facts: dict[str, Any], *, as_json: bool) -> None:
    """Prints ``facts`` as one JSON object, or line by line for people."""
    if as_json:
        print(json.dumps(facts))
        return
    for name, value in facts.items():
        if isinstance(value, dict):
            print(name)
            for inner, number in value.items():
                print(f"  {inner:32} {number:,.2f}" if isinstance(number, float) else f"  {inner:32} {number}")
        elif isinstance(value, list):
            for row in value:
                print(
                    "  "
                    + "  ".join(
                        f"{key} {item:,.4g}" if isinstance(item, float) else f"{key} {item}"
                        for key, item in row.items()
                    )
                )
        else:
            print(f"{name:34} {value}")
