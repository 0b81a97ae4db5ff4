import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any

import pytest

import tasks
from flows.versions import versions
from tasks.caching import Stage
from tasks.sources import Sources
from tasks.versions import RECORD, REMEDY, read_record, recorded_version, standings

TASKS = {
    "caching.py": "def stage(name=None):\n    return lambda function: function\n",
    "helper.py": "def used():\n    return 1\n\ndef unused():\n    return 1\n",
    "one.py": """
from tasks.caching import stage
from tasks.helper import used

@stage()
def first(work): return used()

@stage()
def second(work): return 2
""",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Returns a folder with two stages whose source is on record, at versions 3 and 5."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, text in TASKS.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "__init__.py").touch()
    (folder / "versions.json").write_text("{}", encoding="utf-8")
    command(tmp_path, bump=True)
    entries = record(tmp_path)
    entries["one.first"]["version"], entries["one.second"]["version"] = 3, 5
    (folder / "versions.json").write_text(json.dumps(entries), encoding="utf-8")
    read_record.cache_clear()
    return tmp_path


def command(checkout: Path, **flags: bool) -> int:
    return versions(**flags, record=checkout / "tasks/versions.json", roots=[checkout])


def record(checkout: Path) -> dict[str, Any]:
    entries: dict[str, Any] = json.loads((checkout / "tasks/versions.json").read_text(encoding="utf-8"))
    return entries


def recorded(checkout: Path) -> dict[str, int]:
    return {stage: entry["version"] for stage, entry in record(checkout).items()}


def edit(checkout: Path, name: str, old: str, new: str) -> None:
    path = checkout / "tasks" / name
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_the_source_of_every_stage_is_the_one_that_its_version_stands_for() -> None:
    changed = {stage: standing.changes for stage, standing in standings(Sources()).items() if standing.changes}
    lines = [f"{stage}: {change}" for stage, changes in changed.items() for change in changes]
    assert not changed, f"source changed without a new version; {REMEDY}\n" + "\n".join(lines)


def test_every_stage_is_found_and_takes_its_version_from_the_record() -> None:
    modules = [importlib.import_module(f"tasks.{module.name}") for module in pkgutil.iter_modules(tasks.__path__)]
    made = {
        f"{stage.function.__module__}.{stage.function.__name__}": stage.version
        for module in modules
        for stage in vars(module).values()
        if isinstance(stage, Stage)
    }
    entries = read_record(RECORD)
    assert set(made) == set(Sources().stages())
    assert made == {f"tasks.{stage}": entry["version"] for stage, entry in entries.items()}


def test_a_stage_that_is_not_on_record_is_named_with_the_command_that_adds_it() -> None:
    def new(work: object) -> None: ...

    new.__module__ = "tasks.one"
    with pytest.raises(ValueError, match=r"one\.new is not on record.*python -m flows versions --bump"):
        recorded_version(new)


def test_the_record_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.train import train

    assert recorded_version(train.function) == train.version
    monkeypatch.setattr(Path, "read_text", lambda *_args, **_settings: pytest.fail("read again"))
    assert recorded_version(train.function) == train.version


def test_nothing_is_said_against_a_record_that_is_up_to_date(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(checkout) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["one.first", "version", "3", "ok"],
        ["one.second", "version", "5", "ok"],
    ]
    before = record(checkout)
    assert command(checkout, bump=True) == 0
    assert "nothing has changed" in capsys.readouterr().out
    assert record(checkout) == before


def test_a_changed_stage_is_named_with_the_definitions_that_changed(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(checkout, "helper.py", "def used():\n    return 1", "LIMIT = 1\n\ndef used():\n    return LIMIT")
    before = (checkout / "tasks/versions.json").read_bytes()
    assert command(checkout) == 1
    shown = capsys.readouterr().out
    assert "changed: tasks.helper.used" in shown
    assert "used now: tasks.helper.LIMIT" in shown
    assert "--bump" in shown
    assert "--same-result" in shown
    assert shown.count(" ok") == 1  # the other stage
    assert (checkout / "tasks/versions.json").read_bytes() == before


def test_a_bump_raises_the_version_of_what_changed_and_of_nothing_else(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(checkout, "helper.py", "return 1", "return 2")
    edit(checkout, "helper.py", "def unused():\n    return 1", "def unused():\n    return 2")
    capsys.readouterr()
    assert command(checkout, bump=True) == 0
    assert "version 3 -> 4" in capsys.readouterr().out
    assert recorded(checkout) == {"one.first": 4, "one.second": 5}
    assert command(checkout) == 0


def test_the_authors_word_keeps_the_version_of_what_changed(checkout: Path) -> None:
    edit(checkout, "helper.py", "return 1", "return 3 - 2")
    assert command(checkout) == 1
    assert command(checkout, same_result=True) == 0
    assert recorded(checkout) == {"one.first": 3, "one.second": 5}
    assert command(checkout) == 0


def test_a_stage_that_no_longer_uses_a_definition_has_changed(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(checkout, "one.py", "used()", "1")
    assert command(checkout) == 1
    assert "no longer used: tasks.helper.used" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["bump", "same_result"])
def test_a_new_stage_starts_at_version_1_without_being_imported(checkout: Path, flag: str) -> None:
    edit(
        checkout, "one.py", "@stage()", "raise RuntimeError('imported')\n\n@stage()\ndef third(work): pass\n\n@stage()"
    )
    command(checkout, same_result=True)
    edit(checkout, "one.py", "@stage()", "@stage()\ndef fourth(work): pass\n\n@stage()")
    assert command(checkout) == 1
    assert command(checkout, **{flag: True}) == 0
    assert recorded(checkout) == {"one.first": 3, "one.second": 5, "one.third": 1, "one.fourth": 1}


def test_a_stage_that_is_gone_is_dropped(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(checkout, "one.py", "@stage()\ndef second", "def second")
    assert command(checkout) == 1
    assert "gone" in capsys.readouterr().out
    assert command(checkout, bump=True) == 0
    assert recorded(checkout) == {"one.first": 3}


@pytest.mark.parametrize(("flag", "version"), [("bump", 6), ("same_result", 5)])
def test_a_renamed_stage_does_not_start_again_at_a_version_it_had(checkout: Path, flag: str, version: int) -> None:
    edit(checkout, "one.py", "def second", "def renamed")
    command(checkout, **{flag: True})
    assert recorded(checkout) == {"one.first": 3, "one.renamed": version}


def test_an_edited_digest_is_noticed(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = record(checkout)
    entries["one.first"]["source"] = "0" * 64
    (checkout / "tasks/versions.json").write_text(json.dumps(entries), encoding="utf-8")
    read_record.cache_clear()
    assert command(checkout) == 1
    assert "is not that of the definitions on record" in capsys.readouterr().out


def test_both_answers_at_once_are_refused(checkout: Path) -> None:
    before = recorded(checkout)
    with pytest.raises(ValueError, match="exclude each other"):
        command(checkout, bump=True, same_result=True)
    assert recorded(checkout) == before


def test_a_record_with_conflicts_is_named(checkout: Path) -> None:
    (checkout / "tasks/versions.json").write_text("<<<<<<< ours\n{}\n", encoding="utf-8")
    read_record.cache_clear()
    with pytest.raises(ValueError, match=r"versions\.json is not JSON.*conflicts"):
        command(checkout)


def test_programs_get_the_same_as_json(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(checkout, "helper.py", "return 1", "return 2")
    capsys.readouterr()
    assert command(checkout, as_json=True) == 1
    assert json.loads(capsys.readouterr().out) == {
        "one.first": {"recorded_version": 3, "version": 3, "ok": False, "changes": ["changed: tasks.helper.used"]},
        "one.second": {"recorded_version": 5, "version": 5, "ok": True, "changes": []},
    }
    assert command(checkout, bump=True, as_json=True) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {stage: (fact["recorded_version"], fact["version"]) for stage, fact in facts.items()} == {
        "one.first": (3, 4)
    }


def test_the_record_is_sorted_and_a_failed_write_leaves_the_old_one(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(checkout, "helper.py", "return 1", "return 2")
    before = (checkout / "tasks/versions.json").read_bytes()

    def full(_descriptor: int) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr("tasks.versions.os.fsync", full)
        with pytest.raises(OSError, match="disk full"):
            command(checkout, bump=True)
    assert (checkout / "tasks/versions.json").read_bytes() == before
    assert not list((checkout / "tasks").glob(".versions.json*"))
    command(checkout, bump=True)
    text = (checkout / "tasks/versions.json").read_text(encoding="utf-8")
    assert text == json.dumps(record(checkout), indent=1, sort_keys=True) + "\n"
