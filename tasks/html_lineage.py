"""Where a run's artifacts come from, for the HTML report: a drawing of the stages, and what is known of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

import plotly.graph_objects as go

from storage.manifest import InputRecord, Manifest
from storage.store import ArtifactMissing, Store
from tasks.html_figures import INK, SCHEMES, SERIES, Chart, shown

SHORT = 12  # digits of a key or digest that are shown
COLUMN, ROW = 124, 44  # pixels between two stages of the drawing
STATES = {scheme: {"Completed": SERIES[scheme][0], "Cached": SERIES[scheme][2]} for scheme in SCHEMES}
LABEL = {"width": 19, "max_lines": 2, "placeholder": "…"}  # of a stage in the drawing
StageFacts = Mapping[str, Any]  # one of ``content["stages"]``
Made = Mapping[tuple[str, str], Manifest]  # by kind and key


@dataclass(frozen=True, kw_only=True)
class Source:
    """One input of a stage: ``anchor`` leads to the stage of this run that made it, ``facts`` are of what none made."""

    name: str
    text: str
    anchor: str | None
    facts: Mapping[str, Any]


def read_manifests(store: Store, stages: Sequence[StageFacts]) -> dict[tuple[str, str], Manifest]:
    """Returns the manifests of a run's stages, of those that are still in the store."""
    found = {}
    for stage in stages:
        place = stage["name"], stage["key"]
        try:
            found[place] = store.manifest(*place)
        except ArtifactMissing:  # another run found it damaged, or gc took it
            continue
    return found


def anchor(stage: StageFacts) -> str:
    """Returns the page's name for the place where a stage is described."""
    return f"stage-{stage['key'][:SHORT]}"


def sources(stage: StageFacts, stages: Sequence[StageFacts], made: Made) -> list[Source]:
    """Returns what a stage read, hints included, in the order of their names."""
    manifest = made.get((stage["name"], stage["key"]))
    if manifest is None:
        return []
    ours = {(one["name"], one["key"]): one for one in stages}
    lineage = manifest.lineage
    return [_source(name, record, ours) for name, record in sorted((lineage.inputs | lineage.hints).items())]


def _source(name: str, record: InputRecord, ours: Mapping[tuple[str, str], StageFacts]) -> Source:
    if record.kind is None or record.key is None:
        facts = {name: value for name, value in record.facts.items() if value is not None}
        return Source(name=name, text=f"from outside, digest {record.digest[:SHORT]}", anchor=None, facts=facts)
    stage = ours.get((record.kind, record.key))
    text = f"{record.kind} {record.key[:SHORT]}" if stage is None else stage["label"]
    return Source(name=name, text=text, anchor=None if stage is None else anchor(stage), facts={})


def stage_chart(stages: Sequence[StageFacts], made: Made) -> Chart | None:
    """Returns the drawing of which stage read which, from left to right; None where no input is known.

    An input that is also one of another input's is left out.
    """
    places = {anchor(stage): stage for stage in stages}
    inputs = {
        name: [one.anchor for one in sources(stage, stages, made) if one.anchor in places]
        for name, stage in places.items()
    }
    edges = _direct(inputs)
    if not edges:
        return None
    at = _positions(inputs)
    lines = go.Scatter(
        name="is read by",
        x=[x for one, other in edges for x in (at[one][0], at[other][0], None)],
        y=[y for one, other in edges for y in (at[one][1], at[other][1], None)],
        mode="lines",
        line={"width": 1},
        opacity=0.3,
        hoverinfo="skip",
    )
    states = list(dict.fromkeys(stage["state"] for stage in stages))
    nodes = [_nodes(state, places, at, made) for state in states]
    columns, rows = (max(place[axis] for place in at.values()) for axis in (0, 1))
    hidden = {"visible": False, "fixedrange": True}
    figure = go.Figure(
        data=[lines, *nodes],
        layout={
            "template": go.layout.Template(),
            "width": COLUMN * (columns + 1),
            "height": ROW * (rows + 1) + 70,
            "margin": {"l": 0, "r": 0, "t": 0, "b": 0},
            "hovermode": "closest",
            "legend": {"orientation": "h", "x": 0, "y": 0, "yanchor": "bottom"},
            "xaxis": {**hidden, "range": (-0.5, columns + 0.5)},
            "yaxis": {**hidden, "range": (rows + 1.1, -0.6)},
            "uirevision": "kept",
            "meta": {scheme: [INK[scheme][0], *(STATES[scheme][state] for state in states)] for scheme in SCHEMES},
        },
    )
    return Chart(title="Which stage reads which", figure=figure.to_plotly_json(), table=None)


def _direct(inputs: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """Returns the pairs of input and reader that no longer way connects; ``inputs`` come before what reads them."""
    origins: dict[str, set[str]] = {}
    edges = []
    for name, found in inputs.items():
        known = [one for one in dict.fromkeys(found) if one in origins]
        beyond = {origin for one in known for origin in origins[one]}
        edges += [(one, name) for one in known if one not in beyond]
        origins[name] = {*known, *beyond}
    return edges


def _positions(inputs: Mapping[str, Sequence[str]]) -> dict[str, tuple[int, float]]:
    """Returns column and row of each stage; ``inputs`` come before what reads them."""
    depth: dict[str, int] = {}
    for name, found in inputs.items():
        depth[name] = 1 + max((depth[one] for one in found if one in depth), default=-1)
    columns: dict[int, list[str]] = {}
    for name, column in depth.items():
        columns.setdefault(column, []).append(name)
    tallest = max(map(len, columns.values()))
    at: dict[str, tuple[int, float]] = {}
    for column, names in sorted(columns.items()):
        means = {name: _mean([at[one][1] for one in inputs[name] if one in at]) for name in names}
        for row, name in enumerate(sorted(names, key=means.__getitem__)):
            at[name] = column, row + (tallest - len(names)) / 2
    return at


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _nodes(state: str, places: Mapping[str, StageFacts], at: Mapping[str, tuple[int, float]], made: Made) -> go.Scatter:
    members = {name: stage for name, stage in places.items() if stage["state"] == state}
    labels = [stage["label"] for stage in members.values()]
    facts = []
    for stage in members.values():
        manifest = made.get((stage["name"], stage["key"]))
        took = "" if manifest is None else f"<br>computed in {manifest.lineage.seconds:.1f} s"
        facts.append((shown(stage["label"]), stage["key"][:SHORT], took))
    return go.Scatter(
        name=state,
        x=[at[name][0] for name in members],
        y=[at[name][1] for name in members],
        text=["<br>".join(map(shown, wrap(label, **LABEL))) for label in labels],
        customdata=facts,
        mode="markers+text",
        textposition="bottom center",
        textfont={"size": 10},
        marker={"size": 11},
        hovertemplate="<b>%{customdata[0]}</b><br>key %{customdata[1]}%{customdata[2]}<extra></extra>",
    )
