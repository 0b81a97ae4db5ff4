"""Pages as a parser reads them, for tests of what is in them."""

import json
from functools import cached_property
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """What a browser would make of a page: its elements with their attributes and text, its tables' cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[dict[str, Any]] = []
        self.elements: list[dict[str, Any]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {[one['tag'] for one in self.open]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs)
        element = {"tag": tag, "attrs": dict(attrs), "text": "", "inside": [one["tag"] for one in self.open]}
        element["within"] = []
        for parent in self.open:
            parent["within"].append(element)
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data: str) -> None:
        for element in self.open:
            if element is self.open[-1] or element["tag"] not in ("html", "body"):
                element["text"] += data

    def all(self, tag: str) -> list[dict[str, Any]]:
        return [element for element in self.elements if element["tag"] == tag]

    def within(self, tags: str, parent: dict[str, Any]) -> list[dict[str, Any]]:
        return [one for one in parent["within"] if one["tag"] in tags.split()]

    def cells(self, row: dict[str, Any]) -> list[str]:
        """Returns the texts of a row, without the units that a header adds."""
        found = []
        for cell in self.within("th td", row):
            units = [one["text"] for one in self.within("span", cell)]
            found.append(cell["text"].strip().removesuffix("".join(units)))
        return found

    @cached_property
    def rows(self) -> list[list[str]]:
        return [self.cells(row) for row in self.all("tr")]

    @property
    def figures(self) -> dict[str, Any]:
        """The figures by their captions."""
        (data,) = [one for one in self.all("script") if one["attrs"].get("type") == "application/json"]
        titles = [one["text"] for one in self.all("figcaption")]
        return dict(zip(titles, json.loads(data["text"])["charts"], strict=True))
