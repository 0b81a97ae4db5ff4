"""A checkpoint of which decoding cannot be measured is a reason, not the end of a run."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks import decode as module
from tasks.decode import decode
from tasks.efficiency import _conditions, _speeds


def test_what_cannot_be_measured_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise ValueError("the weights do not fit")

    monkeypatch.setattr(module, "benchmark", refuse)
    work: Any = SimpleNamespace(folder=lambda _: tmp_path, output=tmp_path, runtime=SimpleNamespace(device="cpu"))
    asked: dict[str, Any] = {"contexts": [8], "batch": 1, "dtype": "float32", "tuned": False}
    decode.function(work, checkpoint=None, machine="m", torch_version="2", **asked)
    content = json.loads((tmp_path / "decode.json").read_text())
    assert _speeds(content) == {}
    found = _conditions([content])
    assert found is not None
    assert found["failed"] == "the weights do not fit"
    assert (found["machine"], found["torch"], found["dtype"], found["batch"]) == ("m", "2", "float32", 1)
