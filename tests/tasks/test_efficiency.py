"""What the report says of memory and speed: the tables, the lines of the picture, and what is left out."""

from typing import Any

import pytest

from tasks.efficiency import _conditions, _speeds, efficiency_section, is_drawn, state_efficiency
from tasks.plots import plot_pareto
from tasks.summary import summarize, target_label

FIGURES = ("parameters", "weights_gib", "kv_floats_per_token_per_layer", "weights_plus_kv_128k_gib")
FIGURES = (*FIGURES, "max_context_k_tokens", "prefill_tflop_2k", "decode_gflop_2k")


def stated(scale: float) -> dict[str, float]:
    return {name: scale * (index + 1) for index, name in enumerate(FIGURES)}


def timed(dense: float, ours: float) -> dict[str, Any]:
    arm = {"cache_bytes": 10, "weights_bytes": 20}
    return {
        context: {
            "dense": {**arm, "tokens_per_second": dense / int(context), "speedup": 1.0},
            "ours-ready": {**arm, "tokens_per_second": ours / int(context), "speedup": ours / dense},
        }
        for context in ("512", "64")
    }


@pytest.fixture
def content() -> dict[str, Any]:
    def result(ratio: float, objective: str, perplexity: float) -> dict[str, Any]:
        return {"ratio": ratio, "objective": objective, "perplexity": perplexity, "perplexity_init": 3 * perplexity}

    return {
        "dense": {"perplexity": 10.0, "tokens": 5},
        "results": [result(0.7, "kl", 14.0), result(0.3, "kl", 11.0), result(0.7, "task", 15.0)],
    }


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_quality_is_drawn_against_context_and_speed(content: dict[str, Any], tmp_path: Any) -> None:
    figures = [stated(scale) for scale in (1.0, 2.0, 3.0, 4.0)]
    speeds = [timed(64.0, ours) for ours in (128.0, 96.0, 160.0)]
    panels = state_efficiency(content, figures, 80.0, speeds)
    context, speed = panels
    assert "80 GiB" in context
    assert "context 64" in speed  # the shortest
    lines = {line.label: (list(line.x), list(line.y), list(line.notes)) for line in panels[context]}
    assert lines["LSP"] == ([5.0, 15.0, 10.0], [10.0, 11.0, 14.0], ["dense", "30%", "70%"])
    assert lines["LSP-T"] == ([5.0, 20.0], [10.0, 15.0], ["dense", "70%"])
    assert lines["NoLSP"][1] == [10.0, 33.0, 45.0]  # at one ratio the ranks are the same: the last of the two
    speeds_of = {line.label: list(line.x) for line in panels[speed]}
    assert speeds_of["LSP"] == [1.0, 1.5, 2.0]
    assert is_drawn(content, None)
    plot_pareto(panels, "perplexity", tmp_path / "pareto.png")
    assert (tmp_path / "pareto.png").stat().st_size > 1000


def test_the_tables_have_a_row_for_each_target(content: dict[str, Any]) -> None:
    state_efficiency(content, [stated(s) for s in (1.0, 2.0, 3.0, 4.0)], 80.0, [timed(64.0, 128.0)] * 3)
    lines = efficiency_section(content, ["plots/pareto.png"])
    analytic = lines.index("## Memory and compute, from the shapes")
    measured = lines.index("## Decoding, measured")
    rows = [cells(line) for line in lines[analytic:measured] if line.startswith("|")]
    assert [row[0] for row in rows[2:]] == ["dense", "70% kl", "30% kl", "70% task"]
    assert rows[3][1:4] == ["4", "6", "8"]  # weights, KV floats, both, at twice the dense figures
    speeds = [cells(line) for line in lines[measured:] if line.startswith("|")]
    assert speeds[0] == ["removed", "context", "dense", "ours-ready"]
    assert speeds[2] == ["70% kl", "512", "0.1", "0.2 (2.00 x)"]
    assert lines[-1] == "![quality against context and speed](plots/pareto.png)"


def test_what_is_not_known_is_left_out(content: dict[str, Any]) -> None:
    assert state_efficiency(content, None, 80.0, []) == {}
    assert efficiency_section(content, ["plots/pareto.png"]) == []
    missing = timed(64.0, 128.0)
    del missing["64"]["ours-ready"]  # it did not fit
    assert state_efficiency(content, None, 80.0, [missing] * 3) == {}
    assert any(cells(line)[0] == "70% kl" for line in efficiency_section(content, []))


def test_speeds_of_several_runs_are_drawn_at_one_dense_speed(content: dict[str, Any]) -> None:
    (panel,) = state_efficiency(content, None, 80.0, [timed(64.0, 128.0), timed(640.0, 1280.0), timed(6.4, 19.2)])
    assert "scaled to one dense run" in panel
    lines = {line.label: list(line.x) for line in state_efficiency_of(content)[panel]}
    assert lines["LSP"] == pytest.approx([1.0, 2.0, 2.0])  # of 30 %, measured while all was ten times as fast, and 70 %
    assert lines["LSP-T"] == pytest.approx([1.0, 3.0])


