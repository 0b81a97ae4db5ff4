"""A model run from one block on against the whole model, bit for bit; hidden states may wait elsewhere."""

import pytest
import torch

from lsp_core.gram import evaluating
from lsp_core.streaming import Stream
from lsp_core.units import find_blocks
from tests.contract.cases import MICRO_BATCH, prepare

FAMILIES = ["llama", "gpt2", "t5", "vit"]


def opened(case, *, home=None):
    model = case.copy_model()
    batches = list(case.examples.split(MICRO_BATCH))
    stream = Stream(model, batches, lambda batch: model.base_model(**case.inputs.arguments(batch, model))[0], home=home)
    return model, stream


@pytest.mark.parametrize("home", [None, torch.device("cpu")])
@pytest.mark.parametrize("family", FAMILIES)
def test_from_every_block_on_the_outputs_are_those_of_the_whole(family, home):
    model, stream = opened(prepare(family, torch.float32), home=home)
    with torch.inference_mode(), evaluating(model):
        whole = [stream.outputs(batch) for batch in stream.batches]
        for index in range(len(stream.batches)):
            stream.begin(index, whole=index == 0)
        for block in range(len(stream.blocks)):
            stream.advance_to(block)
            assert stream.possible
            assert all(torch.equal(stream.from_block(index), expected) for index, expected in enumerate(whole))
    assert not any("forward" in module.__dict__ or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_passing_on_runs_each_block_once_for_each_micro_batch(family):
    case = prepare(family, torch.float32)
    model, stream = opened(case)
    called, told = [], []
    with torch.inference_mode(), evaluating(model):
        for index in range(len(stream.batches)):
            stream.begin(index, whole=index == 0)
        for number, block in enumerate(find_blocks(model)):
            stream.advance_to(number)
            called.clear()
            layer = next(m for m in block.modules() if isinstance(m, (torch.nn.LayerNorm, torch.nn.Linear)))
            handle = layer.register_forward_hook(lambda *_: called.append(1))
            stream.pass_on(told.append)
            handle.remove()
            assert len(called) == len(stream.batches)
        assert stream.block == len(stream.blocks)
    assert told == [*range(len(stream.batches))] * len(stream.blocks)


def test_going_back_is_an_error():
    model, stream = opened(prepare("llama", torch.float32))
    with torch.inference_mode(), evaluating(model):
        for index in range(len(stream.batches)):
            stream.begin(index)
        stream.advance_to(1)
        with pytest.raises(ValueError, match="block 0 comes before block 1"):
            stream.advance_to(0)
