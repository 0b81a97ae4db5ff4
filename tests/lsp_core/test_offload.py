"""Offloaded blocks: the same bits as with the whole model in place, and one block on the device at a time."""

import logging

import pytest
import torch
from transformers import AlbertConfig, AlbertModel, LlamaConfig, LlamaForCausalLM

from lsp_core.block_grams import gather_by_blocks
from lsp_core.discovery import discover_units
from lsp_core.gram import NonFiniteError, gather_grams
from lsp_core.offload import offloaded, rest_bytes, slot_sizes
from lsp_core.sensitivity import Sensitivity
from lsp_core.units import find_blocks
from tests.contract.cases import MICRO_BATCH, prepare

CASES = [
    ("llama", torch.float32),
    ("llama", torch.bfloat16),
    ("gpt2", torch.float32),
    ("qwen3_moe", torch.float32),
    ("bert", torch.float32),
    ("t5", torch.float32),
    ("t5", torch.bfloat16),
    ("vit", torch.bfloat16),
]
CPU = torch.device("cpu")


@pytest.fixture(params=CASES, ids=lambda given: f"{given[0]}-{str(given[1]).removeprefix('torch.')}")
def case(request):
    return prepare(*request.param)


def assert_same_bits(found, expected):
    assert list(found) == list(expected)
    assert all(torch.equal(gram, expected[name]) for name, gram in found.items())


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_grams_are_the_same_bits(case, precision):
    options = {"micro_batch": MICRO_BATCH, "precision": precision, "inputs": case.inputs}
    expected = gather_grams(case.model, case.units, case.examples, **options)
    model = case.copy_model()
    with offloaded(model, "cpu"):
        assert_same_bits(gather_by_blocks(model, case.units, case.examples, home=CPU, **options), expected)


def test_divergences_are_the_same_bits(case):
    options = {"micro_batch": MICRO_BATCH, "inputs": case.inputs}
    counts = [(unit.name, count) for unit in case.units for count in (1, unit.dimension - 1)]
    model = case.copy_model()
    plain = Sensitivity(model, case.units, case.bases, case.examples, **options)
    expected = [plain.measure(*count) for count in counts] + [plain.joint(case.removed)]
    with offloaded(model, "cpu"):
        ours = Sensitivity(model, case.units, case.bases, case.examples, home=CPU, **options)
        assert [ours.measure(*count) for count in counts] + [ours.joint(case.removed)] == expected
        assert ours.stream.possible


@pytest.mark.parametrize("family", ["llama", "opt", "qwen3", "gemma2"])
def test_float64_is_the_same_bits_too(request, family):
    given = request.getfixturevalue("prepare")(family)
    options = {"micro_batch": 4}
    plain = Sensitivity(given.model, given.units, given.bases, given.tokens, **options)
    divergences = [plain.measure(unit.name, 20) for unit in given.units]
    with offloaded(given.model, "cpu"):
        assert_same_bits(
            gather_by_blocks(given.model, given.units, given.tokens, home=CPU, **options),
            gather_grams(given.model, given.units, given.tokens, **options),
        )
        ours = Sensitivity(given.model, given.units, given.bases, given.tokens, home=CPU, **options)
        assert [ours.measure(unit.name, 20) for unit in given.units] == divergences


def small(blocks=4):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=24, intermediate_size=40, num_hidden_layers=blocks, num_attention_heads=4, vocab_size=61
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False), torch.arange(3, 43).view(4, 10) % 61


def places(blocks):
    """Where each block's weights are, as the address of their storage."""
    return [{p.untyped_storage().data_ptr() for p in block.parameters()} for block in blocks]


def test_one_block_is_in_the_slot_while_it_runs_and_all_others_are_at_home():
    model, ids = small()
    blocks, seen = find_blocks(model), []
    with offloaded(model, "cpu") as offload:
        at_home = places(blocks)
        assert at_home == [{home.buffer.untyped_storage().data_ptr()} for home in offload.homes]
        for block in blocks:
            block.mlp.register_forward_pre_hook(lambda *_: seen.append(places(blocks)))
        model(input_ids=ids)
        assert places(blocks) == at_home
        (slot,) = offload._slots
        assert slot.buffer.nbytes == max(slot_sizes(model))
    there = {slot.buffer.untyped_storage().data_ptr()}
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())  # dropping one frees it
    assert seen == [[*at_home[:b], there, *at_home[b + 1 :]] for b in range(4)]


