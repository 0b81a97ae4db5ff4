"""What ``deploy/`` describes, end to end: a Prefect server on PostgreSQL, a process worker, ``prefect deploy --all``.

One server and one worker serve the whole module; the tests run in the order of the file. The figures of the README come
from

    LSP_DEPLOY_REPORT=deploy.json python -m pytest -s -m slow tests/flows/test_deployments.py
"""

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

import pytest

from flows.config import CompressConfig
from storage.store import Store
from storage.upkeep import verify
from tests import postgres
from tests.commands import command_of
from tests.deployment_runs import AT_ONCE, Deployed, Watched, deployed, gone
from tests.flows.processes import assert_one_copy, digests, trained_steps
from tests.prefect_server import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(postgres.programs() is None, reason="no PostgreSQL server: apt-get install postgresql"),
]
Make = Callable[..., CompressConfig]

DEPLOYMENTS = {"compress/compress", "compress/demo", "compress/nightly", "evaluate/evaluate", "benchmark/benchmark"}
STAGES = 17  # of one target


@dataclass(kw_only=True)
class Tally:
    """What was run, what was done to it, and what it cost."""

    started: float = field(default_factory=time.monotonic)
    runs: int = 0
    ended: Counter[str] = field(default_factory=Counter)  # by the state's name
    faults: Counter[str] = field(default_factory=Counter)
    finished_before_faults: int = 0  # artifacts
    repeats: int = 0  # of these, computed again
    lost: int = 0  # artifacts that were there and are not, or not the same, or damaged

    def compare(self, store: Path, before: dict[str, tuple[str, int]]) -> None:
        """Counts what became of the artifacts of ``before`` in a run that went on."""
        after = written(store)
        self.finished_before_faults += len(before)
        self.repeats += sum(after.get(name, one)[1] != one[1] for name, one in before.items())
        self.lost += sum(after.get(name, ("", 0))[0] != one[0] for name, one in before.items())
        self.lost += len(verify(Store(str(store)))[1])


def written(store: Path) -> dict[str, tuple[str, int]]:
    """Returns the digest of every artifact and the inode of its manifest; one that is published again has another."""
    return {name: (digest, (store / "manifest" / name).stat().st_ino) for name, digest in digests(store).items()}


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    yield (counted := Tally())
    report = {
        "runs": counted.runs,
        "ended": dict(counted.ended),
        "faults": dict(counted.faults),
        "finished_before_faults": counted.finished_before_faults,
        "repeats": counted.repeats,
        "lost": counted.lost,
        "seconds": round(time.monotonic() - counted.started, 1),
    }
    print(f"\ndeployments: {json.dumps(report)}")
    if "LSP_DEPLOY_REPORT" in os.environ:
        Path(os.environ["LSP_DEPLOY_REPORT"]).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


