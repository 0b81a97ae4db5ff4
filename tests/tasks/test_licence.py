"""The licence of a base model: found in its card or its files, its links safe, its texts downloaded."""

import fnmatch
import logging
from pathlib import Path

import pytest

from tasks import model_files
from tasks.licence import find_licence


def test_a_card_that_does_not_read_is_said_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: [mit\n---\n")
    with caplog.at_level(logging.WARNING):
        assert find_licence(tmp_path).identifier == "unknown"
    assert "its front matter is no YAML" in caplog.text


@pytest.mark.parametrize("name", ["license.txt", "License.md", "LICENCE", "COPYING", "Copying.txt"])
def test_a_licence_file_is_known_in_any_case(tmp_path: Path, name: str) -> None:
    for other in (name, "NOTICE.txt", "use_policy.md", "config.json"):
        (tmp_path / other).write_text("text")
    licence = find_licence(tmp_path)
    assert (licence.identifier, licence.link, licence.source) == ("other", name, name)
    assert {path.name for path in licence.files} == {name, "NOTICE.txt", "use_policy.md"}


@pytest.mark.parametrize(
    ("link", "kept"),
    [
        ("https://a.org/b?c=d#e", True),
        ("http://a.org/b", True),
        ("USE_POLICY.md", True),
        ("./USE_POLICY.md", True),
        ("LICENSE", False),
        ("docs/USE_POLICY.md", False),
        ("../USE_POLICY.md", False),
        ("/etc/passwd", False),
        ("javascript:alert(1)", False),
        ("file:///etc/passwd", False),
        ("//a.org/b", False),
        ("https:", False),
        ("http://[", False),
        ("7", False),
    ],
)
def test_a_link_leads_to_the_web_or_to_a_file_that_is_here(tmp_path: Path, link: str, kept: bool) -> None:
    (tmp_path / "README.md").write_text(f"---\nlicense: llama2\nlicense_link: {link}\n---\n")
    (tmp_path / "USE_POLICY.md").write_text("policy")
    assert find_licence(tmp_path).link == (link.removeprefix("./") if kept else None)


@pytest.mark.parametrize(
    ("stated", "identifier"),
    [
        ("no", "unknown"),
        ("7", "unknown"),
        ("{a: b}", "unknown"),
        ("[]", "unknown"),
        ("''", "unknown"),
        ("[{a: b}, mit, 7]", ["mit"]),
        ("'mit\n\n  or not'", "mit or not"),
    ],
)
def test_what_is_no_string_is_no_licence(tmp_path: Path, stated: str, identifier: str | list[str]) -> None:
    (tmp_path / "README.md").write_text(f"---\nlicense: {stated}\nlicense_name: [a, b]\nlicense_link: 7\n---\n")
    licence = find_licence(tmp_path)
    assert (licence.identifier, licence.name, licence.link) == (identifier, None, None)


def test_licence_and_card_are_downloaded_with_a_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def download(_name: str, *, revision: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(model_files, "snapshot_download", download)
    model_files.locate("owner/name", "a" * 40, partly=True)
    assert "README.md" in asked[0]
    for name in ("LICENSE", "License.md", "licence.txt", "COPYING", "copying.txt", "NOTICE", "USE_POLICY.md"):
        assert any(fnmatch.fnmatchcase(name, pattern) for pattern in asked[0]), name
    assert not any(fnmatch.fnmatchcase("training.log", pattern) for pattern in asked[0])
