"""Means and standard deviations over seeds."""

import numpy as np
import pytest

from tasks.summary import by_target, combined, spread, summarize


def result(ratio: float, objective: str, perplexity: float, **changes: object) -> dict[str, object]:
    tasks = {"easy": {"acc": perplexity / 64, "acc_norm": 0.5, "converged": True}}
    return {"ratio": ratio, "objective": objective, "perplexity": perplexity, "tasks": tasks} | changes


def test_figures_are_put_together_by_target() -> None:
    values = {
        ("kl", 0): 20.0,
        ("kl", 1): 22.0,
        ("kl", 2): 27.0,
        ("task", 0): 18.0,
        ("task", 1): 18.5,
        ("task", 2): 17.0,
    }
    reports = [
        (seed, {"dense": {}, "results": [result(0.7, o, values[o, seed], removed={"a": 3}) for o in ("kl", "task")]})
        for seed in range(3)
    ]
    content = combined(reports)
    assert content["seeds"] == [0, 1, 2]
    assert [(one["objective"], one["seed"]) for one in content["results"]] == [
        (objective, seed) for seed in range(3) for objective in ("kl", "task")
    ]
    for row, objective in zip(content["summary"], ("kl", "task"), strict=True):
        sample = np.array([values[objective, seed] for seed in range(3)])
        assert (row["ratio"], row["objective"]) == (0.7, objective)
        assert set(row["mean"]) == {"perplexity", "tasks"}
        assert row["mean"]["perplexity"] == pytest.approx(sample.mean(), rel=1e-14)
        assert row["std"]["perplexity"] == pytest.approx(sample.std(ddof=1), rel=1e-14)
        assert row["mean"]["tasks"]["easy"]["acc"] == pytest.approx(sample.mean() / 64, rel=1e-14)
        assert row["std"]["tasks"]["easy"] == {"acc": pytest.approx(sample.std(ddof=1) / 64, rel=1e-14), "acc_norm": 0}


def test_one_run_is_as_it_is() -> None:
    content = {"results": [result(0.5, "kl", 20.0)]}
    assert combined([(3, content)]) is content


def test_ratios_that_a_divergence_allowed_are_one_target() -> None:
    results = [result(ratio, "kl", 20.0, max_kl=bound) for bound in (0.1, 0.2) for ratio in (0.31, 0.33)]
    assert [[one["max_kl"] for one in group] for group in by_target(results)] == [[0.1, 0.1], [0.2, 0.2]]
    assert [row["max_kl"] for row in summarize(results)] == [0.1, 0.2]


@pytest.mark.parametrize(
    ("values", "text"),
    [([23.514], "23.51"), ([23.0, 24.0], "23.50 ± 0.71"), ([5.0, 5.0, 5.0], "5.00 ± 0.00"), ([None, None], "")],
)
def test_a_spread_is_printed_where_there_is_one(values: list[float | None], text: str) -> None:
    assert spread(values, "{:.2f}") == text
