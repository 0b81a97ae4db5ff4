"""The command line: the subcommands of ``commands``, their configuration file, and how mistakes are reported."""

import logging
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliSubCommand,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from flows.benchmark_commands import Benchmark
from flows.commands import (
    Ablate,
    Check,
    Compress,
    Curve,
    Demo,
    Efficiency,
    Evaluate,
    Export,
    Join,
    Plan,
    StoreCommands,
    Versions,
)
from flows.config import HOST_AND_PORT
from flows.server import REPORTED
from flows.settings_file import read_yaml

BAD_INPUT, INTERRUPTED = 2, 130
CONFIGURED = ("compress", "curve", "evaluate", "plan")  # the commands that read a configuration file


class YamlSource(PydanticBaseSettingsSource):
    """The values of the file that a command of ``CONFIGURED`` names, below those of the command line."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, False  # the file is read as a whole, by __call__

    def __call__(self) -> dict[str, Any]:
        for command in CONFIGURED:
            given = self.current_state.get(command)
            path = given.get("config") if isinstance(given, dict) else None
            if path is not None:
                return {command: read_yaml(Path(path))}
        return {}


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
    plan: CliSubCommand[Plan]
    curve: CliSubCommand[Curve]
    evaluate: CliSubCommand[Evaluate]
    ablate: CliSubCommand[Ablate]
    store: CliSubCommand[StoreCommands]
    demo: CliSubCommand[Demo]
    efficiency: CliSubCommand[Efficiency]
    export: CliSubCommand[Export]
    benchmark: CliSubCommand[Benchmark]
    check: CliSubCommand[Check]
    join: CliSubCommand[Join]
    versions: CliSubCommand[Versions]

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
            if not _follows(problem):
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


def _follows(problem: Any) -> bool:
    """Returns whether a list is called too short only because pydantic does not count its wrong items."""
    return bool(problem["type"] == "too_short" and len(problem["input"]) >= problem["ctx"]["min_length"])


def describe(problem: Any) -> str:
    """Returns one line that names the field, what is wrong with it, and what was given."""
    parts = [str(part) for part in problem["loc"]]
    place = ".".join(parts[1:] if len(parts) > 1 and parts[0] in Commands.model_fields else parts)
    if problem["type"] == "extra_forbidden":
        command = parts[0] if parts[0] in Commands.model_fields else "compress"
        return f"{place}: there is no such setting; `python -m flows {command} --help` lists them"
    if problem["type"] == "string_pattern_mismatch" and problem["ctx"]["pattern"] == HOST_AND_PORT:
        return f"{place}: give HOST:PORT (given: {problem['input']!r})"
    if problem["type"] == "missing":
        return f"{place}: this setting is required"
    message = str(problem["msg"]).removeprefix("Value error, ")
    hidden = place.endswith("store") or isinstance(problem["input"], dict)  # a secret; or everything there is
    return f"{place}: {message}" + ("" if hidden else f" (given: {problem['input']!r})") if place else message
