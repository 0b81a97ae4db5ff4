import logging
from collections.abc import Iterator
from types import SimpleNamespace

import prefect.artifacts
import pytest
from prefect import task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

import tasks.progress
from tasks.progress import Progress


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(tasks.progress, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


def test_without_a_terminal_there_is_a_line_every_so_often(
    clock: Clock, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "tasks.progress")
    with Progress("measure", terminal=False) as progress:
        for done in range(1, 101):
            clock.now += 1.0
            progress(done, 100, {"epoch": 2, "loss": 1.23456})
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 6
    assert messages[0] == "measure: 15 of 100, about 85 s left (epoch 2, loss 1.235)"
    assert capsys.readouterr().err == ""


def test_what_is_left_is_told_by_the_pace_since_the_first_call(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tasks.progress")
    with Progress("train", terminal=False) as progress:
        clock.now += 40.0  # processes start, and go on from what was done before
        progress(50, 100)
        clock.now += 16.0
        progress(58, 100)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["train: 50 of 100", "train: 58 of 100, about 84 s left"]


def test_a_short_piece_of_work_is_silent(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tasks.progress")
    with Progress("measure", terminal=False) as progress:
        progress(0, 2)
        clock.now += 14.0
        progress(2, 2)
    assert not caplog.records


def test_on_a_terminal_there_is_a_bar(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    caplog.set_level(logging.INFO, "tasks.progress")
    with Progress("gather", terminal=True) as progress:
        progress(3, 7, {"loss": 0.5})
        assert progress._bar is not None
        assert (progress._bar.n, progress._bar.total) == (3, 7)
        progress._bar.refresh()
        progress(7, 7)
    shown = capsys.readouterr().err
    assert "gather:" in shown
    assert "3/7" in shown
    assert "loss 0.5" in shown
    assert not caplog.records


def test_a_bar_is_closed_after_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("gather", terminal=True)

    def broken() -> None:
        with progress:
            progress(1, 7)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        broken()
    assert progress._bar is not None
    assert progress._bar.disable


def test_outside_a_task_run_there_is_no_artifact(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefect.artifacts, "create_progress_artifact", lambda *_, **__: pytest.fail("an artifact"))
    with Progress("gather", terminal=False) as progress:
        clock.now += 60.0
        progress(1, 2)


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.filterwarnings("ignore:Logger 'prefect.task_runs' attempted")  # a task without a flow
def test_a_task_run_has_one_artifact_that_ends_at_100(clock: Clock) -> None:
    @task
    def long() -> None:
        with Progress("train 0.7-kl, Tiny", terminal=False) as progress:
            for done in range(5):
                progress(done, 4)
                clock.now += 3.0

    long()
    wanted = ArtifactFilter(key=ArtifactFilterKey(any_=["progress-train-0-7-kl-tiny"]))
    with get_client(sync_client=True) as client:
        (artifact,) = client.read_artifacts(artifact_filter=wanted)
    assert artifact.type == "progress"
    assert artifact.data == 100.0
    assert artifact.task_run_id is not None
