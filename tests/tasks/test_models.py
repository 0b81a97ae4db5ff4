import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tasks.models import (
    ModelSource,
    check_positions,
    find_model,
    load_model,
    load_skeleton,
    resolve_device,
    resolve_precision,
)

WEIGHTS = "model.safetensors"


@pytest.fixture
def copy(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "copy"))


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def test_a_whole_folder_loads_frozen(source: ModelSource, tiny_model: Path) -> None:
    model = load_model(source)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    reference = AutoModelForCausalLM.from_pretrained(tiny_model)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, reference(ids).logits)
    skeleton = load_skeleton(source)
    assert {p.device.type for p in skeleton.parameters()} == {"meta"}
    assert [(n, p.shape) for n, p in skeleton.named_parameters()] == [(n, p.shape) for n, p in model.named_parameters()]


@pytest.mark.parametrize(
    ("removed", "said"),
    [
        (["config.json"], r"holds no config\.json: it is not a model folder"),
        ([WEIGHTS], r"holds no model\.safetensors or pytorch_model\.bin: copy the weights there"),
        (["tokenizer.json", "tokenizer_config.json"], "holds no tokenizer"),
    ],
)
def test_a_folder_that_is_not_whole(copy: Path, removed: list[str], said: str) -> None:
    for name in removed:
        (copy / name).unlink()
    with pytest.raises(ValueError, match=said):
        find_model(str(copy))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}, "fp8"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"quantization_config": {"quant_method": "not-yet-known"}}, "not-yet-known"),
        ({"quantization_config": {"load_in_8bit": True}}, "bitsandbytes"),
        ({"quantization_config": {"bits": 4}}, "a method that it does not name"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "awq"),
    ],
    ids=str,
)
@pytest.mark.parametrize("partly", [False, True])
def test_a_quantized_model_is_refused(copy: Path, given: dict[str, object], named: str, partly: bool) -> None:
    path = copy / "config.json"
    plain = json.loads(path.read_text())
    path.write_text(json.dumps(plain | given))
    said = rf"config\.json: the weights are quantized \({named}\): use the unquantized checkpoint, and quantize the m"
    with pytest.raises(ValueError, match=said):
        find_model(str(copy), partly=partly)
    path.write_text(json.dumps(plain | {"quantization_config": None}))
    assert find_model(str(copy), partly=partly).folder == str(copy)


def test_a_config_that_does_not_read(copy: Path) -> None:
    (copy / "config.json").write_text('{"model_type": "lla')
    with pytest.raises(ValueError, match=r"config\.json does not read as JSON: copy it there again"):
        find_model(str(copy))


def test_no_such_folder_and_a_revision_of_a_folder(copy: Path) -> None:
    with pytest.raises(ValueError, match="there is no such folder"):
        find_model(str(copy / "none"))
    with pytest.raises(ValueError, match=r"model\.revision='main' belongs to a hub id"):
        find_model(str(copy), revision="main")


def test_a_missing_weight_is_named_not_made_up(copy: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights(copy, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=f"the checkpoint lacks weights that LlamaForCausalLM needs: {name}"):
        load_model(find_model(str(copy)))


def test_a_weight_of_another_shape_is_named(copy: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights(copy, lambda tensors: tensors.update({name: torch.zeros(3, 5)}))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        load_model(find_model(str(copy)))


def test_a_weight_file_that_is_cut_short(copy: Path) -> None:
    (copy / WEIGHTS).write_bytes((copy / WEIGHTS).read_bytes()[:-100])
    with pytest.raises(ValueError, match="the weights cannot be read"):
        load_model(find_model(str(copy)))


def test_tied_embeddings_are_not_missing(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    change_weights(copy, lambda tensors: tensors.pop("lm_head.weight"))
    loaded = load_model(find_model(str(copy)))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_weight_that_is_not_finite_is_named(copy: Path, value: float) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    change_weights(copy, lambda tensors: tensors[name].__setitem__((3, 2), value))
    with pytest.raises(ValueError, match=f"weight {name} holds a NaN or an infinity"):
        load_model(find_model(str(copy)))


def test_the_digest_is_of_the_content(source: ModelSource, copy: Path) -> None:
    same = find_model(str(copy))
    assert (same.digest, same.tokenizer.digest) == (source.digest, source.tokenizer.digest)
    assert same.folder != source.folder

    assert find_model(str(copy), dtype="bfloat16").digest != source.digest
    assert find_model(str(copy), dtype="float32").digest == source.digest  # what auto stands for on a CPU

    data = bytearray((copy / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (copy / WEIGHTS).write_bytes(data)
    changed = find_model(str(copy))
    assert changed.digest != source.digest
    assert changed.tokenizer.digest == source.tokenizer.digest


def test_the_digest_covers_tokenizer_and_config(source: ModelSource, copy: Path) -> None:
    path = copy / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    changed = find_model(str(copy))
    assert changed.tokenizer.digest != source.tokenizer.digest
    assert changed.digest != source.digest

    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert find_model(str(copy)).digest not in (changed.digest, source.digest)


def test_the_dtype_that_auto_stands_for(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert find_model(str(copy)).dtype == "float32"
    assert find_model(str(copy), device="cuda").dtype == "bfloat16"
    assert load_model(find_model(str(copy), dtype="float16")).dtype == torch.float16


def test_positions_devices_and_precisions(source: ModelSource) -> None:
    skeleton = load_skeleton(source)
    check_positions(source, skeleton, 64, "calibration.sequence_length")
    with pytest.raises(ValueError, match=r"calibration\.sequence_length=65 exceeds the 64 positions of .*: lower it"):
        check_positions(source, skeleton, 65, "calibration.sequence_length")
    assert resolve_device("cpu") == "cpu"
    with pytest.raises(ValueError, match="device='abacus' cannot be used here"):
        resolve_device("abacus")
    assert [resolve_precision("auto", device) for device in ("cpu", "cuda:1", "mps")] == [
        "float64",
        "float64",
        "float32",
    ]
    assert resolve_precision("float32", "cpu") == "float32"
