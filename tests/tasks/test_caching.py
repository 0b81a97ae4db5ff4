import errno
import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tasks.running
from storage.digest import digest_file
from storage.manifest import ArtifactRef
from tasks.caching import Runtime, Source, Stage, Work
from tasks.running import Stages, may_pass

pytestmark = [
    pytest.mark.usefixtures("prefect_server"),
    pytest.mark.filterwarnings("ignore:Logger 'prefect.task_runs' attempted"),  # stages run without a flow here
]


def stage(*, version: int, name: str | None = None) -> Callable[[Callable[..., None]], Stage]:
    return lambda function: Stage(function, version, name)


@pytest.fixture(autouse=True)
def _no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks.running, "RETRY_DELAYS", [0.0, 0.0])


@pytest.fixture
def stages(tmp_path: Path) -> Callable[[], Stages]:
    """Returns a maker of runs against one store."""
    return lambda: Stages(place=str(tmp_path / "store"), runtime=Runtime())


def failing(errors: list[Exception]) -> tuple[Stage, list[int]]:
    """Returns a stage that raises ``errors`` one after the other, then succeeds, and the list of its calls."""
    calls: list[int] = []

    @stage(version=1, name="failing")
    def run(work: Work, *, value: int) -> None:
        calls.append(value)
        if len(calls) <= len(errors):
            (work.output / "half").write_text("half")
            raise errors[len(calls) - 1]
        (work.output / "value").write_text(str(value))

    return run, calls


def states(run: Stages) -> list[tuple[str, str]]:
    return [(record.label, record.state) for record in run.records]


def test_an_error_that_may_pass_is_retried(stages: Callable[[], Stages]) -> None:
    failures = [OSError(errno.EIO, "input/output error"), ConnectionResetError("reset")]
    run, calls = failing(failures)
    ref = stages().run(run, value=7)
    assert calls == [7, 7, 7]
    folder = stages().store.local(ref)
    assert [path.name for path in folder.iterdir()] == ["value"]  # nothing of the failed attempts


def test_a_third_failure_is_the_last(stages: Callable[[], Stages]) -> None:
    run, calls = failing([TimeoutError("no answer")] * 3)
    with pytest.raises(TimeoutError):
        stages().run(run, value=7)
    assert len(calls) == 3
    again = stages()
    again.run(run, value=7)  # the next run starts afresh
    assert states(again) == [("failing", "Completed")]


@pytest.mark.parametrize(
    "error", [ValueError("wrong"), FileNotFoundError("gone"), PermissionError("no"), ArithmeticError("nan")]
)
def test_an_error_that_stays_is_raised_at_once(stages: Callable[[], Stages], error: Exception) -> None:
    run, calls = failing([error])
    with pytest.raises(type(error)):
        stages().run(run, value=7)
    assert len(calls) == 1


def test_what_may_pass() -> None:
    def judged(error: object) -> bool:
        return may_pass(None, None, SimpleNamespace(data=error))  # type: ignore[arg-type]

    assert judged(OSError(errno.EIO, "input/output error"))
    assert not judged(OSError(errno.ENOSPC, "no space left on device"))
    assert judged(ConnectionError())
    assert not judged(NotADirectoryError())
    assert not judged(KeyError("x"))
    assert not judged(None)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"length": Path("x")}, r"settings\.length is a \w*Path"),
        ({"length": [1, {"inner": {1, 2}}]}, r"settings\.length\[1\]\.inner is a set"),
        ({"length": {"inner": ArtifactRef(kind="a", key="b", uri="c", digest="d", num_bytes=1)}}, "is a ArtifactRef"),
    ],
)
def test_a_setting_that_is_not_plain_json_raises(
    stages: Callable[[], Stages], settings: dict[str, Any], said: str
) -> None:
    @stage(version=1)
    def never(work: Work, *, length: object) -> None:
        raise AssertionError

    with pytest.raises(TypeError, match=said):
        stages().run(never, **settings)
    with pytest.raises(ValueError, match="only finite numbers"):
        stages().run(never, length=float("nan"))


def test_an_argument_that_the_stage_does_not_have_raises(stages: Callable[[], Stages]) -> None:
    run, calls = failing([])
    with pytest.raises(TypeError, match="size"):
        stages().run(run, value=1, size=2)
    assert not calls


def test_the_key_is_made_of_everything_that_counts(tmp_path: Path) -> None:
    def function(work: Work, **_: Any) -> None:
        raise AssertionError

    def key(version: int = 1, name: str = "a", digest: str = "d", path: str = "p", **settings: Any) -> str:
        ref = ArtifactRef(kind="k", key="other", uri=path, digest=digest, num_bytes=1)
        return Stage(function, version, name).key({"tokens": ref, "texts": [Source(digest=digest)]}, settings)

    base = key(seed=0)
    assert key(seed=0, path="elsewhere") == base
    assert len({base, key(seed=1), key(seed=0, version=2), key(seed=0, name="b"), key(seed=0, digest="e"), key()}) == 6


@stage(version=1)
def first(work: Work, *, value: int) -> None:
    (work.output / "value").write_text(str(value))


