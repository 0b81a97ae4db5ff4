"""What changed since the nearest earlier run is named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage.manifest import InputRecord, Lineage, RunName
from storage.store import Store
from tasks.caching import Source, Stage, Work, input_records
from tasks.reasons import why

Publish = Callable[..., None]
RUN = RunName(id="r1", name="brave-llama")


class Text(Source):
    """A source with a name."""

    name: str

    def facts(self) -> dict[str, Any]:
        return {"name": self.name}


def gather(work: Work, **_: Any) -> None:
    raise AssertionError


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


@pytest.fixture
def publish(store: Store, tmp_path: Path) -> Publish:
    def make(
        key: str, inputs: dict[str, InputRecord], version: int = 1, stage: str = "gather", **settings: Any
    ) -> None:
        folder = tmp_path / key
        folder.mkdir()
        (folder / "file").write_text(key)
        lineage = Lineage(
            stage=stage,
            version=version,
            inputs=inputs,
            settings=settings,
            packages={},
            device="cpu",
            run=RUN,
            seconds=0.0,
        )
        store.publish("gather", key, folder, lineage)

    return make


def test_without_an_earlier_run_it_was_never_computed(store: Store, publish: Publish) -> None:
    assert why(store, Stage(gather, 1), {}, {}) == "none like it in the store"
    publish("k0", {}, stage="another")  # two functions may share a stage's name
    assert why(store, Stage(gather, 1), {}, {}) == "none like it in the store"


def test_the_nearest_run_is_the_one_with_the_fewest_changes(store: Store, publish: Publish) -> None:
    text = Text(digest="a" * 64, name="a.txt")
    records = input_records({"text": text})
    publish("k0", records, tie=True, precision="float64")
    publish("k1", records, tie=False, precision="float32")
    reason = why(store, Stage(gather, 1), {"text": text}, {"tie": False, "precision": "float64"})
    assert reason in ("tie True → False", "precision float32 → float64")
    assert why(store, Stage(gather, 1), {"text": text}, {"tie": False}, RUN.id) == "none like it in the store"
    assert why(store, Stage(gather, 1), {"text": text}, {"tie": False}, "r2") == "precision float32 → unset"
    publish("k2", records, tie=False, precision="float16")
    assert why(store, Stage(gather, 1), {"text": text}, {"tie": True, "precision": "float64"}) == (
        "the earlier one is damaged"  # all is equal, and yet it is asked for
    )


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({"inputs": {"text": Text(digest="b" * 64, name="b.txt")}}, "text.name a.txt → b.txt"),
        ({"inputs": {"text": Text(digest="b" * 64, name="a.txt")}}, "text changed (aaaaaaaaaaaa → bbbbbbbbbbbb)"),
        ({"inputs": {}}, "text is not read"),
        ({"version": 2}, "stage version 1 → 2"),
        ({"settings": {"tie": True, "points": 8}}, "points unset → 8"),
    ],
)
def test_every_kind_of_change_is_named(store: Store, publish: Publish, now: dict[str, Any], said: str) -> None:
    text = Text(digest="a" * 64, name="a.txt")
    publish("k0", input_records({"text": text}), tie=True)
    stage = Stage(gather, now.get("version", 1))
    assert why(store, stage, now.get("inputs", {"text": text}), now.get("settings", {"tie": True})) == said
