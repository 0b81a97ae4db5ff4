"""Results of several seeds: put together by target, their means and standard deviations."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Result = dict[str, Any]
TARGET = ("ratio", "objective")
BOUNDS = ("fit_gib", "max_kl")  # where a target has one of them, the ratio follows from it
NO_FIGURES = (*TARGET, *BOUNDS, "seed", "learning_rate")  # numbers that were chosen, not measured


def by_target(results: Iterable[Result]) -> list[list[Result]]:
    """Returns the results of each target, in the order in which the targets come."""
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        ratio = None if "max_kl" in result else result["ratio"]  # what a divergence allows differs by seed
        key = (ratio, *(result.get(name) for name in BOUNDS), result["objective"])
        groups.setdefault(key, []).append(result)
    return list(groups.values())


def target_label(result: Result) -> str:
    """Returns the share removed, and the bound from which it follows where there is one."""
    bounds = {"fit_gib": "fit {:g} GiB: ", "max_kl": "KL {:g}: "}
    bound = "".join(text.format(result[name]) for name, text in bounds.items() if name in result)
    return f"{bound}{result['ratio']:.0%}"


def combined(reports: Sequence[tuple[int | None, dict[str, Any]]]) -> dict[str, Any]:
    """Returns one report of what each seed's run reported, by its seed; that of a single run as it is.

    Of several, ``results`` holds every seed's and ``summary`` what ``summarize`` makes of them.
    """
    (_, first), *others = reports
    if not others:
        return first
    results = [{**result, "seed": seed} for seed, content in reports for result in content["results"]]
    return {**first, "seeds": [seed for seed, _ in reports], "results": results, "summary": summarize(results)}


def summarize(results: Iterable[Result]) -> list[dict[str, Any]]:
    """Returns for each target the mean and the sample standard deviation, over the seeds, of every figure."""
    summary = []
    for group in by_target(results):
        figures = [_figures(result) for result in group]
        target = {name: group[0][name] for name in (*TARGET, *BOUNDS) if name in group[0]}
        summary.append({**target, "mean": _each(statistics.fmean, figures), "std": _each(deviation, figures)})
    return summary


def deviation(values: Sequence[float]) -> float:
    """Returns the sample standard deviation (n - 1 in the denominator) of at least two values."""
    return statistics.stdev(values)


def spread(values: Sequence[float | None], template: str) -> str:
    """Returns the mean and, of several values, the standard deviation as text: ``23.51 ± 0.12``; nothing for None."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return ""
    if len(known) == 1:
        return template.format(known[0])
    return f"{template.format(statistics.fmean(known))} ± {template.format(deviation(known))}"


def _figures(result: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers of a result, and of its tasks."""
    figures: dict[str, Any] = {}
    for name, value in result.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and name not in NO_FIGURES:
            figures[name] = value
        elif isinstance(value, dict) and name != "removed":
            figures[name] = _figures(value)
    return figures


def _each(function: Any, figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        name: _each(function, [one[name] for one in figures])
        if isinstance(value, dict)
        else function([one[name] for one in figures])
        for name, value in figures[0].items()
        if all(name in one for one in figures)  # a speed may be missing where something did not fit
    }
