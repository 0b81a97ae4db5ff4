"""Checkpoints written and read in every way that transformers offers: the same bits, whatever the route."""

import copy
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from lsp_core.modeling import load_compressed
from lsp_core.modeling_lsp import CLASSES, LSPConfig, class_name
from tests.lsp_core.products import AUTO, factored_layers, outputs, product, save


def load(family, folder, **options):
    return getattr(transformers, AUTO[family]).from_pretrained(folder, **options)


@pytest.mark.parametrize("family", ["llama", "qwen3", "t5", "vit", "bert"])
def test_saved_twice_and_from_the_copy_gives_the_same_bytes(tmp_path, family):
    save(tmp_path / "0", family)
    loaded = load(family, tmp_path / "0")
    loaded.save_pretrained(tmp_path / "1")
    loaded.save_pretrained(tmp_path / "2")
    load(family, tmp_path / "2").save_pretrained(tmp_path / "3")
    files = [{path.name: path.read_bytes() for path in (tmp_path / copy).iterdir()} for copy in "0123"]
    assert files[0] == files[1] == files[2] == files[3]
    assert {"model.safetensors", "config.json", "modeling_lsp.py"} <= files[0].keys()


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_a_checkpoint_in_shards(tmp_path, family):
    """Also as ``load_compressed`` reads it, and saved again, which for any model may put a tensor in another shard."""
    model, case = save(tmp_path, family, max_shard_size="20KB")
    shards = [load_file(path) for path in tmp_path.glob("*.safetensors")]
    assert len(shards) > 3
    parameters = sum(tensor.numel() for shard in shards for tensor in shard.values())
    assert parameters == sum(parameter.numel() for parameter in model.parameters())
    expected = outputs(case, model, model)
    for loaded in (load(family, tmp_path), load_compressed(tmp_path)):
        assert torch.equal(outputs(case, loaded, loaded), expected)
    loaded.save_pretrained(tmp_path / "1", max_shard_size="20KB")
    load(family, tmp_path / "1").save_pretrained(tmp_path / "2", max_shard_size="20KB")
    for path in (tmp_path / "1").iterdir():
        assert path.read_bytes() == (tmp_path / "2" / path.name).read_bytes()
    next(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises((OSError, ValueError)):
        load(family, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "t5", "vit"])
def test_another_dtype_is_that_of_every_parameter_that_the_dense_model_has_in_it(tmp_path, family, dtype):
    """T5 keeps its last layers in float32 where the rest is float16, factored or not."""
    model, case = save(tmp_path / "compressed", family)
    case.model.save_pretrained(tmp_path / "dense")
    loaded, dense = load(family, tmp_path / "compressed", dtype=dtype), load(family, tmp_path / "dense", dtype=dtype)
    assert loaded.dtype == loaded.model.dtype == loaded.config.dtype == loaded.config.base_config.dtype == dtype
    for name, parameter in model.named_parameters():
        layer = name.removeprefix("model.").partition(".input_factor")[0].partition(".output_factor")[0]
        names = [other for other, _ in dense.named_parameters() if other in (layer, f"{layer}.weight")]
        assert loaded.get_parameter(name).dtype == dense.get_parameter(names[0]).dtype, name
        assert torch.equal(loaded.get_parameter(name), parameter.to(loaded.get_parameter(name).dtype))
    assert outputs(case, loaded, loaded).dtype == dtype


