"""Rows against a list of tensors, and the bytes of caches against their tensors."""

import copy

import pytest
import torch
from transformers import DynamicCache

from lsp_core.latent_rows import SLACK, Rows, bytes_held


def test_rows_behave_as_a_list():
    """Random appends, losses at either end and changes of the batch; the room stays within its bound."""
    draw = torch.Generator().manual_seed(0)
    rows, expected = Rows(), torch.zeros(3, 0, 5)
    for step in range(300):
        count = int(torch.randint(1, 9, (), generator=draw))
        new = torch.randn(3, count, 5, generator=draw)
        rows.append(new)
        expected = torch.cat([expected, new], 1)
        choice = step % 7
        if choice == 3:
            kept = int(torch.randint(0, expected.shape[1] + 5, (), generator=draw))
            rows.keep_last(kept)
            expected = expected[:, max(expected.shape[1] - kept, 0) :]
        elif choice == 5:
            rows.drop_last(min(3, rows.length))
            expected = expected[:, : expected.shape[1] - min(3, expected.shape[1])]
        elif choice == 6:
            order = torch.randperm(3, generator=draw)
            rows.map(lambda tensor, order=order: tensor.index_select(0, order))
            expected = expected[order]
        assert rows.length == expected.shape[1]
        assert torch.equal(rows.last(rows.length), expected)
        for part in (0, 1, rows.length // 2):
            if part <= rows.length:
                assert torch.equal(rows.last(part), expected[:, expected.shape[1] - part :])
    copied = copy.deepcopy(rows)
    copied.append(torch.zeros(3, 1, 5))
    assert rows.length == expected.shape[1]
    rows.clear()
    assert rows.length == 0
    assert rows.tensor is None


def test_room_and_copies_are_bounded():
    """Ten thousand single rows: no more than a sixteenth of room, and few new tensors."""
    rows, tensors = Rows(), set()
    rows.append(torch.zeros(1, 100, 2))
    assert rows.tensor.shape[1] == 100
    for length in range(101, 10_000):
        rows.append(torch.zeros(1, 1, 2))
        tensors.add(rows.tensor.shape[1])
        assert rows.tensor.shape[1] <= length * (1 + 1 / SLACK)
    assert len(tensors) < 90  # log(100) / log(17 / 16) is 76


def test_a_window_gives_its_memory_back():
    rows = Rows()
    rows.append(torch.zeros(1, 1000, 2))
    rows.keep_last(100)
    assert rows.tensor.shape[1] == 100
    for _ in range(500):
        rows.append(torch.zeros(1, 1, 2))
        rows.keep_last(100)
        assert rows.tensor.shape[1] <= 101 + 100 // SLACK * 2 + SLACK


def test_other_batches_are_refused():
    rows = Rows()
    rows.append(torch.zeros(2, 3, 5))
    for wrong in (torch.zeros(1, 3, 5), torch.zeros(2, 3, 4)):
        with pytest.raises(ValueError, match=r"holds \(2, 3, 5\).*continue it with the same sequences, or reset it"):
            rows.append(wrong)


def test_gradients_are_not_held():
    rows = Rows()
    rows.append(torch.ones(1, 1, 2, requires_grad=True) * 2)
    rows.append(torch.ones(1, 1, 2, requires_grad=True) * 2)
    assert not rows.tensor.requires_grad


def test_bytes_of_an_ordinary_cache():
    cache = DynamicCache()
    assert bytes_held(cache) == 0
    for layer in range(3):
        cache.update(torch.zeros(2, 4, 7, 5), torch.zeros(2, 4, 7, 6), layer)
    assert bytes_held(cache) == 3 * 2 * 4 * 7 * (5 + 6) * 4
    whole = cache.layers[0].keys
    cache.layers[0].keys = whole[:, :, :1]  # a view keeps all of it
    assert bytes_held(cache) == 3 * 2 * 4 * 7 * (5 + 6) * 4
