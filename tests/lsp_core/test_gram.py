"""Grams against a double loop over layers and tokens, and sums that continue where they were."""

import logging

import pytest
import torch

from lsp_core.durable import read_checked
from lsp_core.gram import FILE, NonFiniteError, gather_grams
from lsp_core.inputs import Inputs
from lsp_core.units import weight_of

EPS = torch.finfo(torch.float64).eps


def oracle(case, ids):
    """Each unit's Gram from activations recorded one sequence at a time, outer product by outer product."""
    seen = {name: [] for unit in case.units for name in unit.members}
    handles = [
        case.model.get_submodule(name).register_forward_hook(lambda _, args, __, name=name: seen[name].append(args[0]))
        for name in seen
    ]
    with torch.no_grad():
        for row in ids:
            case.model(input_ids=row[None], use_cache=False)
    for handle in handles:
        handle.remove()
    grams = {}
    for unit in case.units:
        gram = torch.zeros(unit.dimension, unit.dimension, dtype=torch.float64)
        for name in unit.members[: 1 if unit.side == "input" else None]:
            for x in torch.cat([part.reshape(-1, part.shape[-1]) for part in seen[name]]):
                v = x if unit.side == "input" else weight_of(case.model.get_submodule(name)) @ x  # no bias
                gram += torch.outer(v.detach(), v.detach())
        grams[unit.name] = gram
    return grams


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2", "qwen3"])
@pytest.mark.parametrize("micro_batch", [1, 4])
def test_is_the_sum_of_outer_products(prepare, family, micro_batch):
    case = prepare(family)
    ids = case.tokens[:5, :7]
    grams = gather_grams(case.model, case.units, ids, micro_batch=micro_batch)
    for name, expected in oracle(case, ids).items():
        # 35 tokens, behind a forward pass of a few dozen roundings
        assert (grams[name] - expected).abs().max() <= 1e4 * EPS * expected.abs().max(), name


@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_leaves_padding_out(prepare, family, side):
    case = prepare(family)
    short, long = case.tokens[0, :4], case.tokens[1, :9]
    padding = torch.ones(5, dtype=torch.long)
    padded = torch.stack([torch.cat([padding, short] if side == "left" else [short, padding]), long])
    grams = gather_grams(case.model, case.units, padded, micro_batch=2, inputs=Inputs(padding_id=1))
    alone = [gather_grams(case.model, case.units, ids[None], micro_batch=1) for ids in (short, long)]
    for name, gram in grams.items():
        expected = alone[0][name] + alone[1][name]
        # a rotary position shifts by the padding, which float32 sines and cosines see
        assert (gram - expected).abs().max() <= 1e-5 * expected.abs().max(), name


def test_precision_is_the_accumulator(prepare):
    case = prepare("llama")
    single = gather_grams(case.model, case.units, case.tokens, micro_batch=3, precision=torch.float32)
    for name, gram in case.grams.items():
        assert single[name].dtype == torch.float32
        error = (single[name] - gram).abs().max() / gram.abs().max()
        assert 0 < error <= case.tokens.numel() * torch.finfo(torch.float32).eps


def test_leaves_nothing_behind(prepare):
    case = prepare("llama")
    case.model.train()
    steps = []
    gather_grams(
        case.model, case.units, case.tokens, micro_batch=4, progress=lambda done, all_: steps.append((done, all_))
    )
    assert steps == [(4, 6), (6, 6)]
    assert case.model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in case.model.modules())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_names_the_layer_that_is_not_finite(prepare, bad):
    case = prepare("llama")
    with torch.no_grad():
        case.model.get_submodule("model.layers.1.mlp.up_proj").weight[3, 5] = bad
    with pytest.raises(NonFiniteError, match=r"model\.layers\.1\.mlp\.down_proj"):
        gather_grams(case.model, case.units, case.tokens, micro_batch=4)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in case.model.modules())


class Killed(Exception):  # noqa: N818
    """Stands in for the end of the process."""


def gather(case, **options):
    return gather_grams(case.model, case.units, case.tokens, **{"micro_batch": 1, "checkpoint_sequences": 2} | options)


def gather_until(case, sequences, folder, **options):
    def progress(done, _):
        if done == sequences:
            raise Killed

    with pytest.raises(Killed):
        gather(case, work=folder, progress=progress, **options)


def assert_same_bits(grams, expected):
    assert grams.keys() == expected.keys()
    assert all(torch.equal(gram, expected[name]) for name, gram in grams.items())


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
@pytest.mark.parametrize("killed", [(1,), (3,), (5,), (3, 4, 5)])
def test_killed_and_continued_equals_uninterrupted_bit_for_bit(prepare, tmp_path, precision, killed):
    """6 sequences, saved after 2 and 4."""
    case = prepare("llama")
    for sequences in killed:
        gather_until(case, sequences, tmp_path, precision=precision)
    done = []
    grams = gather(case, work=tmp_path, precision=precision, progress=lambda count, _: done.append(count))
    assert done == list(range(killed[-1], 7)), "the next after 0, 2 or 4"
    assert_same_bits(grams, gather(case, precision=precision))
    assert sorted(path.name for path in tmp_path.iterdir()) == [FILE]


def test_sums_are_saved_between_micro_batches_and_not_at_the_end(prepare, tmp_path):
    case, saved = prepare("llama"), []
    for micro_batch, every in ((1, 2), (2, 3), (4, 1), (3, 100)):
        folder = tmp_path / str(micro_batch)
        gather(
            case,
            micro_batch=micro_batch,
            checkpoint_sequences=every,
            work=folder,
            on_checkpoint=lambda folder=folder: saved.append(read_checked(folder / FILE).fields["sequences"]),
        )
        saved.append("end")
    assert saved == [2, 4, "end", 4, "end", 4, "end", "end"]


def flip(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [flip, lambda path: path.write_bytes(path.read_bytes()[:-8]), lambda path: path.write_bytes(b"")],
    ids=["flipped bit", "cut short", "empty"],
)
def test_damaged_sums_are_never_continued(prepare, tmp_path, caplog, damage):
    case = prepare("llama")
    gather_until(case, 5, tmp_path)
    damage(tmp_path / FILE)
    done = []
    with caplog.at_level(logging.WARNING):
        grams = gather(case, work=tmp_path, progress=lambda count, _: done.append(count))
    assert done[0] == 1
    assert f"{tmp_path / FILE}" in caplog.text
    assert "from zero" in caplog.text
    assert_same_bits(grams, gather(case))


@pytest.mark.parametrize("foreign", ["precision", "tokens", "units", "padding"])
def test_sums_of_something_else_are_not_continued(prepare, tmp_path, caplog, foreign):
    case, options = prepare("llama"), {}
    gather_until(case, 5, tmp_path)
    if foreign == "precision":
        options["precision"] = torch.float32
    elif foreign == "tokens":
        case.tokens = case.tokens.flip(0)
    elif foreign == "units":
        case.units = case.units[:-1]
    else:
        options["inputs"] = Inputs(padding_id=int(case.tokens[0, 0]))
    with caplog.at_level(logging.WARNING):
        grams = gather(case, work=tmp_path, **options)
    assert "from zero" in caplog.text
    assert_same_bits(grams, gather(case, **options))