@pytest.fixture(scope="module")
def here(tally: Tally, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    with deployed(tmp_path_factory.mktemp("deployed")) as made:
        yield made
        runs = made.client.read_flow_runs(limit=200)
        tally.runs = len(runs)
        tally.ended.update(str(run.state.name) for run in runs if run.state is not None)


@dataclass(frozen=True, kw_only=True)
class Killed:
    """A run whose worker was killed, and the artifacts that it had finished by then."""

    run: UUID
    store: Path
    before: dict[str, tuple[str, int]]
    steps: int


def slow(here: Deployed, tiny: Make, name: str, processes: int = 1) -> CompressConfig:
    """Returns a configuration whose training takes long enough to be ended between two of its steps."""
    training = {"epochs": 2, "batch_sequences": 8, "dropout": 0.2, "checkpoint_steps": 1, "num_processes": processes}
    base = here.config(name, tiny)
    return here.config(
        name,
        tiny,
        calibration=base.calibration.model_dump() | {"sequences": 128},
        training=training,
        micro_batch=1,
    )


def train_a_little(here: Deployed, run: UUID, store: Path) -> None:
    """Returns as soon as a run is in the middle of its training."""
    until(lambda: bool(here.running(run) and trained_steps(store) >= 3), lambda: here.story(run), pause=0.02)


@pytest.fixture(scope="module")
def killed(here: Deployed, tiny_config: Make, tally: Tally) -> Killed:
    """Kills the worker with its run in the middle of training, and starts another worker.

    It takes a while until the run is missed; the tests that ask for this first have that time.
    """
    config = slow(here, tiny_config, "killed")
    store = Path(config.store)
    run = here.submit("compress/compress", config)
    train_a_little(here, run, store)
    assert len(here.kill_worker()) >= 2
    assert here.below_worker() == []
    tally.faults["worker and its run killed"] += 1
    made = Killed(run=run, store=store, before=written(store), steps=trained_steps(store))
    here.restart_worker()
    assert here.state(run).is_running()  # nobody has told the server
    return made


def cached(here: Deployed, run: UUID) -> set[str]:
    """Returns the stages of a run that are ``Cached`` in the UI, by label."""
    return {str(stage.name) for stage in here.stages(run) if stage.state_name == "Cached"}


def test_every_deployment_is_there_with_a_typed_form(here: Deployed) -> None:
    found = {}
    for deployment in here.client.read_deployments():
        flow = here.client.read_flow(deployment.flow_id)
        found[f"{flow.name}/{deployment.name}"] = deployment
    assert set(found) == DEPLOYMENTS
    for deployment in found.values():
        assert deployment.enforce_parameter_schema
        assert deployment.work_pool_name == here.server.environment["PREFECT_DEFAULT_WORK_POOL_NAME"]
    schema = found["compress/demo"].parameter_openapi_schema
    assert schema is not None
    epochs = schema["definitions"]["TrainingConfig"]["properties"]["epochs"]
    assert (epochs["type"], epochs["minimum"]) == ("integer", 1)
    assert epochs["description"]
    assert schema["definitions"]["Target"]["properties"]["objective"]["enum"] == ["kl", "task"]


@pytest.fixture(scope="module")
def failing(here: Deployed, tiny_config: Make) -> Iterator[Future[Watched]]:
    """Starts a run that asks for a model which is not there, beside the test that asks for this first."""
    config = here.config("wrong", tiny_config).model_dump(mode="json")
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(here.watch, "compress/demo", config | {"model": {"name_or_path": "/no/such/model"}})


def test_the_demo_exits_with_0_and_the_second_time_all_is_cached(
    here: Deployed, failing: Future[Watched], tiny_config: Make
) -> None:
    del failing  # begun meanwhile
    config = here.config("demo", tiny_config)
    runs = []
    for _ in range(2):
        watched = here.watch("compress/demo", config.model_dump(mode="json"))
        assert watched.status == 0, watched.printed
        assert watched.run is not None
        runs.append([(stage.name, stage.state_name) for stage in here.stages(watched.run)])
    names = {name for name, _ in runs[0]}
    assert len(names) == STAGES
    assert sorted(runs[0]) == [(name, "Completed") for name in sorted(names)]
    assert sorted(runs[1]) == [(name, "Cached") for name in sorted(names)]
    assert (config.output / "report.json").is_file()


def test_a_parameter_that_the_schema_forbids_is_refused(here: Deployed, tiny_config: Make, tally: Tally) -> None:
    values = here.config("wrong", tiny_config).model_dump(mode="json")
    refused = here.watch("compress/demo", values | {"training": {"epochs": 0}})
    assert refused.status != 0
    assert refused.run is None
    assert "config.training.epochs" in refused.printed
    assert "0 is less than the minimum of 1" in refused.printed
    tally.faults["parameter refused by the API"] += 1


def test_a_wrong_parameter_fails_with_one_line_in_the_log(
    here: Deployed, failing: Future[Watched], tally: Tally
) -> None:
    failed = failing.result()
    assert failed.status != 0
    assert failed.run is not None
    line = (
        "error: model.name_or_path='/no/such/model': there is no such folder on this machine; name one that is, or a "
        "hub id"
    )
    assert here.state(failed.run).name == "Failed"
    assert here.state(failed.run).message == line
    messages = [entry.message for entry in here.log(failed.run) if entry.level >= logging.ERROR]
    assert line in messages
    assert [message for message in messages if "\n" in message] == []  # no traceback for a user's mistake
    tally.faults["parameter that only the run sees to be wrong"] += 1


def test_many_at_once_on_one_store_leave_one_copy(here: Deployed, killed: Killed, tiny_config: Make) -> None:
    del killed  # while nobody misses it
    configs = [here.config("many", tiny_config, output=here.folder / "many" / str(index)) for index in range(AT_ONCE)]
    store = Path(configs[0].store)
    seen: dict[str, set[int]] = {}

    def look() -> None:
        for name, (_, inode) in written(store).items():
            seen.setdefault(name, set()).add(inode)

    runs = [here.submit("compress/demo", config) for config in configs]
    states = here.finished(runs, look)
    assert [state.name for state in states] == ["Completed"] * AT_ONCE, here.story(runs[0])
    look()
    assert_one_copy(store)
    assert len(seen) == STAGES
    assert {name: len(inodes) for name, inodes in seen.items()} == dict.fromkeys(seen, 1)  # written once
    for config in configs:
        stages = json.loads((config.output / "report.json").read_text())["stages"]
        assert {f"{stage['name']}/{stage['key']}.json" for stage in stages} == set(seen)


def test_a_run_whose_machine_died_is_taken_up(here: Deployed, killed: Killed, tally: Tally) -> None:
    here.completed(killed.run)
    assert here.run(killed.run).run_count == 2
    names = here.states(killed.run)
    assert names.index("Running") < names.index("Crashed") < names.index("AwaitingRetry")
    assert len(cached(here, killed.run)) == len(killed.before)
    tally.compare(killed.store, killed.before)
    assert (tally.repeats, tally.lost) == (0, 0)
    assert_one_copy(killed.store)


def test_a_cancelled_run_leaves_no_process_and_the_next_goes_on(
    here: Deployed, tiny_config: Make, tally: Tally
) -> None:
    config = slow(here, tiny_config, "cancelled", processes=2)
    store = Path(config.store)
    run = here.submit("compress/compress", config)
    train_a_little(here, run, store)
    trainers = [process for process in here.below_worker() if "tasks.train_worker" in command_of(process)]
    assert len(trainers) >= 2
    status, printed = here.server.run("flow-run", "cancel", str(run))
    assert status == 0, printed
    (state,) = here.finished([run])
    assert state.name == "Cancelled", here.story(run)
    assert gone(here.below_worker, seconds=60) == []
    tally.faults["training on 2 processes cancelled"] += 1
    before, steps = written(store), trained_steps(store)
    assert steps >= 3

    following = here.submit("compress/compress", config)
    seen = []
    (state,) = here.finished([following], lambda: seen.append(trained_steps(store) or steps))
    assert state.name == "Completed", here.story(following)
    assert min(seen) >= steps  # it went on from the checkpoint
    assert len(cached(here, following)) == len(before)
    tally.compare(store, before)
    assert (tally.repeats, tally.lost) == (0, 0)
    assert_one_copy(store)
