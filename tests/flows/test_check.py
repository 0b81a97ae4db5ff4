"""``python -m flows check``: the exit status that CI goes by."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows import check as check_module
from flows.cli import main
from storage.runs import Needed, RunRecord, write_run
from storage.store import Store
from tasks.report import REPORT
from tests.storage.samples import LINEAGE, make_folder

RESULTS: list[dict[str, Any]] = [
    {"ratio": 0.5, "objective": "kl", "perplexity": 15.2, "efficiency": {"parameters": 100}, "tasks": {"piqa": 0.7}},
    {"ratio": 0.71, "fit_gib": 2.5, "objective": "task", "perplexity": 31.0, "efficiency": {"parameters": 50}},
]
Says = Callable[..., str]


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "run" / REPORT
    path.parent.mkdir()
    path.write_text(json.dumps({"results": RESULTS}))
    return path


@pytest.fixture
def says(capsys: pytest.CaptureFixture[str]) -> Says:
    """Returns a function that runs ``check``, expects its exit status, and returns what it said."""

    def run(status: int, *arguments: object) -> str:
        try:
            ended = main(["check", *map(str, arguments)])
        except SystemExit as exit_:
            ended = int(exit_.code or 0)
        said = capsys.readouterr()
        assert ended == status, said
        return said.out + said.err

    return run


def in_store(folder: Path, name: str, *reports: list[dict[str, Any]], finished: bool = True) -> str:
    """Puts a run with these reports into the store in ``folder``, and returns the run's id."""
    store, keys = Store(str(folder / "store")), []
    count = len(list(store.files.names("run")))
    for index, results in enumerate(reports):
        keys.append(f"{name}-{count}-{index}")
        content = {REPORT: json.dumps({"results": results}).encode()}
        store.publish("report", keys[-1], make_folder(folder, content), LINEAGE)
    needs = tuple(Needed(kind="report", key=key) for key in keys)
    started = f"2030-01-01T00:00:{count:02}+00:00"
    run = RunRecord(id=f"id-{name}-{count}", name=name, started=started, finished=finished, needs=needs)
    write_run(store, run)
    return run.id


def test_the_name_of_the_report_is_that_of_the_report() -> None:
    assert check_module.REPORT == REPORT


def test_a_bound_that_is_kept(report: Path, says: Says) -> None:
    said = says(0, report, "--max", "perplexity=15.2", "--target", "0.5-kl", "--min", "tasks.piqa=0.7")
    assert said.splitlines() == [
        "0.5-kl: perplexity is 15.2, to be at most 15.2",
        "0.5-kl: tasks.piqa is 0.7, to be at least 0.7",
    ]
    assert says(0, report.parent, "--max", "efficiency.parameters=100"), "a folder will do"


def test_a_bound_that_is_not_kept_fails_in_one_line(report: Path, says: Says) -> None:
    assert says(1, report, "--max", "perplexity=15.1", "--target", "0.5-kl") == (
        "error: 0.5-kl: perplexity is 15.2, to be at most 15.1\n"
    )
    assert "error: fit2.5GiB-task: perplexity is 31" in says(1, report, "--max", "perplexity=20"), "any target may"
    assert says(1, report, "--target", "0.5-kl", "--min", "tasks.piqa=0.8").startswith("error: 0.5-kl: tasks.piqa")


def test_json_for_programs(report: Path, says: Says) -> None:
    rows = json.loads(says(1, report, "--max", "perplexity=20", "--json"))
    assert [(row["target"], row["kept"]) for row in rows] == [("0.5-kl", True), ("fit2.5GiB-task", False)]


def test_a_run_in_a_store_by_its_name_or_id(tmp_path: Path, says: Says) -> None:
    worse = [RESULTS[0] | {"perplexity": 99.0}]
    first = in_store(tmp_path, "ci-1", worse)
    in_store(tmp_path, "ci-1", RESULTS[:1])
    place = ("--store", tmp_path / "store", "--max", "perplexity=20")
    says(0, "ci-1", *place)  # the newest of that name
    says(1, first, *place)


def test_every_seed_keeps_the_bound(tmp_path: Path, says: Says) -> None:
    in_store(tmp_path, "seeds", RESULTS[:1], [RESULTS[0] | {"perplexity": 20.5}])
    said = says(1, "seeds", "--store", tmp_path / "store", "--target", "0.5-kl", "--max", "perplexity=20")
    assert said.splitlines() == [
        "0.5-kl #1: perplexity is 15.2, to be at most 20",
        "error: 0.5-kl #2: perplexity is 20.5, to be at most 20",
    ]


def test_seeds_of_a_report(report: Path, says: Says) -> None:
    report.write_text(json.dumps({"results": [result | {"seed": seed} for seed in (0, 1) for result in RESULTS]}))
    assert says(0, report, "--target", "0.5-kl", "--max", "perplexity=20").count("0.5-kl seed") == 2


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "there is no bound to check: give --max perplexity=20"),
        (["--max", "perplexity=nan"], "max.perplexity: Input should be a finite number"),
        (["--max", "accuracy=1"], "0.5-kl has no figure accuracy: it has ratio, perplexity"),
        (["--max", "objective=1"], "has no figure objective"),
        (["--max", "perplexity=1", "--target", "0.7-kl"], "there is no target 0.7-kl: "),
    ],
)
def test_what_cannot_be_checked(report: Path, says: Says, arguments: list[str], problem: str) -> None:
    said = says(2, report, *arguments)
    assert problem in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"results": [{"ratio": 2}]}', '{"results": [{}]}'])
def test_what_is_no_report(report: Path, says: Says, content: str) -> None:
    report.write_text(content)
    assert f"{report} is no report" in says(2, report, "--max", "perplexity=20")


def test_what_is_not_there(tmp_path: Path, says: Says) -> None:
    bound = ("--max", "perplexity=20")
    assert "cannot be read: No such file or directory; of a run in a store, add --store" in says(2, "ci-1", *bound)
    in_store(tmp_path, "killed", RESULTS, finished=False)
    place = ("--store", tmp_path / "store")
    assert "run killed in store" in says(2, "killed", *place, *bound)
    assert "there is no run ci-9 in store" in says(2, "ci-9", *place, *bound)
    in_store(tmp_path, "swept", RESULTS)
    Store(str(tmp_path / "store")).withdraw("report", "swept-1-0")
    assert "the report of run swept is not in store" in says(2, "swept", *place, *bound)
