"""What the benchmark of distributed training measures, at a shape that it takes no time for."""

import dataclasses
import math

import pytest

from lsp_core.distributed_benchmark import ARMS, DistributedSettings, distributed, table

TINY = DistributedSettings(
    hidden=48, intermediate=80, blocks=2, heads=4, vocabulary=101, sequences=4, length=16, micro_batch=2, rounds=1
)
# Sums in another order change a float32 gradient by SHARE of its standard deviation at most: a generous 100 roundings
# of 1.2e-7. Adam's first steps move an entry by the learning rate in the direction of its sign, which that can turn
# where |g| is below SHARE of the deviation: a share of sqrt(2 / pi) SHARE of normally distributed entries, each then
# twice the step away. Steps after the first have as many entries more.
SHARE = 100 * 2.0**-23
TOLERANCE = (1 + TINY.steps) * math.sqrt(math.sqrt(2 / math.pi) * SHARE) * 2


@pytest.mark.slow
def test_every_arm_makes_the_same_vectors_and_is_timed():
    result = distributed(TINY)
    assert result["settings"] == dataclasses.asdict(TINY)
    assert result["threads_per_process"] == 1
    assert result["units"] == 2 * 4  # Q/K/V, O, gate/up and down of each block
    assert result["step_seconds"].keys() == result["orthonormalization_seconds"].keys() == set(ARMS)
    for arm in ARMS:
        assert 0 < result["orthonormalization_seconds"][arm] < result["step_seconds"][arm]
    assert result["speed_up"] == result["step_seconds"]["one"] / result["step_seconds"]["owned"]
    assert result["largest_relative_difference"].keys() == {"owned", "replicated"}
    assert max(result["largest_relative_difference"].values()) <= TOLERANCE
    held = result["held_bytes"]
    assert held["one"] == held["replicated"]
    assert result["held_share"] == held["owned"] / held["one"] < 0.7  # half, as nearly as the units can be shared out
    lines = table(result)
    assert "2 processes of 1 thread on cpu" in lines[0]
    assert [line.split()[0] for line in lines[2:5]] == list(ARMS)


@pytest.mark.parametrize("options", [{"processes": 1}, {"steps": 0}, {"rounds": 0}])
def test_nothing_to_compare_is_refused(options):
    with pytest.raises(ValueError, match="at least 2 processes, a step and a round"):
        DistributedSettings(**options)
