"""``benchmark decode`` from the command line; how fast anything is, is not tested here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from flows.benchmark_commands import BenchmarkDecode
from flows.benchmark_decode import settings_of
from flows.cli import main
from lsp_core.decode_settings import DecodeSettings
from lsp_core.named_shapes import SHAPES

ROUNDS = ["--rounds", "2", "--tokens", "1", "--device", "cpu"]


@pytest.fixture(autouse=True)
def short_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lsp_core.decode_step.COPY_BYTES", {"cpu": 1 << 20})


@pytest.fixture
def shape(tmp_path: Path) -> str:
    path = tmp_path / "tiny.json"
    LlamaConfig(
        hidden_size=24,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=37,
        max_position_embeddings=16,
    ).to_json_file(path)
    return str(path)


def test_every_arm_of_every_cell_is_measured(shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "decode.json"
    lists = ["--context", "8,20", "--batch", "1,2", "--ratio", "0.3,0.7", "--dtype", "float32,bfloat16"]
    assert main(["benchmark", "decode", shape, *lists, *ROUNDS, "--output", str(output), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads(output.read_text())
    assert list(output.parent.iterdir()) == [output]
    assert result.keys() >= {"device", "threads", "torch", "transformers", "notes", "ranks", "cells"}
    assert any("context 20 lies beyond the 16 positions" in note for note in result["notes"])
    cells = {(cell["dtype"], cell["batch"], cell["context"]): cell for cell in result["cells"]}
    assert len(cells) == len(result["cells"]) == 8
    for (dtype, batch, context), cell in cells.items():
        arms = {(arm["name"], arm["ratio"]): arm for arm in cell["arms"]}
        assert len(arms) == 2 + 2 * 12
        measured = {key: arm for key, arm in arms.items() if not key[0].endswith("-tuned")}
        assert all("GPU" in arm["reason"] for key, arm in arms.items() if key not in measured)
        dense = measured["dense", None]
        size = {"float32": 4, "bfloat16": 2}[dtype]
        assert dense["cache_bytes"] == 2 * 2 * batch * 2 * (context + 1) * 6 * size
        for (name, ratio), arm in measured.items():
            assert arm["reason"] is None
            speed = arm["tokens_per_second"]
            assert 0 < speed["lower"] <= speed["median"] <= speed["upper"]
            assert arm["byte_bound"] == dense["step_bytes"] / arm["step_bytes"]
            seconds = arm["seconds_per_step"]
            share = arm["step_bytes"] / seconds / cell["copy_bytes_per_second"]
            assert arm["bandwidth_share"] == pytest.approx(share, rel=1e-12)
            assert arm["speedup"].keys() == (
                set() if name == "dense" else {"dense", "untied", "untied-ready", "ours-ready"} - {name}
            )
            if ratio is not None:
                assert abs(arm["realized_ratio"] - ratio) < 0.05
                assert arm["weights_bytes"] < dense["weights_bytes"]
        assert measured["latent-rebuilt", 0.7]["cache_bytes"] < dense["cache_bytes"]


def test_the_table_names_what_was_not_measured(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--context", "8", "--ratio", "0.5", "--arms", "dense,dense-tuned,ours"]
    assert main(["benchmark", "decode", shape, *few, *ROUNDS]) == 0
    printed = capsys.readouterr().out
    assert "| ours |" in printed
    assert "Not measured: dense-tuned (torch.compile max-autotune and a CUDA graph need a GPU)." in printed
    assert "untied" not in printed.split("|---:")[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonesuch"], "the shapes are llama-810m"),
        (["llama-810m", "--ratio", "1.5"], "less than 1"),
        (["llama-810m", "--context", "1"], "contexts: 1 is too few"),
        (["llama-810m", "--arms", "theirs"], "no 'theirs'"),
        (["llama-810m", "--dtype", "int4"], "no 'int4'"),
        (["opt-125m", "--context", "2048", "--ratio", "0.5"], "ask for at most 2047"),
        (["llama-810m", "--ratio", "0.9999", "--context", "8"], "cannot be reached"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["benchmark", "decode", *arguments, *ROUNDS]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert words in error


def test_a_folder_as_output_is_refused_before_anything_is_measured(
    shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["benchmark", "decode", shape, "--context", "8", *ROUNDS, "--output", str(tmp_path)]) == 2
    assert f"error: output: {tmp_path} is a folder" in capsys.readouterr().err


def test_a_config_with_a_bad_value_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.json"
    path.write_text('{"model_type": "llama", "hidden_size": "x"}')
    assert main(["benchmark", "decode", str(path), *ROUNDS]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"error: {path} is no config of a model that transformers knows: ")
    assert "hidden_size" in error


def test_the_command_line_has_the_defaults_and_the_shapes_of_lsp_core() -> None:
    fields = BenchmarkDecode.model_fields
    options = {name: field.default for name, field in fields.items() if name not in ("model", "json_", "output")}
    assert settings_of(options | {"model": "x"}) == DecodeSettings(model="x")
    assert all(name in (fields["model"].description or "") for name in SHAPES)


def test_it_runs_where_only_torch_and_transformers_are(shape: str) -> None:
    absent = ["prefect", "pydantic", "zarr", "fsspec", "xarray", "psutil", "flows", "tasks", "storage"]
    script = (
        "import sys\n"
        f"for name in {absent}:\n    sys.modules[name] = None\n"
        "from lsp_core import decode_step\n"
        "from lsp_core.decode_benchmark import main\n"
        "decode_step.COPY_BYTES = {'cpu': 1 << 20}\n"
        f"raise SystemExit(main([{shape!r}, '--context', '8', '--ratio', '0.5', '--json', *{ROUNDS}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["cells"]) == 1