@pytest.mark.parametrize("family", ["llama", "t5", "vit", "bert"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_attention_asked_for_is_that_of_the_base_model(tmp_path, family, attention):
    save(tmp_path, family)
    loaded = load(family, tmp_path, attn_implementation=attention)
    parts = [part for part in loaded.modules() if hasattr(part, "config")]
    assert len(parts) > 3
    assert {part.config._attn_implementation for part in parts} == {attention}
    other = {"eager": "sdpa", "sdpa": "eager"}[attention]
    loaded.set_attn_implementation(other)
    assert {part.config._attn_implementation for part in parts} == {other}


def halves(model: nn.Module, elsewhere: str) -> dict[str, str]:
    """Returns a device map that puts the second block of the first stack ``elsewhere`` and all else on the CPU."""
    stack = next(name for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part) > 1)
    places = {f"{stack}.{index}": "cpu" for index in range(len(model.get_submodule(stack)))}
    places[f"{stack}.1"] = elsewhere
    while stack:
        stack, _, last = stack.rpartition(".")
        beside = {name for name, _ in model.get_submodule(stack).named_children()} - {last}
        places |= {f"{stack}.{name}".lstrip("."): "cpu" for name in beside}
    return places


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "t5", "vit", "bert"])
def test_device_maps(tmp_path, family):
    """One device, whatever is free, and a map that leaves a block on the disk, read at every pass."""
    model, case = save(tmp_path / "saved", family)
    expected = outputs(case, model, model)
    for places in ("cpu", "auto"):
        loaded = load(family, tmp_path / "saved", device_map=places)
        assert torch.equal(outputs(case, loaded, loaded), expected)
    loaded = load(family, tmp_path / "saved", device_map=halves(model, "disk"), offload_folder=tmp_path / "disk")
    away = {name for name, parameter in loaded.named_parameters() if parameter.device.type == "meta"}
    block = next(name for name, place in loaded.hf_device_map.items() if place == "disk")
    assert away == {name for name, _ in model.named_parameters() if name.startswith(f"{block}.")}
    assert any("factor" in name for name in away)
    for _ in range(2):
        assert torch.equal(outputs(case, loaded, loaded), expected)
    if case.family.generates:
        prompt, options = case.examples[:2, :4], {"max_new_tokens": 3, "do_sample": False}
        assert torch.equal(loaded.generate(prompt, **options), model.generate(prompt, **options))


def test_a_model_too_large_for_the_memory_given_is_offloaded_with_its_shared_factors(tmp_path):
    model, case = save(tmp_path / "saved", "llama", max_shard_size="20KB")
    loaded = load(
        "llama", tmp_path / "saved", device_map="auto", max_memory={"cpu": "100KB"}, offload_folder=tmp_path / "disk"
    )
    assert set(loaded.hf_device_map.values()) == {"cpu", "disk"}
    assert torch.equal(outputs(case, loaded, loaded), outputs(case, model, model))


@pytest.mark.parametrize("places", [{"": "cpu"}, "halves"])
@pytest.mark.parametrize(
    "factor", ["q_proj.input_factor.linear", "v_proj.output_factor", "mlp.gate_proj.input_factor.linear"]
)
def test_a_factor_that_no_file_holds_is_an_error_wherever_it_belongs(tmp_path, places, factor):
    model, _ = save(tmp_path / "saved", "llama")
    weights = load_file(tmp_path / "saved" / "model.safetensors")
    name = next(name for name in weights if "layers.1." in name and name.endswith(f"{factor}.weight"))
    del weights[name]
    save_file(weights, tmp_path / "saved" / "model.safetensors", metadata={"format": "pt"})
    said = f"do not fit its config .missing: .*{re.escape(name)}"
    if places == "halves":  # what is to be read from the disk is found missing earlier, by accelerate
        places, said = halves(model, "disk"), f"{said}|is on the meta device"
    with pytest.raises(ValueError, match=said):
        load("llama", tmp_path / "saved", device_map=places, offload_folder=tmp_path / "disk")


def test_another_number_of_labels_draws_the_head_anew_where_that_is_allowed(tmp_path):
    model, _ = save(tmp_path, "vit")
    labels = model.config.num_labels + 2
    with pytest.raises(ValueError, match=r"do not fit its config \(misshapen: model\.classifier"):
        load("vit", tmp_path, num_labels=labels)
    loaded = load("vit", tmp_path, num_labels=labels, ignore_mismatched_sizes=True)
    assert loaded.model.classifier.out_features == loaded.config.num_labels == labels
    for name, parameter in model.named_parameters():
        assert "classifier" in name or torch.equal(loaded.get_parameter(name), parameter)
    weights = load_file(tmp_path / "model.safetensors")
    del weights[next(name for name in weights if "factor" in name)]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"do not fit its config \(missing: "):
        load("vit", tmp_path, num_labels=labels, ignore_mismatched_sizes=True)


