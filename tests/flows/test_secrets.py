"""Secrets are in the environment or in a Prefect block and nowhere else: not in a file, object, log or record."""

import logging
import sqlite3
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import prefect
import pytest
import yaml
from prefect.client.orchestration import get_client
from pydantic import ValidationError

from flows import cli
from flows.config import CompressConfig
from storage.store import Store
from tests.s3 import KEY, SECRET, Front, contents, environment, secret_block, using

pytestmark = pytest.mark.usefixtures("prefect_server")
Make = Callable[..., CompressConfig]

TOKEN = "hf_recognisableTokenOfTheseTests"
SECRETS = [KEY, SECRET, quote(SECRET, safe=""), TOKEN]


@pytest.fixture(autouse=True)
def _root_logger_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def holding(texts: dict[str, bytes]) -> list[str]:
    """Returns the names of the texts that hold a secret."""
    return [name for name, text in texts.items() if any(secret.encode() in text for secret in SECRETS)]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def records() -> dict[str, bytes]:
    """Returns everything in Prefect's database, by table, and what its API tells of blocks."""
    url = str(prefect.settings.PREFECT_API_DATABASE_CONNECTION_URL.value())
    with closing(sqlite3.connect(url.partition(":///")[2])) as database:
        tables = [name for (name,) in database.execute("select name from sqlite_master where type = 'table'")]
        found = {name: repr(database.execute(f'select * from "{name}"').fetchall()).encode() for name in tables}
    assert b"compress" in found["flow"]
    with get_client(sync_client=True) as client:
        for block in client.read_block_documents(include_secrets=True):
            found[f"block {block.name}"] = block.model_dump_json().encode()
    return found


def run(config: CompressConfig, folder: Path) -> int:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return cli.main(["compress", str(path)])


def test_secrets_of_the_environment_are_nowhere(
    s3_server: str, tiny_config: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bucket = f"bucket-{uuid.uuid4().hex}"
    config = tiny_config(tmp_path, store=f"s3://{bucket}/store")
    variables = environment(s3_server) | {"HF_TOKEN": TOKEN, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with using(variables):
        assert run(config, tmp_path) == 0
        assert holding(contents(bucket)) == []
    said = capfd.readouterr()
    assert "measure: computing" in said.err
    assert holding({"out": said.out.encode(), "err": said.err.encode()} | files(tmp_path) | records()) == []


def test_secrets_of_a_block_are_in_that_block_alone(
    s3_server: str, tiny_config: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bucket = f"bucket-{uuid.uuid4().hex}"
    with secret_block(f"s3://{bucket}/store", s3_server) as name:
        config = tiny_config(tmp_path, store=f"block://remote-file-system/{name}")
        with using({"HF_TOKEN": TOKEN, "XDG_CACHE_HOME": str(tmp_path / "cache")}):
            assert run(config, tmp_path) == 0
        said = capfd.readouterr()
        found = {"out": said.out.encode(), "err": said.err.encode()} | files(tmp_path) | records()
        assert holding(found) == [f"block {name}"]
    with using(environment(s3_server)):
        objects = contents(bucket)
    assert {path.split("/")[1] for path in objects} == {"manifest", "payload", "run"}
    assert holding(objects) == []


def test_a_store_that_refuses_says_no_secret(
    s3_server: str, tiny_config: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    front = Front(s3_server)
    front.fail(403, "PUT", "/payload/")
    config = tiny_config(tmp_path, store=f"s3://bucket-{uuid.uuid4().hex}/store")
    with using(environment(front.url) | {"HF_TOKEN": TOKEN, "XDG_CACHE_HOME": str(tmp_path / "cache")}):
        assert run(config, tmp_path) == 2
    front.refuse()
    said = capfd.readouterr()
    assert f"error: store '{config.store}': uploading payload/" in said.err
    assert "fix its permissions or the credentials" in said.err
    assert holding({"out": said.out.encode(), "err": said.err.encode()} | files(tmp_path) | records()) == []


CARELESS = [
    f"s3://{KEY}:{quote(SECRET, safe='')}@bucket/store",
    f"s3://{KEY}:{SECRET}@bucket/store",
    f"s3://{KEY}@bucket",
    f"s3://bucket/store?secret={SECRET}",
    f"s3://bucket/store#{SECRET}",
    f"memory://{KEY}:{SECRET}@store",
]


@pytest.mark.parametrize("uri", CARELESS)
def test_a_uri_with_a_secret_is_refused_and_not_repeated(
    uri: str, tiny_config: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "careless.yaml"
    values: dict[str, Any] = tiny_config(tmp_path).model_dump(mode="json")
    file.write_text(yaml.safe_dump(values | {"store": uri}))
    plain = tmp_path / "plain.yaml"
    plain.write_text(yaml.safe_dump(values))
    messages = []
    for make, error in (
        (lambda: CompressConfig.model_validate(values | {"store": uri}), ValidationError),
        (lambda: Store(uri), ValueError),
        (lambda: Store(uri, writable=False), ValueError),
    ):
        with pytest.raises(error, match="credentials or a query") as raised:
            make()
        messages.append(str(raised.value) + repr(raised.value))
    for command in (
        ["compress", str(file)],
        ["compress", str(plain), "--store", uri],
        ["plan", str(plain), "--store", uri],
        ["store", "list", "--store", uri],
    ):
        assert cli.main(command) == cli.BAD_INPUT
        said = capfd.readouterr()
        assert "credentials or a query" in said.err
        messages.append(said.out + said.err)
    assert holding({str(number): text.encode() for number, text in enumerate([*messages, caplog.text])}) == []
