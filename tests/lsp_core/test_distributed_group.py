"""What a process of a group knows without the others."""

import math

import pytest

from lsp_core.distributed import Group


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 5, 7, 16])
def test_parts_are_contiguous_cover_all_rows_and_differ_by_one_at_most(size: int, count: int) -> None:
    groups = [Group(rank=rank, size=size) for rank in range(size)]
    parts = [list(range(count))[group.part(count)] for group in groups]
    assert [row for part in parts for row in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert groups[0].largest_part(count) == max(map(len, parts)) == math.ceil(count / size)


def test_outside_torchrun_there_is_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match=r"RANK.*not set: start the processes with torchrun"):
        Group.from_environment("cpu")
