"""What the decode benchmark reports of its arms: medians and quartiles, ratios by round, bytes; and the table."""

from collections.abc import Mapping, Sequence
from statistics import quantiles
from typing import Any

GIB = 2**30
BASELINES = tuple(
    name + suffix for name in ("dense", "untied", "untied-ready", "ours-ready") for suffix in ("", "-tuned")
)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns ``median``, ``lower`` and ``upper`` quartile of two values or more."""
    lower, median, upper = quantiles(values, n=4, method="inclusive")
    return {"median": median, "lower": lower, "upper": upper}


def speedups(
    arm: str, ratio: float | None, seconds: Mapping[tuple[str, float | None], Sequence[float]]
) -> dict[str, Any]:
    """Returns by baseline how many times as fast the arm is, quartiles over the rounds.

    ``seconds``: of a step, by round, of each (arm, ratio) measured, the ratio None for the dense arms. Baselines are
    these, and the others of ``BASELINES`` at the arm's ratio.
    """
    own = seconds[arm, ratio]
    found = {}
    for name in BASELINES:
        other = seconds.get((name, None if name.startswith("dense") else ratio))
        if other is not None and other is not own:
            found[name] = spread([theirs / ours for theirs, ours in zip(other, own, strict=True)])
    return found


def measured(
    seconds: Sequence[float], *, batch: int, step_bytes: int, dense_bytes: int, copy_bytes_per_second: float
) -> dict[str, Any]:
    """Returns the figures of an arm from the seconds of its steps and the bytes that one must read.

    ``bandwidth_share``: of a measured copy; ``byte_bound``: the speed-up over dense if bytes were all that counted.
    """
    times = spread(seconds)
    return {
        "tokens_per_second": spread([batch / each for each in seconds]),
        "seconds_per_step": times["median"],
        "bandwidth_share": step_bytes / times["median"] / copy_bytes_per_second,
        "byte_bound": dense_bytes / step_bytes,
    }


def table(result: Mapping[str, Any]) -> list[str]:
    """Returns the result as lines of a table in Markdown, one for each cell with its notes.

    Arms that are made ready, those with a latent cache among them, are compared with untied pairs that are so too.
    """
    lines = [
        f"{result['model']} on {result['device']}, {result['threads']} threads, torch {result['torch']}",
        *result["notes"],
    ]
    for cell in result["cells"]:
        copied = cell["copy_bytes_per_second"] / 1e9
        peaks = any(arm.get("peak_bytes") is not None for arm in cell["arms"])
        lines += [
            "",
            f"{cell['dtype']}, batch {cell['batch']}, context {cell['context']}; copy: {copied:.1f} GB/s",
            "",
            "| removed | arm | tokens/s | quartiles | x dense | x untied | bound | of copy | weights GiB | cache GiB |"
            + (" peak GiB |" if peaks else ""),
            "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|" + ("---:|" if peaks else ""),
            *(_row(arm, peaks=peaks) for arm in cell["arms"] if arm["reason"] is None),
        ]
        reasons: dict[str, list[str]] = {}
        for arm in cell["arms"]:
            if arm["reason"] is not None:
                removed = "" if arm["ratio"] is None else f" {arm['realized_ratio']:.0%}"
                reasons.setdefault(arm["reason"], []).append(arm["name"] + removed)
        lines += ["", *(f"Not measured: {', '.join(names)} ({reason})." for reason, names in reasons.items())]
    return lines


def _row(arm: Mapping[str, Any], *, peaks: bool) -> str:
    removed = "" if arm["ratio"] is None else f"{arm['realized_ratio']:.1%}"
    speed, gained = arm["tokens_per_second"], arm["speedup"]

    def over(*names: str) -> str:
        return next((f"{gained[name]['median']:.2f}" for name in names if name in gained), "")

    tuned = "-tuned" if arm["name"].endswith("-tuned") else ""
    ready = arm["name"].startswith(("ours-ready", "latent"))
    untied = f"untied-ready{tuned}" if ready else f"untied{tuned}"
    peak = f" {arm['peak_bytes'] / GIB:.2f} |" if peaks else ""
    return (
        f"| {removed} | {arm['name']} | {speed['median']:.2f} | {speed['lower']:.2f} .. {speed['upper']:.2f} "
        f"| {over('dense' + tuned)} | {over(untied)} | {arm['byte_bound']:.2f} "
        f"| {arm['bandwidth_share']:.0%} | {arm['weights_bytes'] / GIB:.2f} | {arm['cache_bytes'] / GIB:.3f} |{peak}"
    )