@stage(version=1)
def second(work: Work, *, given: ArtifactRef, factor: int, shift: int = 0) -> None:
    value = int((work.folder(given) / "value").read_text())
    (work.output / "value").write_text(str(value * factor + shift))


def chain(run: Stages, factor: int = 3, **hints: int) -> str:
    ref = run.run(second, given=run.run(first, value=14), factor=factor, hints=hints)
    return (run.store.local(ref) / "value").read_text()


def test_a_second_run_is_cached_and_a_setting_reruns_what_depends_on_it(stages: Callable[[], Stages]) -> None:
    runs = [stages() for _ in range(4)]
    assert [chain(runs[0]), chain(runs[1]), chain(runs[2], factor=5)] == ["42", "42", "70"]
    assert states(runs[0]) == [("first", "Completed"), ("second", "Completed")]
    assert states(runs[1]) == [("first", "Cached"), ("second", "Cached")]
    assert states(runs[2]) == [("first", "Cached"), ("second", "Completed")]
    chain(runs[3], shift=1)  # a hint is in no key
    assert states(runs[3]) == [("first", "Cached"), ("second", "Cached")]


def test_one_run_computes_a_stage_once(stages: Callable[[], Stages]) -> None:
    run = stages()
    assert chain(run) == chain(run)
    assert len(run.records) == 2


@pytest.mark.parametrize("damage", ["shortened", "removed", "manifest"])
def test_a_damaged_artifact_alone_is_computed_again(
    stages: Callable[[], Stages], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "storage.store")
    chain(stages())
    whole = stages()
    ref = whole.run(first, value=14)
    root = Path(whole.store.uri)
    file = root / "payload" / ref.digest / "value"
    if damage == "shortened":
        file.write_text("")
    elif damage == "removed":
        file.unlink()
    else:
        manifest = root / "manifest" / "first" / f"{ref.key}.json"
        manifest.write_text(manifest.read_text().replace('"value": 14', '"value": 15'))
    run = stages()
    assert chain(run) == "42"
    assert states(run) == [("first", "Completed"), ("second", "Cached")]
    assert "computed again" in caplog.text
    assert file.read_text() == "14"
    last = stages()
    chain(last)
    assert states(last) == [("first", "Cached"), ("second", "Cached")]


def test_a_store_that_was_emptied_is_filled_again(stages: Callable[[], Stages]) -> None:
    chain(stages())
    for manifest in Path(stages().store.uri).glob("manifest/*/*.json"):
        manifest.unlink()
    run = stages()  # Prefect's own records are still there, and must not be believed
    assert chain(run) == "42"
    assert states(run) == [("first", "Completed"), ("second", "Completed")]


def test_nothing_is_left_to_resume_after_success_and_work_is_kept_after_an_error(stages: Callable[[], Stages]) -> None:
    seen: list[bool] = []

    @stage(version=1)
    def resuming(work: Work) -> None:
        seen.append((work.scratch / "half").exists())
        if not seen[-1]:
            (work.scratch / "half").write_text("half")
            raise ValueError("stop here")
        (work.output / "whole").write_text("whole")

    run = stages()
    with pytest.raises(ValueError, match="stop here"):
        run.run(resuming)
    stages().run(resuming)
    assert seen == [False, True]
    assert not run.store.work(resuming.key({}, {})).path.exists()


class Changing(Source):
    """A file that may change while a stage reads it."""

    path: str

    def current_digest(self) -> str:
        return digest_file(Path(self.path))


def test_a_source_that_changes_under_way_is_not_believed(stages: Callable[[], Stages], tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("first")
    source = Changing(digest=digest_file(file), path=str(file))

    def reading(work: Work, *, text: Changing) -> None:
        file.write_text("second")
        (work.scratch / "half").write_text(file.read_text())
        (work.output / "value").write_text(file.read_text())

    run, stage_of = stages(), Stage(reading, 1)
    key = stage_of.key({"text": source}, {})
    with pytest.raises(ValueError, match="text has changed on disk since this run began: run the same command again"):
        run.run(stage_of, text=source)
    assert run.store.find("reading", key) is None
    assert not run.store.work(key).path.exists()  # what was kept of the changed file


def test_what_is_finished_and_damaged_is_computed_again(stages: Callable[[], Stages]) -> None:
    run = stages()
    key = first.key({}, {"value": 14})
    left = run.store.work(key).path / f"finished-{'0' * 64}"
    left.mkdir(parents=True)
    (left / "value").write_text("13")
    ref = run.run(first, value=14)
    assert (run.store.local(ref) / "value").read_text() == "14"


def test_a_forged_record_of_prefect_is_never_read(stages: Callable[[], Stages], tmp_path: Path) -> None:
    ref = stages().run(first, value=14)
    assert not (Path(stages().store.uri) / "results").exists()  # nothing is written where nothing is to be read
    assert stages().run(first, value=14) == ref
    record = Path(stages().store.uri) / "results" / ref.key
    whole = json.loads(record.read_text())
    whole["metadata"]["serializer"] = {"type": "pickle"}
    record.write_text(json.dumps(whole))
    run = stages()
    assert run.run(first, value=14) == ref
    assert states(run) == [("first", "Cached")]
    assert json.loads(record.read_text())["metadata"]["serializer"]["type"] == "json"
