import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows import cli
from flows.config import CompressConfig

CONFIG = """
model: {name_or_path: some/model}
calibration: {text: {path: text.txt}, sequences: 8, sequence_length: 16}
allocation: {sequences: 2}
targets: [{ratio: 0.3, objective: kl}]
"""


@pytest.fixture(autouse=True)
def _root_logger_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return str(path)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[CompressConfig]:
    """Collects the configurations that ``compress`` would have run."""
    seen: list[CompressConfig] = []
    monkeypatch.setattr(cli.Compress, "cli_cmd", lambda self: seen.append(self.to_config()))
    return seen


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom flows.cli import main\n"
        "try:\n    main(['compress', '--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "assert not {'torch', 'transformers', 'prefect', 'zarr'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    words = " ".join(done.stdout.split())
    assert "--training.epochs int Passes over the calibration sequences at most. (default: 10)" in words
    assert "--calibration.sequences int" in words


@pytest.mark.parametrize("command", ["compress", "demo", "efficiency", "export", "benchmark"])
def test_every_subcommand_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    assert end.value.code == 0
    assert command in capsys.readouterr().out


def test_ratios_and_objectives_replace_the_targets(config_file: str, started: list[CompressConfig]) -> None:
    arguments = [
        "compress",
        config_file,
        "--ratio",
        "0.5",
        "--ratio",
        "0.7",
        "--objective",
        "kl",
        "--objective",
        "task",
    ]
    assert cli.main(arguments) == 0
    assert [target.name for target in started[0].targets] == ["0.5-kl", "0.7-kl", "0.5-task", "0.7-task"]


def test_one_of_the_two_keeps_the_other_of_the_file(config_file: str, started: list[CompressConfig]) -> None:
    assert cli.main(["compress", config_file, "--objective", "task"]) == 0
    assert [target.name for target in started[0].targets] == ["0.3-task"]


def test_the_command_line_overrides_the_file(config_file: str, started: list[CompressConfig]) -> None:
    overrides = ["--training.epochs", "3", "--calibration.text.separator", "<|endoftext|>", "--discovery.tie", "false"]
    overrides += ["--training.learning_rate", "1e-4", "--evaluation.tasks", "[]", "--output", "elsewhere"]
    overrides += ["--allocation.grid_points", "null"]
    assert cli.main(["compress", config_file, *overrides]) == 0
    config = started[0]
    assert (config.training.epochs, config.training.learning_rate, config.discovery.tie) == (3, 1e-4, False)
    assert (config.evaluation.tasks, config.output, config.allocation.grid_points) == ((), Path("elsewhere"), None)
    assert config.calibration.text.path == Path("text.txt")
    assert config.calibration.text.separator == "<|endoftext|>"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ratio", "1.5"], "ratio.0: Input should be less than 1 (given: 1.5)"),
        (["--objective", "kd"], "objective.0: Input should be 'kl' or 'task'"),
        (["--training.epoch", "3"], "unrecognized arguments: --training.epoch"),
        (["--model.dtype", "int8"], "model.dtype: Input should be"),
        (["--calibration.text.dataset", "wikitext"], "either dataset (hub id) or path"),
        (["--training.num_processes", "0"], "training.num_processes: Input should be greater than or equal to 1"),
        (["--training.num_nodes", "2"], "training.num_nodes=2 needs training.rendezvous_endpoint"),
        (["--training.rendezvous_endpoint", "host:70000"], "training.rendezvous_endpoint: give HOST:PORT"),
        (["--workers.address", "tcp://localhost:1"], "workers.address is of a Dask or a Ray cluster"),
        (["--workers.runner", "ray"], "workers.count=1 shares nothing out"),
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_2(
    config_file: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compress", config_file, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert said in error


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("model: {name_or_path: m}\ntraining: {epoch: 3}", "training.epoch: there is no such setting"),
        ("targets: [{ratio: 0.5}]", "model: this setting is required"),
        ("model: {name_or_path: m}\ntargets: [{ratio: 1.5}]", "targets.0.ratio: Input should be less than 1"),
        ("model: {name_or_path: m}\ntargets: []", "targets: Tuple should have at least 1 item"),
        ("model: {name_or_path: m}\nworker: 3", "`python -m flows compress --help` lists them"),
        ("- a list", "holds no mapping of settings"),
        ("model: {", "is not YAML"),
    ],
)
def test_a_wrong_file_is_one_line_and_exit_2(
    tmp_path: Path, content: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(content)
    assert cli.main(["compress", str(path)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_missing_file_or_command_is_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compress", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml cannot be read: No such file" in capsys.readouterr().err
    assert cli.main([]) == 2
    assert "subcommand is required" in capsys.readouterr().err


def test_an_interruption_is_exit_130(
    config_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(self: cli.Compress) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.Compress, "cli_cmd", interrupted)
    assert cli.main(["compress", config_file]) == 130
    assert "the same command continues" in capsys.readouterr().err


def test_efficiency_takes_dashes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[cli.Efficiency] = []
    monkeypatch.setattr(cli.Efficiency, "cli_cmd", lambda self: seen.append(self))
    assert cli.main(["efficiency", "config.json", "--kv-routing", "untied", "--device-gib", "80", "--json"]) == 0
    assert (seen[0].kv_routing, seen[0].device_gib, seen[0].json_) == ("untied", 80, True)