def test_the_rest_and_the_blocks_are_the_model():
    model, _ = small()
    own = [sum(p.nbytes for p in block.parameters()) for block in find_blocks(model)]
    assert rest_bytes(model) + sum(own) == sum(p.nbytes for p in model.parameters())
    padding = 256 * len(list(find_blocks(model)[0].parameters()))
    assert own[0] <= max(slot_sizes(model)) < own[0] + padding


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_a_gathered_block_moves_once_for_all_micro_batches(micro_batch):
    model, ids = small()
    units = discover_units(model)
    with offloaded(model, "cpu") as offload:
        gather_by_blocks(model, units, ids, micro_batch=micro_batch, home=CPU)
    whole, first, checks = 4, 1, 3 + 2 + 1  # a pass of one micro-batch, all through block 0, a pass from each block on
    assert offload.moves == whole + first + checks + 2  # the last block is there from its check


def test_a_weight_that_is_changed_at_home_is_changed_on_the_device():
    """The last block is still in the slot when the same pass comes again."""
    model, ids = small(1)
    with offloaded(model, "cpu") as offload, torch.inference_mode():
        weight = find_blocks(model)[0].mlp.up_proj.weight
        before, moves = model(input_ids=ids).logits, offload.moves
        assert torch.equal(model(input_ids=ids).logits, before)
        assert offload.moves == moves, "it is there already"
        weight.mul_(3)
        after = model(input_ids=ids).logits
    assert not torch.equal(after, before)
    with torch.inference_mode():
        assert torch.equal(model(input_ids=ids).logits, after)


def test_nothing_is_left_behind():
    model, ids = small()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def fail(*_):
        raise KeyError

    def run():
        with offloaded(model, "cpu"):
            model(input_ids=ids)

    handle = find_blocks(model)[2].mlp.register_forward_hook(fail)
    with pytest.raises(KeyError):
        run()
    handle.remove()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())


def test_what_two_blocks_share_stays_on_the_device():
    model, ids = small()
    first, second = find_blocks(model)[:2]
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    expected = model(input_ids=ids).logits
    with offloaded(model, "cpu") as offload:
        assert any(parameter is first.mlp.up_proj.weight for parameter in offload.outside)
        assert torch.equal(model(input_ids=ids).logits, expected)


def test_a_model_that_begins_with_a_block_is_refused():
    model, _ = small()
    children = model.model._modules
    children["embed_tokens"] = children.pop("embed_tokens")
    with (
        pytest.raises(ValueError, match=r"LlamaForCausalLM cannot be offloaded.*offload: false"),
        offloaded(model, "cpu"),
    ):
        pass


def test_where_nothing_can_be_streamed_blocks_move_around_their_forward_passes(caplog):
    torch.manual_seed(0)
    config = AlbertConfig(
        hidden_size=24,
        num_attention_heads=4,
        intermediate_size=40,
        vocab_size=61,
        embedding_size=12,
        num_hidden_layers=3,
        num_hidden_groups=1,
    )
    model, ids = AlbertModel(config).eval().requires_grad_(False), torch.arange(1, 31).view(3, 10)
    units = discover_units(model)
    expected = gather_grams(model, units, ids, micro_batch=2)
    with caplog.at_level(logging.WARNING), offloaded(model, "cpu"):
        assert_same_bits(gather_by_blocks(model, units, ids, micro_batch=2, home=CPU), expected)
    assert caplog.text.count("every pass runs the whole model") == 1


class Killed(Exception):  # noqa: N818
    """Stands in for the end of the process."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("killed", [(1,), (2, 3)])
def test_killed_and_continued_equals_uninterrupted_bit_for_bit(tmp_path, dtype, killed):
    """Killed in the block of that number, once or twice; what is through is not gathered again."""
    model, ids = small()
    model.to(dtype)
    units, blocks = discover_units(model), []

    def gather(**options):
        with offloaded(model, "cpu"):
            return gather_by_blocks(model, units, ids, micro_batch=2, home=CPU, work=tmp_path, **options)

    for number in killed:

        def progress(done, _, number=number):
            if done >= number * len(ids):
                raise Killed

        with pytest.raises(Killed):
            gather(progress=progress)
    found = gather(
        progress=lambda done, _: blocks.append(done // len(ids)), on_checkpoint=lambda: blocks.append("kept")
    )
    kept = [part for block in range(killed[-1], 4) for part in (block, block, "kept")]
    assert blocks == [*kept, 1]
    assert_same_bits(found, gather_grams(model, units, ids, micro_batch=2))
    assert_same_bits(gather(), found)


def test_names_the_layer_that_is_not_finite():
    model, ids = small()
    units = discover_units(model)
    find_blocks(model)[1].mlp.up_proj.weight[3, 5] = float("nan")
    with offloaded(model, "cpu"), pytest.raises(NonFiniteError, match=r"layers\.1\.mlp\.down_proj"):
        gather_by_blocks(model, units, ids, micro_batch=2, home=CPU)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
