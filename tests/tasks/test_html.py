"""The page of a report: what it holds, that names from outside stay names, and that nothing in it leads outside."""

import base64
import hashlib
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plotly.colors import hex_to_rgb, unlabel_rgb

from storage.digest import digest_bytes
from storage.grid import MEASURED, SKIPPED, KLGrid
from storage.manifest import ArtifactRef, FileFacts, InputRecord, Lineage, Manifest
from storage.store import Store
from tasks.caching import Work
from tasks.html import html, read_curves
from tasks.html_figures import BACKGROUND, SCHEMES, kl_charts, ordered_colours, series_colours
from tasks.html_lineage import _direct, _positions, anchor, read_manifests, sources, stage_chart
from tasks.report import markdown
from tests.tasks import reports
from tests.tasks.pages import Page

HEADINGS = {"h1", "h2", "h3"}


def page_of(content: dict[str, Any]) -> str:
    return html(content, reports.curves(content), {})


@pytest.fixture(scope="module")
def pages() -> dict[str, Page]:
    return {name: Page(page_of(make())) for name, make in reports.CONTENTS.items()}


every_page = pytest.mark.parametrize("name", list(reports.CONTENTS))


def tables_of(text: str) -> list[list[str]]:
    """Returns the rows of all tables of a Markdown text."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in lines]


@pytest.mark.parametrize("name", ["language", "classifier", "encoder", "seeds", "without grid"])
def test_the_page_has_every_row_of_the_markdown_report(pages: dict[str, Page], name: str) -> None:
    content = reports.CONTENTS[name]()
    for stage in content.get("stages", []):
        stage["reason"] = stage["reason"] and stage["reason"].replace("|", "or")  # a bar would end a cell there
    rows, page = tables_of(markdown(content)), Page(page_of(content))
    assert len(rows) >= 2
    assert [row for row in rows if row not in page.rows] == []
    text = page.all("main")[0]["text"]
    for line in markdown(content).splitlines():
        if line.startswith("- `"):
            name, reason = re.fullmatch(r"- `(.+)` (\(\d+\): .+)", line).groups()  # type: ignore[union-attr]
            assert f"{name} {reason}" in text


def test_the_head_says_what_the_run_was(pages: dict[str, Page]) -> None:
    page = pages["language"]
    assert page.all("h1")[0]["text"] == page.all("title")[0]["text"] == "maker/tiny, compressed"
    head = page.all("header")[0]["text"]
    for said in ("2026-02-03 04:05 UTC", "took 61 s", "6f0c", "10,000", "17.12", "4,096", "measured_kl"):
        assert said in head
    assert pages["classifier"].all("h1")[0]["text"] == "vit, compressed"  # a folder's place is nobody's business
    assert "93.75%" in pages["classifier"].all("header")[0]["text"]
    assert "name_or_path: maker/tiny" in page.all("main")[0]["text"]


@every_page
def test_equal_reports_are_equal_bytes(name: str) -> None:
    assert page_of(reports.CONTENTS[name]()) == page_of(reports.CONTENTS[name]())


@every_page
def test_nothing_leads_outside_and_no_code_is_in_it_but_ours(pages: dict[str, Page], name: str) -> None:
    page = pages[name]
    assert {one["tag"] for one in page.elements} <= {
        *("html", "head", "meta", "title", "link", "style", "body", "header", "main", "nav", "section", "noscript"),
        *("h1", "h2", "h3", "p", "a", "button", "span", "time", "code", "pre", "em", "ul", "li", "dl", "dt", "dd"),
        *("div", "table", "caption", "thead", "tbody", "tr", "th", "td", "figure", "figcaption", "details"),
        *("summary", "label", "select", "option", "script"),
    }
    for element in page.elements:
        attributes = element["attrs"]
        assert not [key for key in attributes if key.startswith("on") or key in ("src", "style", "srcset", "action")]
        address = attributes.get("href", "")
        assert address in ("data:,", "") or address.startswith("#") or re.fullmatch(r"[\w./%-]+", address), address
    scripts = [one for one in page.all("script") if not one["attrs"]]
    (policy,) = (m["attrs"]["content"] for m in page.all("meta") if m["attrs"].get("http-equiv"))
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    digests = [base64.b64encode(hashlib.sha256(one["text"].encode()).digest()).decode() for one in scripts]
    assert directives["default-src"] == "'none'"
    assert directives["script-src"] == " ".join(f"'sha256-{digest}'" for digest in digests)
    assert len(digests) == 2


def test_hostile_names_are_shown_as_they_are(pages: dict[str, Page]) -> None:
    page = pages["hostile"]
    assert page.all("title")[0]["text"] == f"{reports.HOSTILE}, compressed"
    assert page.all("pre")[0]["text"] == reports.HOSTILE
    assert [row[0] for row in page.rows if row[1:2] == ["Cached"]] == [reports.HOSTILE] * 2
    assert f"{reports.HOSTILE} (1): {reports.HOSTILE}" in page.all("main")[0]["text"]
    texts = json.dumps(list(page.figures.values()))
    assert "onerror" in texts  # plotly reads tags in its texts, so there are none
    assert set(re.findall(r"<[^>]*>", texts)) <= {"<b>", "</b>", "<br>", "<extra>", "</extra>"}


@every_page
def test_a_page_can_be_walked_by_its_structure(pages: dict[str, Page], name: str) -> None:
    page = pages[name]
    ids = [one["attrs"]["id"] for one in page.elements if "id" in one["attrs"]]
    assert len(set(ids)) == len(ids)
    for link in page.all("a"):
        if link["attrs"]["href"].startswith("#"):
            assert link["attrs"]["href"][1:] in ids
    levels = [int(one["tag"][1]) for one in page.elements if one["tag"] in HEADINGS]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    for table in page.all("table"):
        assert page.within("caption", table)[0]["text"]
    assert all(one["attrs"].get("scope") in ("col", "row") for one in page.all("th"))
    assert all(one["attrs"]["aria-label"] for one in page.all("div") if one["attrs"].get("role"))
    assert {one["attrs"].get("tabindex") for one in page.all("pre")} <= {"0"}  # scrolled by keys


def test_files_beside_the_page_are_linked(pages: dict[str, Page]) -> None:
    linked = [one["attrs"]["href"] for one in pages["seeds"].all("a") if "#" not in one["attrs"]["href"]]
    assert linked[:3] == ["report.json", "report.md", "config.yaml"]
    assert {"plots/seed-1/kl_curves.png", "plots/seed-0/pareto.png", "checkpoints/0.7-seed-1/"} <= set(linked)
    assert "plots/kl_curves.png" not in [one["attrs"]["href"] for one in pages["without grid"].all("a")]


def test_the_curves_are_those_of_the_grid() -> None:
    content = reports.language()
    (measured,) = reports.curves(content).values()
    charts = kl_charts(content["units"], measured, "token")
    assert [chart.title for chart in charts] == list(reports.KINDS)
    for chart in charts:
        assert chart.figure["layout"]["yaxis"]["type"] == "log"
        assert chart.figure["layout"]["yaxis"]["title"]["text"] == "KL, nats per token"
        for block, trace in enumerate(chart.figure["data"]):
            name = f"model.layers.{block}.{chart.title}"
            assert trace["name"] == str(block)
            assert list(zip(trace["x"], trace["y"], strict=True)) == [(k / 40, kl) for k, kl in measured[name]]
            assert [tuple(one) for one in trace["customdata"]] == [(name, k, 40) for k, _ in measured[name]]
    header, rows = charts[0].table or ([], [])
    assert header == ["share of directions removed", "0", "1", "2"]
    assert rows[1] == ["0.25", "0.01", "0.02", "0.03"]


def test_without_a_grid_there_are_no_curves(pages: dict[str, Page]) -> None:
    assert "curves" not in [one["attrs"].get("id") for one in pages["without grid"].elements]
    assert "#curves" not in [one["attrs"]["href"] for one in pages["without grid"].all("a")]
    assert kl_charts(reports.units(), {}, "token") == []


def test_ranks_are_shares_of_each_unit(pages: dict[str, Page]) -> None:
    figure = pages["language"].figures["30% removed"]
    assert [trace["name"] for trace in figure["data"]] == list(reports.KINDS)
    assert figure["data"][0]["x"] == [0, 1, 2]
    assert figure["data"][0]["y"] == [35 / 40, 25 / 40, 15 / 40]


def test_costs_are_drawn_from_the_dense_model_on(pages: dict[str, Page]) -> None:
    figures = pages["language"].figures
    figure = figures["Perplexity against parameters"]
    lines = {trace["name"]: (trace["x"], trace["y"]) for trace in figure["data"]}
    assert lines["NoLSP"] == ([10_000, 8500, 6500], [17.125, 30.0, 30.0])
    assert lines["LSP"] == ([10_000, 8500], [17.125, 21.0])
    assert lines["LSP-T"] == ([10_000, 6500], [17.125, 21.0])
    assert lines["dense"] == ([10_000], [17.125])
    speed = figures["Perplexity against tokens per second"]["data"][2]
    assert speed["x"] == pytest.approx([50, 50 / 0.85])
    assert len([title for title in figures if " against " in title]) == 5
    assert [title for title in pages["encoder"].figures if "against" in title] == ["Similarity against parameters"]


def test_several_seeds_have_lines_of_their_own_and_curves_to_choose_from(pages: dict[str, Page]) -> None:
    page = pages["seeds"]
    options = [one["text"] for one in page.all("option")]
    assert options[:2] == ["seed 0", "seed 1"]
    assert options[2:] == [
        f"{target} removed, seed {seed}"
        for seed, target in ((0, "30%"), (0, "KL 0.1: 70%"), (1, "30%"), (1, "KL 0.1: 71%"))
    ]
    assert [trace["name"] for trace in page.figures["30% removed, kl"]["data"]] == ["seed 0", "seed 1"]
    costs = page.figures["Perplexity against parameters"]
    assert [(trace["name"], trace["legendgroup"]) for trace in costs["data"] if trace["name"].startswith("LSP,")] == [
        ("LSP, seed 1", "LSP")
    ]
    assert ["30%", "21.50 ± 0.71"] in [[row[0], row[7]] for row in page.rows if len(row) == 11]


@pytest.mark.parametrize(
    ("name", "title"), [("language", "perplexity"), ("classifier", "accuracy"), ("encoder", "KL, nats")]
)
def test_a_training_is_shown_by_what_validated_it(pages: dict[str, Page], name: str, title: str) -> None:
    figures = [figure for at, figure in pages[name].figures.items() if at.endswith("removed, kl")]
    (trace,) = figures[0]["data"]
    assert figures[0]["layout"]["yaxis"]["title"]["text"] == f"validation {title}"
    assert figures[0]["layout"]["xaxis"]["ticktext"] == ["NoLSP", "1", "2"]
    assert trace["x"] == [0, 1, 2]
    assert trace["marker"]["symbol"] == ["circle", "star", "circle"]


def luminance(colour: str) -> float:
    """The relative luminance of WCAG 2.2."""
    channels = hex_to_rgb(colour) if colour.startswith("#") else unlabel_rgb(colour)
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in channels)]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("colours", [ordered_colours(1), ordered_colours(80), series_colours(8)])
def test_every_colour_stands_out_in_both_schemes(scheme: str, colours: dict[str, list[str]]) -> None:
    """WCAG 2.2, 1.4.11: a contrast of 3 for what is drawn."""
    for colour in colours[scheme]:
        dark, light = sorted((luminance(colour), luminance(BACKGROUND[scheme])))
        assert (light + 0.05) / (dark + 0.05) >= 3


def manifest(stage: dict[str, Any], *inputs: dict[str, Any]) -> Manifest:
    records = {one["name"]: InputRecord(digest="d", kind=one["name"], key=one["key"]) for one in inputs}
    outside = {"model": InputRecord(digest="e" * 64, facts={"name": reports.HOSTILE, "revision": None})}
    lineage = Lineage(
        stage=stage["name"],
        version=3,
        inputs=records | outside,
        settings={"rate": 0.5},
        packages={"torch": "2"},
        device="cpu",
        run=None,
        seconds=12.5,
    )
    facts = {"a.json": FileFacts(sha256=digest_bytes(b""), size=0)}
    return Manifest(
        kind=stage["name"], key=stage["key"], digest="f", num_bytes=0, files=facts, created="2026", lineage=lineage
    )


def test_lineage_leads_from_stage_to_stage_and_outside() -> None:
    content = reports.language()
    gather, bases, train = content["stages"]
    made = {
        (one.kind, one.key): one for one in (manifest(gather), manifest(bases, gather), manifest(train, gather, bases))
    }
    found = sources(train, content["stages"], made)
    assert [(one.name, one.anchor) for one in found] == [
        ("bases", anchor(bases)),
        ("gather", anchor(gather)),
        ("model", None),
    ]
    assert found[2].facts == {"name": reports.HOSTILE}
    chart = stage_chart(content["stages"], made)
    assert chart is not None
    edges, *nodes = chart.figure["data"]
    assert [trace["name"] for trace in nodes] == ["Cached", "Completed"]
    assert edges["x"] == [0, 1, None, 1, 2, None]  # not from gather to train, which bases are between
    page = Page(html(content, {}, made))
    links = [one["attrs"]["href"] for one in page.all("a") if "ul" in one["inside"] and "dd" in one["inside"]]
    assert links == [f"#{anchor(gather)}", f"#{anchor(bases)}", f"#{anchor(gather)}"]
    described = page.all("main")[0]["text"]
    assert f"from outside, digest {'e' * 12}; name {reports.HOSTILE}" in described
    assert "2026 in 12.5 s on cpu" in described
    assert "torch 2." in described


@pytest.mark.parametrize(
    ("label", "lines"),
    [
        ("gather", "gather"),
        ("evaluate 0.3 untrained, uniform", "evaluate 0.3<br>untrained, uniform"),
        ("evaluate <b>0.3</b> untrained, uniform, again", "evaluate &lt;b&gt;0.3&lt;/b&gt;<br>untrained,…"),
    ],
)
def test_a_long_label_of_a_stage_takes_two_lines(label: str, lines: str) -> None:
    content = reports.language()
    gather, bases = ({**stage, "label": label} for stage in content["stages"][:2])
    chart = stage_chart([gather, bases], {("bases", bases["key"]): manifest(bases, gather)})
    assert chart is not None
    assert {text for trace in chart.figure["data"][1:] for text in trace["text"]} == {lines}


def test_only_direct_inputs_are_drawn() -> None:
    """Against the definition: a pair stays if removing it leaves no way from the one to the other."""
    rng = np.random.default_rng(0)
    names = [f"s{index}" for index in range(9)]
    for _ in range(20):
        inputs = {name: [one for one in names[:index] if rng.random() < 0.4] for index, name in enumerate(names)}
        pairs = {(one, name) for name, found in inputs.items() for one in found}

        def reaches(start: str, end: str, pairs: set[tuple[str, str]]) -> bool:
            return any(other == end or reaches(other, end, pairs) for one, other in pairs if one == start)

        expected = {pair for pair in pairs if not reaches(*pair, pairs - {pair})}
        assert set(_direct(inputs)) == expected
        at = _positions(inputs)
        assert all(at[one][0] < at[other][0] for one, other in pairs)
        assert len(set(at.values())) == len(names)


def test_a_stage_that_left_the_store_is_left_out(work: Work, published: Callable[..., ArtifactRef]) -> None:
    ref = published("gather", lambda folder: (folder / "a.txt").write_text("a"))
    there = {"name": "gather", "key": ref.key}
    found = read_manifests(work.store, [there, {"name": "train", "key": "1"}])
    assert list(found) == [("gather", ref.key)]


def test_the_measured_points_are_read_from_a_grid(tmp_path: Path, published: Callable[..., ArtifactRef]) -> None:
    grid = KLGrid.create(str(tmp_path / "rows"), ["a", "b"], np.array([[1, 2], [3, 5]]), [0.25, 0.5])
    grid.write_row(0, np.array([np.nan, 0.5]), np.array([SKIPPED, MEASURED], dtype=np.uint8))
    grid.write_row(1, np.array([0.25, 0.75]), np.array([MEASURED, MEASURED], dtype=np.uint8))
    ref = published("measure", lambda folder: grid.compact(str(folder)))
    assert read_curves(Store(str(tmp_path / "store")), ref) == {"a": [(2, 0.5)], "b": [(3, 0.25), (5, 0.75)]}
