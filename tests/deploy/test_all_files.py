"""What holds for every file of ``deploy/``: no secrets, pinned images, automations that Prefect takes."""

import re
from pathlib import Path

import pytest
from prefect.events.schemas.automations import AutomationCore

from tests.deploy.files import DEPLOY, ROOT, read

FILES = [path for path in [*DEPLOY.rglob("*"), ROOT / ".dockerignore", ROOT / "docs" / "deploy.md"] if path.is_file()]
FILES = [path for path in FILES if path.name != ".env"]
SECRETS = (
    r"AKIA[0-9A-Z]{16}",  # an access key
    r"hf_[A-Za-z0-9]{20,}",
    r"gh[pousr]_[A-Za-z0-9]{20,}",
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    r"://[^\s:/@{}$]+:[^\s@{}$]+@",  # a URL with a password in it
    r"(?i)(?:password|secret_access_key|token)[\"']?\s*[:=]\s*[\"']?(?![\"'$<{])[A-Za-z0-9/+]{8,}",
)
IMAGE = re.compile(r"(?:^|[\s\"'(])(?:--from=|image\"?: |FROM |IMAGE=)\"?([a-z0-9./-]+(?::[^\s\"]*)?)", re.MULTILINE)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_holds_no_secret_and_no_loose_image(path: Path) -> None:
    text = path.read_text()
    for pattern in SECRETS:
        assert not re.search(pattern, text), pattern
    assert not re.search(r":latest\b", text)
    for image in IMAGE.findall(text):
        assert re.search(r":(?:[A-Z]|\d|\$\{LSP_VERSION:-\d)", image), f"{image} has no version"
    assert all(len(line) <= 160 for line in text.splitlines() if path.suffix not in (".json", ".md"))


def test_the_patterns_find_what_they_are_for() -> None:
    assert IMAGE.findall("    image: postgres") == ["postgres"]
    assert any(re.search(pattern, "POSTGRES_PASSWORD: hunter2hunter2") for pattern in SECRETS)
    assert any(re.search(pattern, "postgresql://me:hunter2@host/db") for pattern in SECRETS)


@pytest.mark.parametrize("name", ["automations.yaml", "notifications.yaml"])
def test_prefect_takes_the_automations(name: str) -> None:
    for automation in read(name)["automations"]:
        loaded = AutomationCore.model_validate(automation)
        assert loaded.name.startswith("lsp-")
        for action in automation["actions"]:
            assert set(action.get("block_document_id", "0")) <= {"0", "-"}, "it is each installation's own"
