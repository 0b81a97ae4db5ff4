"""Both arms of a benchmark must compute the same thing; how fast they are is not tested here."""

import pytest

from flows.benchmark import Shape, grid, train

TINY = Shape(
    blocks=2, hidden=32, feed_forward=64, heads=4, vocabulary=503, sequences=5, length=24, check_length=9, device="cpu"
)


@pytest.mark.parametrize("benchmark", [grid, train])
def test_both_arms_agree(benchmark: object) -> None:
    assert callable(benchmark)
    result = benchmark(TINY)
    assert set(result) >= {"arms", "ratio", "memory_ratio", "max_difference", "device"}
    ours, other = result["arms"]
    assert all(arm.keys() == {"name", "seconds", "peak_bytes"} for arm in (ours, other))
    assert result["ratio"] == other["seconds"] / ours["seconds"]
    assert result["memory_ratio"] == ours["peak_bytes"] / other["peak_bytes"]
    # grid: float32 sums of some 500 terms a token, averaged; train: float64, conditioned like the QR
    assert result["max_difference"] < 1e-6
    if benchmark is grid:
        assert result["points"] == 4
        assert result["largest_kl"] > 1e-5  # the agreement is not that of zeros
