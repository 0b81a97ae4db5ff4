"""Compressed checkpoints through the Auto classes: registered by an import, or by the file that travels with them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import lsp_core.modeling_lsp
from lsp_core.export import export_dense
from lsp_core.modeling import load_compressed
from lsp_core.modeling_lsp import CLASSES, LSPConfig
from tests.lsp_core.environments import make_environment
from tests.lsp_core.products import AUTO, outputs, save

FAMILIES = ["llama", "qwen3", "gpt2", "t5", "vit", "bert"]
# Takes a folder of checkpoints, each with the inputs and the Auto class to try it with; stops at what must not be.
STRANGER = """
import json, shutil, sys
from importlib.util import find_spec
from pathlib import Path

root, held = Path(sys.argv[1]), sys.argv[2:]
if not held:
    sys.modules["lsp_core"] = None
try:
    import lsp_core
    sys.exit("lsp_core can be imported here")
except ImportError:
    pass

import torch, transformers
from safetensors.torch import load_file, save_file

if held:
    from importlib.metadata import distributions
    seen = {each.name.lower().replace("_", "-") for each in distributions()}
    assert seen == set(held), seen ^ set(held)
    strangers = ("accelerate", "datasets", "lm_eval", "lsp_kernels", "peft", "prefect", "pytest", "tasks", "zarr")
    assert not [name for name in strangers if find_spec(name)]
torch.set_num_threads(1)

def refused(load, *said):
    try:
        load()
    except (AttributeError, OSError, ValueError) as error:
        assert any(text in str(error) for text in said), error
    else:
        sys.exit(f"loaded: {said}")

for folder in sorted(path for path in root.iterdir() if path.is_dir()):
    facts = json.loads((folder / "facts.json").read_text())
    loader = getattr(transformers, facts["auto"])
    refused(lambda: loader.from_pretrained(folder), "trust_remote_code=True")
    refused(lambda: loader.from_pretrained(folder, trust_remote_code=False), "trust_remote_code=True")
    refused(lambda: transformers.AutoConfig.from_pretrained(folder), "trust_remote_code=True")
    bare = root.parent / "bare"
    shutil.copytree(folder, bare)
    (bare / "modeling_lsp.py").unlink()
    refused(lambda: loader.from_pretrained(bare, trust_remote_code=True), "modeling_lsp.py")
    config = json.loads((bare / "config.json").read_text())
    del config["auto_map"]
    (bare / "config.json").write_text(json.dumps(config))
    refused(lambda: loader.from_pretrained(bare), "`lsp`")
    shutil.rmtree(bare)
    base = getattr(transformers, config["base_architecture"])
    refused(lambda: base.from_pretrained(folder), "the model is compressed")
    wrong = transformers.AutoModelForTokenClassification
    refused(lambda: wrong.from_pretrained(folder, trust_remote_code=True), "Unrecognized configuration class")

    model = loader.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__name__ == facts["class"] and type(model).__module__.startswith("transformers_modules")
    assert transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True).model_type == "lsp"
    with torch.no_grad():
        result = model(**load_file(folder / "arguments.tensors"), **facts["constants"])
    output = result.last_hidden_state if getattr(result, "logits", None) is None else result.logits
    save_file({"output": output.contiguous()}, folder / "output.tensors")
    model.save_pretrained(folder / "again")
    loader.from_pretrained(folder / "again", trust_remote_code=True).save_pretrained(folder / "third")