def test_copies_and_casts_leave_the_original_alone():
    model, case = product("llama")
    expected = outputs(case, model, model)
    other = copy.deepcopy(model)
    assert torch.equal(outputs(case, other, other), expected)
    for name, layer in factored_layers(other).items():
        assert layer is not model.get_submodule(name)
    shared = [layer.input_factor for name, layer in factored_layers(other).items() if "layers.0.self_attn" in name][:3]
    assert len({id(factor) for factor in shared}) == 1
    other.half()
    assert {parameter.dtype for parameter in other.parameters()} == {torch.float16}
    other.to(torch.bfloat16).to("cpu")
    assert outputs(case, other, other).dtype == torch.bfloat16
    with torch.no_grad():
        next(other.parameters()).zero_()
    assert torch.equal(outputs(case, model, model), expected)


def test_the_weights_of_a_file_can_be_put_into_a_model_strictly(tmp_path):
    """A shared factor is in the file under its first name; its second names are not missing."""
    model, case = save(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    other = CLASSES["LSPForCausalLM"](copy.deepcopy(model.config)).eval()
    assert not torch.equal(outputs(case, other, other), outputs(case, model, model))
    other.load_state_dict(weights)
    assert torch.equal(outputs(case, other, other), outputs(case, model, model))
    del weights["model.model.layers.1.self_attn.q_proj.input_factor.linear.weight"]
    with pytest.raises(RuntimeError, match=r"q_proj\.input_factor.*k_proj\.input_factor.*v_proj\.input_factor"):
        other.load_state_dict(weights)


def test_a_model_from_a_config_has_random_weights_of_the_usual_size():
    model, _ = product("llama")
    made = []
    for _ in range(2):
        torch.manual_seed(3)
        made.append(transformers.AutoModelForCausalLM.from_config(copy.deepcopy(model.config)))
    for name, parameter in made[0].named_parameters():
        assert torch.equal(parameter, made[1].get_parameter(name))
        assert parameter.shape == model.get_parameter(name).shape
        if "factor" in name:  # normal, with the config's deviation; six deviations in some hundred draws are no chance
            assert parameter.abs().max() <= 6 * model.config.initializer_range
            assert parameter.requires_grad


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_larger_vocabulary_is_saved_with_the_model(tmp_path, family):
    """GPT-2 ties its head to its embedding, the Llama here does not."""
    model, case = product(family)
    model.resize_token_embeddings(120)
    model.save_pretrained(tmp_path)
    loaded = load(family, tmp_path)
    assert loaded.config.vocab_size == loaded.config.base_config.vocab_size == 120
    assert outputs(case, loaded, loaded).shape[-1] == 120
    assert torch.equal(outputs(case, loaded, loaded), outputs(case, model, model))


def test_settings_of_the_config_reach_the_base_model(tmp_path):
    model, case = save(tmp_path, "llama")
    assert model(case.examples).past_key_values is not None
    model.config.use_cache = False
    assert model.config.base_config.use_cache is False
    assert model(case.examples).past_key_values is None
    model.config.output_hidden_states = True
    assert len(model(case.examples).hidden_states) == 1 + 3
    loaded = load("llama", tmp_path, use_cache=False, output_hidden_states=True)
    assert loaded(case.examples).past_key_values is None
    assert len(loaded(case.examples).hidden_states) == 1 + 3
    assert "use_cache" not in LSPConfig.from_pretrained(tmp_path).__dict__


def test_the_configs_of_model_and_base_keep_their_own_architectures(tmp_path):
    save(tmp_path, "llama")
    loaded = load("llama", tmp_path)
    assert loaded.config.architectures == ["LSPForCausalLM"]
    assert "LSPForCausalLM" not in (loaded.config.base_config.architectures or [])
    assert copy.deepcopy(loaded.config).to_dict() == loaded.config.to_dict()


def test_class_of_an_architecture_goes_by_its_whole_name():
    assert class_name("LlamaForCausalLM") == "LSPForCausalLM"
    assert class_name("T5ForConditionalGeneration") == "LSPForSeq2SeqLM"
    assert class_name("DeiTForImageClassificationWithTeacher") == "LSPForImageClassification"
    for other in ("", "ForCausalLM", "Llama", "BertModel", "BertForMaskedLM"):
        assert class_name(other) == "LSPModel"


def test_low_memory_load_holds_no_second_copy(tmp_path):
    """Every parameter has storage of its own, of its own size, and starts on a cache line."""
    save(tmp_path, "llama")
    loaded = load("llama", Path(tmp_path))
    for parameter in loaded.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()
        assert parameter.data_ptr() % 64 == 0
