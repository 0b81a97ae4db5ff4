"""What sharding the blocks refuses and leaves alone; that it trains the same is in test_distributed."""

import pytest
import torch

from lsp_core.distributed import Group
from lsp_core.sharding import local_bytes, shard_blocks
from lsp_core.units import find_blocks


def test_blocks_that_share_a_parameter_are_refused(make_model):
    model = make_model("llama")
    first, second = find_blocks(model)[:2]
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    with pytest.raises(ValueError, match=r"mlp.up_proj.weight belongs to more than one block: .* replicated"):
        shard_blocks(model, Group(rank=0, size=2))


def test_one_process_keeps_everything_and_freezes_it(make_model):
    model = make_model("llama")
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    shard_blocks(model, Group())
    assert all(torch.equal(p, expected[name]) and not p.requires_grad for name, p in model.named_parameters())
    assert local_bytes(model) == sum(p.nbytes for p in expected.values())