"""


@pytest.mark.parametrize("family", AUTO)
def test_after_the_import_auto_classes_load_a_folder(tmp_path, family):
    model, case = save(tmp_path, family)
    loaded = getattr(transformers, AUTO[family]).from_pretrained(tmp_path)
    assert type(loaded) is type(model) is CLASSES[type(model).__name__]
    assert not loaded.training
    assert torch.equal(outputs(case, loaded, loaded), outputs(case, model, model))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(config) is LSPConfig
    assert config.hidden_size == case.model.config.hidden_size


@pytest.mark.parametrize("family", ["llama", "t5", "vit", "bert"])
def test_the_wrong_auto_class_is_an_error_that_names_the_right_one(tmp_path, family):
    model, case = save(tmp_path, family)
    architecture, right = type(case.model).__name__, type(model).__name__
    for wrong in sorted({*AUTO.values()} - {AUTO[family]}):
        with pytest.raises(
            ValueError, match=f"compresses a {architecture}: load it with {AUTO[family]} or {right}, not as LSP"
        ):
            getattr(transformers, wrong).from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        transformers.AutoModelForTokenClassification.from_pretrained(tmp_path)


@pytest.mark.parametrize("family", AUTO)
def test_the_class_of_the_base_model_does_not_fill_factored_layers_at_random(tmp_path, family):
    _, case = save(tmp_path, family)
    with pytest.raises(AttributeError, match="the model is compressed: load it after `import lsp_core`"):
        type(case.model).from_pretrained(tmp_path)
    with pytest.raises(AttributeError, match="the model is compressed"):
        type(case.model.config).from_pretrained(tmp_path)


def test_the_kind_of_problem_is_kept(tmp_path):
    model, case = save(tmp_path / "0", "vit")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "0").base_config.problem_type is None
    model.config.problem_type = "multi_label_classification"
    model.save_pretrained(tmp_path / "1")
    loaded = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "1")
    assert loaded.config.problem_type == loaded.config.base_config.problem_type == "multi_label_classification"
    labels = torch.nn.functional.one_hot(case.labels, loaded.config.num_labels).float()
    arguments = case.inputs.arguments(case.examples, model)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(outputs(case, model, model), labels)
    assert torch.equal(loaded(**arguments, labels=labels).loss, expected)


def test_an_architecture_that_transformers_lacks_is_an_error_that_says_what_to_install(tmp_path):
    save(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text()) | {"base_architecture": "FutureForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"a FutureForCausalLM, which transformers .* lacks: install the version"):
        transformers.AutoModel.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model of no class"):
        CLASSES["LSPForCausalLM"](LSPConfig())


def test_a_checkpoint_of_the_earlier_format_is_said_to_be_one(tmp_path):
    """One that names no architecture of transformers, and whose units have no roles."""
    save(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["base_architecture"], config["auto_map"]
    config |= {"architectures": ["LlamaForCausalLM"], "base_config": config["base_config"] | {"dtype": "float32"}}
    config["units"] = [{name: unit[name] for name in unit.keys() - {"roles"}} for unit in config["units"]]
    (tmp_path / "config.json").write_text(json.dumps(config))
    loads = (
        load_compressed,
        transformers.AutoConfig.from_pretrained,
        transformers.AutoModelForCausalLM.from_pretrained,
        lambda folder: export_dense(folder, tmp_path / "dense"),
    )
    for load in loads:
        with pytest.raises(ValueError, match=r"earlier format: run the merge stage again .python -m flows compress"):
            load(tmp_path)


@pytest.mark.parametrize("wording", ["the model is compressed: do as this version asks", "", None, "no_grad"])
def test_what_stands_for_the_dtype_of_the_base_may_be_worded_otherwise(tmp_path, wording):
    save(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    config["base_config"]["dtype"] = wording
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == loaded.config.base_config.dtype == torch.float32


def test_what_was_imported_is_used_where_remote_code_is_trusted_too(tmp_path):
    save(tmp_path, "llama")
    (tmp_path / "modeling_lsp.py").write_text("raise RuntimeError('the file in the folder was run')\n")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(loaded) is CLASSES["LSPForCausalLM"]
    assert type(loaded.config) is LSPConfig


def test_the_file_in_a_checkpoint_is_the_one_here(tmp_path):
    save(tmp_path, "llama")
    assert (tmp_path / "modeling_lsp.py").read_bytes() == Path(lsp_core.modeling_lsp.__file__).read_bytes()


def prepared(root: Path, family: str) -> None:
    """Saves a family's product to a folder of ``root``, with its inputs, its output, and how to load it."""
    folder = root / family
    model, case = save(folder, family)
    arguments = case.inputs.arguments(case.examples, model)
    tensors = {name: value.contiguous() for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    save_file(tensors, folder / "arguments.tensors")
    save_file({"output": outputs(case, model, model).contiguous()}, folder / "expected.tensors")
    constants = {name: value for name, value in arguments.items() if name not in tensors}
    facts = {"auto": AUTO[family], "class": type(model).__name__, "constants": constants}
    (folder / "facts.json").write_text(json.dumps(facts))


def visit(python: Path | str, tmp_path: Path, families: list[str], held: list[str]) -> None:
    """Lets another process load what this one saved, without an answer to any question; compares bits and bytes."""
    root = tmp_path / "checkpoints"
    root.mkdir()
    for family in families:
        prepared(root, family)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_"))}
    environment |= {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    finished = subprocess.run(
        [python, "-I", "-c", STRANGER, root, *held],
        env=environment,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    for folder in root.iterdir():
        output, expected = (load_file(folder / f"{name}.tensors")["output"] for name in ("output", "expected"))
        assert torch.equal(output, expected), folder.name
        for name in [path.name for path in (folder / "again").iterdir()]:
            copies = [(folder / copy / name).read_bytes() for copy in (".", "again", "third")]
            assert copies[0] == copies[1] == copies[2], name
        assert {path.name for path in (folder / "again").iterdir()} >= {"modeling_lsp.py", "model.safetensors"}


def test_a_process_without_the_package_loads_it_by_its_own_file_or_not_at_all(tmp_path):
    visit(sys.executable, tmp_path, ["llama", "bert"], [])


@pytest.mark.slow
def test_a_second_environment_with_torch_transformers_and_safetensors_alone(tmp_path):
    python, held = make_environment(tmp_path / "second", ["torch", "transformers", "safetensors"])
    visit(python, tmp_path, FAMILIES, sorted(held))
    shutil.rmtree(tmp_path / "second")
