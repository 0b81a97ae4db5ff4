"""The report as one HTML file that opens anywhere, without a network: tables, figures, lineage.

It holds what ``report.md`` does, from the same rows, and what only a screen can show. Like that file it belongs to a
run and is no artifact. The page's policy lets no address be asked for and no script run but the two of its own.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs
from rich.filesize import decimal

from storage.grid import MEASURED, KLGrid
from storage.manifest import ArtifactRef
from storage.store import Store
from tasks.efficiency import analytic_notes, analytic_rows, is_timed, speed_notes, speed_tables
from tasks.html_figures import Chart, Curves, cost_charts, history_charts, kl_charts, rank_charts, templates
from tasks.html_lineage import SHORT, Made, anchor, sources, stage_chart
from tasks.markdown import Rows
from tasks.metrics import metric_of
from tasks.report import (
    ACCURACIES,
    CURVES,
    RANKS,
    REPORT,
    accuracy_rows,
    continuations,
    explanation,
    has_curves,
    highest_ratio,
    is_swept,
    left_alone,
    paretos,
    result_rows,
    seeded,
    stage_rows,
    sweep_rows,
)

HTML, MARKDOWN, CONFIG = "report.html", "report.md", "config.yaml"
TEMPLATE, STYLE, SCRIPT = "report.html.j2", "report.css", "report.js"
HERE = Path(__file__).parent
NUMBER = re.compile(r"[\d−-]")  # what a cell of figures begins with


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column by its ``title``; ``unit`` of its figures, empty where the title says it."""

    title: str
    unit: str
    numeric: bool


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of cells below a ``caption``; the first cell of each says what the row is of."""

    caption: str
    columns: list[Column]
    rows: list[list[str]]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Groups of charts of which a reader chooses one by its name; ``label`` says what is chosen."""

    label: str
    options: dict[str, list[Chart]]


def read_curves(store: Store, grid: ArtifactRef) -> Curves:
    """Returns the measured points of every unit of a grid."""
    with KLGrid.open(str(store.local(grid))).read() as data:
        names, kl, status, removed = (data[name].values.tolist() for name in ("unit", "kl", "status", "removed"))
    return {
        name: [(count, value) for count, value, state in zip(*row, strict=True) if state == MEASURED]
        for name, *row in zip(names, removed, kl, status, strict=True)
    }


def html(content: Mapping[str, Any], curves: Mapping[int | None, Curves], made: Made) -> str:
    """Returns the page of a report as ``report.json`` holds it; equal arguments give equal bytes.

    ``curves``: the measured grids by seed, None of a run without others; ``made``: manifests of the run's stages.
    """
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": True, "allow_nan": False}
    environment.filters |= {"emphasised": _emphasised, "tabular": _tabular}
    plotly, script = get_plotlyjs(), (HERE / SCRIPT).read_text(encoding="utf-8")
    return environment.get_template(TEMPLATE).render(
        **_told(content),
        **_drawn(content, curves),
        **_run(content, made),
        templates=templates(),
        style=Markup((HERE / STYLE).read_text(encoding="utf-8")),
        plotly=Markup(plotly),
        script=Markup(script),
        script_digests=[_digest(plotly), _digest(script)],
    )


def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _emphasised(text: str) -> Markup:
    """Returns a sentence of the Markdown report, with its emphasis, as HTML."""
    return Markup(re.sub(r"\*([\w -]+)\*", r"<em>\1</em>", str(escape(text))))


def _tabular(rows: Rows, caption: str, units: Mapping[str, str] | None = None) -> Table:
    """Returns ``rows`` with ``units`` by title of the column; a column is numeric where every cell looks so."""
    header, body = rows
    columns = []
    for index, title in enumerate(header):
        cells = [row[index] for row in body if row[index]]
        numeric = bool(cells) and all(NUMBER.match(cell) for cell in cells)
        columns.append(Column(title=title, unit=(units or {}).get(title, ""), numeric=numeric and index > 0))
    return Table(caption=caption, columns=columns, rows=body)


