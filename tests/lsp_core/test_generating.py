"""``generate`` of a compressed model, in every mode, against the base model that it wraps, merged and in memory."""

import copy
from threading import Thread

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    pipeline,
)

from tests.contract.families import VOCABULARY
from tests.lsp_core.products import merged, product, save

MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
    "no cache": {"do_sample": False, "use_cache": False},
}
STEPS = 8


def padded(case):
    """Returns a batch of three prompts of different lengths, filled up with 0 on their left, and its mask."""
    ids = case.examples[:3, :7].clone()
    mask = torch.ones_like(ids)
    mask[1, :3] = mask[2, :6] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def continued(model, inputs, **options):
    torch.manual_seed(5)
    return model.generate(**inputs, **{"max_new_tokens": STEPS} | options)


@pytest.fixture
def tokenizer():
    """A tokenizer of single bytes, as many as the models have words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCABULARY - 1]
    whole = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate([*alphabet, "<end>"])}, merges=[]))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=whole, eos_token="<end>", pad_token="<end>", padding_side="left")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "qwen3", "opt", "t5"])
def test_every_mode_gives_the_tokens_of_the_base_model(tmp_path, family, mode):
    """After a reload too. The prompts are of different lengths; the tokens are the same, not only as likely."""
    model, case = save(tmp_path, family)
    auto = AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
    base, _ = merged(family)
    expected = continued(base, padded(case), **MODES[mode])
    assert expected.shape[1] == STEPS + (1 if family == "t5" else 7)
    for compressed in (model, auto.from_pretrained(tmp_path)):
        assert torch.equal(continued(compressed, padded(case), **MODES[mode]), expected)
    if family == "llama":  # so that a mode, or a seed, that does nothing is noticed
        others = [continued(base, padded(case), **MODES[other]) for other in ("greedy", "sampling")]
        assert not torch.equal(*others)


def test_padding_on_the_left_changes_no_prompt(tmp_path):
    model, case = product("llama")
    batch = padded(case)
    together = continued(model, batch, do_sample=False)
    for row, length in enumerate([7, 4, 1]):
        alone = {name: value[row : row + 1, 7 - length :] for name, value in batch.items()}
        assert torch.equal(continued(model, alone, do_sample=False)[0, length:], together[row, 7:])


def test_a_draft_is_checked_by_the_model():
    """Speculative decoding, by a draft model and by the prompt's own n-grams: the greedy tokens."""
    model, case = product("llama")
    draft, _ = merged("llama")
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.mul_(0.95)
    prompt = {"input_ids": case.examples[:1, :7]}
    expected = continued(merged("llama")[0], prompt, do_sample=False)
    assert torch.equal(continued(model, prompt, do_sample=False, assistant_model=draft), expected)
    assert torch.equal(continued(model, prompt, do_sample=False, prompt_lookup_num_tokens=2), expected)
    assert torch.equal(
        continued(draft, prompt, do_sample=False, assistant_model=model), continued(draft, prompt, do_sample=False)
    )


def test_generation_config_is_honoured_edited_saved_and_loaded(tmp_path):
    model, case = product("llama")
    inputs = padded(case)
    model.generation_config.max_new_tokens = 3
    assert model.generate(**inputs).shape[1] == 7 + 3
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.generation_config.max_new_tokens == 3
    assert loaded.model.generation_config is loaded.generation_config
    assert loaded.generate(**inputs).shape[1] == 7 + 3
    loaded.generation_config = GenerationConfig(max_new_tokens=2)
    assert loaded.generate(**inputs).shape[1] == 7 + 2
    assert loaded.generate(**inputs, max_new_tokens=4).shape[1] == 7 + 4
    assert loaded.generate(**inputs, generation_config=GenerationConfig(max_new_tokens=5)).shape[1] == 7 + 5
    assert loaded.generation_config.max_new_tokens == 2


def test_tokens_are_streamed(tokenizer):
    model, case = product("llama")
    prompt = case.examples[:1, :7]
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    options = {"input_ids": prompt, "max_new_tokens": STEPS, "do_sample": False, "streamer": streamer}
    thread = Thread(target=model.generate, kwargs=options)
    thread.start()
    text = "".join(streamer)
    thread.join()
    expected = merged("llama")[0].generate(prompt, max_new_tokens=STEPS, do_sample=False)[0, 7:]
    assert text == tokenizer.decode(expected)


def test_pipelines_take_the_model_and_its_folder(tmp_path, tokenizer, caplog):
    model, _ = save(tmp_path, "llama")
    tokenizer.save_pretrained(tmp_path)
    prompts = ["some text", "more", "x"]
    options = {"max_new_tokens": STEPS, "do_sample": False, "batch_size": 2}
    makers = [
        {"model": merged("llama")[0], "tokenizer": tokenizer},
        {"model": copy.deepcopy(model), "tokenizer": tokenizer},
        {"model": str(tmp_path)},
    ]
    texts = [pipeline("text-generation", **maker)(prompts, **options) for maker in makers]
    assert texts[0] == texts[1] == texts[2]
    assert "not supported" not in caplog.text


def test_feature_extraction_pipeline_takes_an_encoder(tmp_path, tokenizer):
    model, _ = save(tmp_path, "bert")
    tokenizer.save_pretrained(tmp_path)
    features = pipeline("feature-extraction", model=str(tmp_path))("some text")
    with torch.no_grad():
        expected = model(**tokenizer("some text", return_tensors="pt")).last_hidden_state
    assert torch.equal(torch.tensor(features), expected)


@pytest.mark.parametrize("family", ["llama", "t5"])
@pytest.mark.parametrize("mode", ["greedy", "static cache"])
def test_every_step_is_a_call_of_the_model(family, mode):
    """Its hooks see each, and what is put in the place of its ``forward`` computes each."""
    model, case = product(family)
    expected, seen = continued(model, padded(case), **MODES[mode]), []
    handle = model.register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(continued(model, padded(case), **MODES[mode]), expected)
    assert len(seen) == STEPS
    handle.remove()
    plain = model.forward

    def other(*args, **kwargs):
        result = plain(*args, **kwargs)
        result.logits = -result.logits
        return result

    model.forward = other
    assert not torch.equal(continued(model, padded(case), **MODES[mode]), expected)
    del model.forward
    assert torch.equal(continued(model, padded(case), **MODES[mode]), expected)


def test_other_ways_to_prepare_inputs_are_taken():
    model, case = product("llama")
    expected = continued(model, padded(case), do_sample=False)

    def prepare(input_ids, **kwargs):
        return type(model).prepare_inputs_for_generation(model, (input_ids + 1) % VOCABULARY, **kwargs)

    original = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = prepare
    assert not torch.equal(continued(model, padded(case), do_sample=False), expected)
    model.prepare_inputs_for_generation = original  # as adapters leave it
    assert torch.equal(continued(model, padded(case), do_sample=False), expected)
    embedded = {
        "inputs_embeds": model.get_input_embeddings()(padded(case)["input_ids"]),
        "attention_mask": padded(case)["attention_mask"],
    }
    assert torch.equal(continued(model, embedded, do_sample=False), expected[:, 7:])


def test_arguments_that_nothing_reads_are_refused_as_by_the_base_model():
    model, case = product("llama")
    for each in (model, merged("llama")[0]):
        with pytest.raises(ValueError, match="not used by the model"):
            each.generate(**padded(case), atention_mask=None, nonsense=1)