def state_efficiency_of(content: dict[str, Any]) -> dict[str, Any]:
    return state_efficiency(content, None, 80.0, [result["speed"] for result in content["results"]])


def arm(name: str, speed: float, peak: int | None = None, **gains: float) -> dict[str, Any]:
    return {
        "name": name,
        "reason": None,
        "tokens_per_second": {"median": speed},
        "speedup": {over.replace("_", "-"): {"median": gain} for over, gain in gains.items()},
        "cache_bytes": 1,
        "weights_bytes": 1,
        "peak_bytes": peak,
    }


def measured(*arms: dict[str, Any], context: int = 64) -> dict[str, Any]:
    setting = {"machine": "a machine, 2 threads", "threads": 2, "torch": "2.13", "dtype": "bfloat16", "batch": 3}
    return {**setting, "cells": [{"context": context, "arms": list(arms)}]}


def test_no_gain_is_made_up_where_dense_was_not_measured(content: dict[str, Any]) -> None:
    dense = {"name": "dense", "reason": "does not fit", "cache_bytes": None}
    run = measured(dense, arm("latent-rebuilt", 5.0))
    speeds = [_speeds(run)] * 3
    assert speeds[0] == {"64": {"latent-rebuilt": {**speeds[0]["64"]["latent-rebuilt"], "speedup": None}}}
    assert state_efficiency(content, None, 80.0, speeds, measured_on=_conditions([run] * 3)) == {}
    assert not is_drawn(content, None)
    lines = efficiency_section(content, [])
    rows = [cells(line) for line in lines if line.startswith("|")]
    assert rows[0] == ["removed", "context", "latent-rebuilt"]
    assert rows[2] == ["70% kl", "64", "5.0"]
    assert "On a machine, 2 threads, torch 2.13, in bfloat16, batch 3." in lines
    assert "Not measured: dense at context 64 (does not fit)." in lines
    assert "Peak memory: not measured on a CPU." in lines


def test_tuned_arms_are_compared_with_dense_tuned_and_peaks_are_shown(content: dict[str, Any]) -> None:
    gib = 2**30
    ours = arm("ours-ready-tuned", 8.0, gib, dense=8.0, dense_tuned=2.0)
    run = measured(arm("dense", 1.0, 3 * gib), arm("dense-tuned", 4.0, 2 * gib, dense=4.0), ours)
    state_efficiency(content, None, 80.0, [_speeds(run)] * 3, measured_on=_conditions([run] * 3))
    rows = [cells(line) for line in efficiency_section(content, []) if line.startswith("| ")]
    assert rows[0] == ["removed", "context", "dense", "dense-tuned", "ours-ready-tuned"]
    assert rows[1] == ["70% kl", "64", "1.0", "4.0 (4.00 x)", "8.0 (2.00 x)"]
    assert rows[5] == ["70% kl", "64", "3.00", "2.00", "1.00"]


def test_what_failed_is_said(content: dict[str, Any]) -> None:
    run = {**measured(), "cells": [], "reason": "the weights do not fit"}
    assert state_efficiency(content, None, 80.0, [_speeds(run)] * 3, measured_on=_conditions([run] * 3)) == {}
    lines = efficiency_section(content, [])
    assert "Not measured: the weights do not fit." in lines
    assert not any(line.startswith("|") for line in lines)


def test_rows_are_called_as_in_the_table_of_results_and_seeds_are_put_together(content: dict[str, Any]) -> None:
    results = [
        {**content["results"][0], "ratio": ratio, "max_kl": 0.5, "speed": timed(64.0, ours), "efficiency": stated(1.0)}
        for ratio, ours in ((0.5, 128.0), (0.6, 192.0))
    ]
    del results[1]["speed"]["512"]
    stating = {**content, "dense": {**content["dense"], "efficiency": stated(1.0)}, "device_gib": 80.0}
    rows = [cells(line) for line in efficiency_section({**stating, "results": results}, []) if "KL 0.5" in line]
    assert all(row[0] == f"{target_label(results[0])} kl" == "KL 0.5: 50% kl" for row in rows)
    assert [row[1:] for row in rows[1:]] == [
        ["512", "0.1", "0.2 (2.00 x)"],
        ["64", "1.0 ± 0.0", "2.5 ± 0.7 (2.50 ± 0.71 x)"],
    ]


def test_a_latent_that_the_cache_does_not_hold_is_said(content: dict[str, Any]) -> None:
    figures = [stated(scale) for scale in (1.0, 2.0, 3.0, 4.0)]
    for fused in (False, True):
        state_efficiency(content, figures, 80.0, [], fused=fused)
        assert any("holds their keys and values whole" in line for line in efficiency_section(content, [])) == fused


def test_seeds_of_which_one_has_no_figure_are_summed_up_without_it() -> None:
    results = [{"ratio": 0.5, "objective": "kl", "speed": {"64": {"dense": {"x": 1.0}}}} for _ in range(2)]
    results[0]["speed"]["64"]["ours-ready"] = {"x": 2.0}  # type: ignore[index]
    (summary,) = summarize(results)
    assert summary["mean"]["speed"] == {"64": {"dense": {"x": 1.0}}}