def _told(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the page says in words and tables of the models."""
    report, dense, results = dict(content), content["dense"], content["results"]
    metric = metric_of(dense)
    nats = f"nats per {metric.unit}"
    units = {"KL isolated": nats, "KL joint": nats, "realized": "share removed"}
    units |= dict.fromkeys(("NoLSP uniform", "NoLSP", "LSP"), metric.title)
    timed = is_timed(content)
    spread_note = ", mean ± standard deviation over the seeds" if "seeds" in content else ""
    return {
        "title": f"{shown_model(content['model'])}, compressed",
        "facts": {
            "Dense parameters": f"{dense['parameters']:,}",
            f"Dense {metric.title}": metric.template.format(dense[metric.name]),
            f"Test {metric.counted}": f"{dense[metric.counted]:,}",
            "Fewest parameters": f"{min(result['parameters'] for result in results):,}",
            "Ranks by": ", ".join(dict.fromkeys(result["allocation"] for result in results)),
            **({"Seeds": ", ".join(map(str, content["seeds"]))} if "seeds" in content else {}),
        },
        "explanation": explanation(metric),
        "results": _tabular(result_rows(report), "Each target beside the dense model" + spread_note, units),
        "sweep": _tabular(sweep_rows(results), "Learning rates tried") if is_swept(results) else None,
        "analytic_notes": analytic_notes(content) if "efficiency" in dense else [],
        "analytic": _tabular(analytic_rows(content), "Memory and compute") if "efficiency" in dense else None,
        "speed_notes": speed_notes(content) if timed else [],
        "speed": [(note, rows and _timed(note, rows)) for note, rows in (speed_tables(content) if timed else ())],
        "accuracies": {
            title: _tabular(accuracy_rows(report, key), title) for key, title in ACCURACIES.items() if dense.get(key)
        },
        "left_alone": left_alone(report),
        "prompt": content["prompt"],
        "continuations": {} if content["prompt"] is None else continuations(report, highest_ratio(results)),
    }


def _timed(note: str, rows: Rows) -> Table:
    """Returns one of ``speed_tables``."""
    unit, caption = ("GiB", note.rstrip(":")) if note else ("tokens per second", "Decoding, times dense in brackets")
    return _tabular(rows, caption, {"context": "tokens", **dict.fromkeys(rows[0][2:], unit)})


def shown_model(name: str) -> str:
    """Returns the id of a model of the hub, or the name of a folder: its place is in the configuration."""
    return Path(name).name if name.startswith(("/", ".", "~")) or name.count("/") > 1 else name


def _drawn(content: Mapping[str, Any], curves: Mapping[int | None, Curves]) -> dict[str, Any]:
    """Returns the figures."""
    units, results = content["units"], content["results"]
    per = metric_of(content["dense"]).unit
    measured = {seed: kl_charts(units, of_seed, per) for seed, of_seed in curves.items()}
    return {
        "kl": Choice(
            label="Seed", options={"" if seed is None else f"seed {seed}": one for seed, one in measured.items() if one}
        ),
        "ranks": Choice(
            label="Target",
            options={title: [chart] for title, chart in rank_charts(units, results).items()} if units else {},
        ),
        "costs": cost_charts(content),
        "histories": history_charts(content),
    }


def _run(content: Mapping[str, Any], made: Made) -> dict[str, Any]:
    """Returns what belongs to one run: its stages, its configuration, its files."""
    stages: Sequence[dict[str, Any]] = content.get("stages", ())
    started, seconds = content.get("started"), content.get("seconds")
    header, rows = stage_rows(stages)
    described = []
    for stage, row in zip(stages, rows, strict=True):
        manifest = made.get((stage["name"], stage["key"]))
        described.append(
            {
                "anchor": anchor(stage),
                "row": row,
                "stage": stage,
                "manifest": manifest,
                "size": None if manifest is None else decimal(manifest.num_bytes),
                "settings": None if manifest is None else json.dumps(manifest.lineage.settings, indent=2),
                "sources": sources(stage, stages, made),
            }
        )
    versions = [manifest.lineage.packages for manifest in made.values()]
    return {
        "when": None if started is None else f"{started[:16].replace('T', ' ')} UTC",
        "took": None if seconds is None else f"{seconds:,.0f} s",
        "run": content.get("run"),
        "stage_header": header,
        "stages": described,
        "stage_chart": stage_chart(stages, made),
        "packages": {name: number for packages in versions for name, number in packages.items()},
        "short": SHORT,
        "configuration": yaml.safe_dump(content["config"], sort_keys=False) if "config" in content else None,
        "files": _files(dict(content)),
    }


def _files(content: dict[str, Any]) -> dict[str, str]:
    """Returns what lies beside the page, by what it is called there: addresses relative to it."""
    seeds = content.get("seeds", [None])
    plots = [seeded(RANKS, seed) for seed in seeds]
    plots += [seeded(CURVES, seed) for seed in seeds if has_curves(content)]
    names = [REPORT, MARKDOWN, CONFIG, *plots, *paretos(content)]
    names += [f"checkpoints/{Path(one['checkpoint']).name}/" for one in content["results"] if "checkpoint" in one]
    return {name: quote(name) for name in names}
