"""``python -m flows export``: what it writes, where, and what it refuses."""

import json
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lsp_core.export
from flows.cli import main
from lsp_core.discovery import discover_units
from lsp_core.merging import merge_model
from lsp_core.modeling import load_compressed, save_compressed

PLAIN_PROCESS = f"""
import sys
sys.path += {sorted({sysconfig.get_paths()[name] for name in ("purelib", "platlib")})}
from importlib.util import find_spec
from transformers import AutoModelForCausalLM, AutoTokenizer
assert find_spec("lsp_core") is None
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer("alpha", return_tensors="pt")
print(type(model).__name__, model.generate(**ids, max_new_tokens=8, do_sample=False).tolist())
"""

Says = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def checkpoint(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "0.4-kl"
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    units = discover_units(model)
    generator = torch.Generator().manual_seed(0)
    vectors = {unit.name: torch.randn(unit.dimension, unit.dimension // 2, generator=generator) for unit in units}
    merge_model(model, units, vectors)
    save_compressed(model, units, folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    (folder / "LICENSE").write_text("do as you like\n")
    (folder / "README.md").write_text("a compressed model\n")
    return folder


@pytest.fixture
def says(capfd: pytest.CaptureFixture[str]) -> Says:
    """Returns a function that runs ``export`` and returns its exit status and what it printed."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        capfd.readouterr()
        status = main(["export", *map(str, arguments)])
        said = capfd.readouterr()
        return status, said.out, said.err

    return run


def test_the_dense_checkpoint_runs_where_there_is_no_lsp_core(checkpoint: Path, says: Says, tmp_path: Path) -> None:
    status, out, _ = says(checkpoint, "--dense", "--output", tmp_path / "dense", "--json")
    facts = json.loads(out)
    assert status == 0
    assert (facts["architecture"], facts["dtype"], facts["output"]) == (
        "LlamaForCausalLM",
        "float32",
        str(tmp_path / "dense"),
    )
    assert 0 < facts["difference"] < facts["tolerance"] < 1e-4
    assert facts["compressed_parameters"] < facts["parameters"]
    stored = (tmp_path / "dense" / "model.safetensors").stat().st_size
    assert facts["num_bytes"] == 4 * facts["parameters"] <= stored < 1.2 * facts["num_bytes"]
    names = {path.name for path in (tmp_path / "dense").iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "LICENSE",
    }
    for name in ("tokenizer.json", "tokenizer_config.json", "LICENSE"):
        assert (tmp_path / "dense" / name).read_bytes() == (checkpoint / name).read_bytes()
    command = [sys.executable, "-S", "-E", "-c", PLAIN_PROCESS, str(tmp_path / "dense")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
    ids = AutoTokenizer.from_pretrained(checkpoint)("alpha", return_tensors="pt")
    expected = load_compressed(checkpoint).generate(**ids, max_new_tokens=8, do_sample=False)
    assert done.stdout.split("\n")[-2] == f"LlamaForCausalLM {expected.tolist()}"


def test_without_a_place_it_lands_beside_the_checkpoint(checkpoint: Path, says: Says) -> None:
    status, out, _ = says(checkpoint, "--dense", "--dtype", "bfloat16")
    output = checkpoint.with_name("0.4-kl-dense")
    assert status == 0
    assert f"output                             {output}\n" in out
    assert "bfloat16" in out
    assert AutoModelForCausalLM.from_pretrained(output).dtype == torch.bfloat16
    assert {path.name for path in checkpoint.parent.iterdir()} == {"0.4-kl", "0.4-kl-dense"}


def test_an_empty_folder_is_a_place(checkpoint: Path, says: Says, tmp_path: Path) -> None:
    (tmp_path / "dense").mkdir()
    assert says(checkpoint, "--dense", "--output", tmp_path / "dense")[0] == 0
    assert (tmp_path / "dense" / "model.safetensors").exists()


def test_mistakes_are_one_line(checkpoint: Path, tiny_model: Path, says: Says, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    link = tmp_path / "link"
    link.symlink_to(checkpoint)
    before = {path: path.stat().st_mtime_ns for path in checkpoint.iterdir()}
    for arguments, said in (
        ((checkpoint,), "say what to export: --dense"),
        ((tmp_path / "none", "--dense"), "there is no such folder"),
        ((tiny_model, "--dense", "--output", tmp_path / "new"), "a 'llama' model, not a compressed one"),
        ((tmp_path / "empty", "--dense", "--output", tmp_path / "new"), "holds no config.json"),
        ((checkpoint, "--dense", "--output", checkpoint), "is the checkpoint itself"),
        ((checkpoint, "--dense", "--output", link), "is the checkpoint itself"),
        ((checkpoint, "--dense", "--output", tmp_path / "full"), "exists and is not empty"),
        ((checkpoint, "--dense", "--output", tmp_path / "full" / "file"), "exists and is not empty"),
        ((checkpoint, "--dense", "--output", tmp_path / "new", "--dtype", "int8"), "dtype"),
    ):
        status, out, err = says(*arguments)
        assert (status, out) == (2, ""), arguments
        assert err.startswith("error: ")
        assert err.count("\n") == 1, err
        assert said in err
    assert {path.name for path in tmp_path.iterdir()} == {"full", "empty", "link"}
    assert (tmp_path / "full" / "file").read_text() == "mine"
    assert {path: path.stat().st_mtime_ns for path in checkpoint.iterdir()} == before


def test_what_differs_leaves_nothing_behind(
    checkpoint: Path, says: Says, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply = lsp_core.export.dense_weight
    monkeypatch.setattr(lsp_core.export, "dense_weight", lambda layer: 1.01 * multiply(layer))
    status, _, err = says(checkpoint, "--dense", "--output", tmp_path / "dense")
    assert status == 2
    assert "the dense model's outputs differ" in err
    assert list(tmp_path.iterdir()) == []
