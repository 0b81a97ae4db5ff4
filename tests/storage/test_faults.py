"""A store that fails in the middle: what may pass is tried again, what lasts is said, nothing half-written is seen."""

import errno
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from threading import Timer
from typing import Any

import aiohttp
import boto3
import botocore.exceptions
import pytest

from storage import files
from storage.faults import Patience, StoreError, StoreFull, StoreUnavailable, first_line, is_full, may_pass, persist
from storage.store import Store
from tests.s3 import ALWAYS, SECRET, Front, environment, using
from tests.storage.samples import FILES, LINEAGE, make_folder, publish, read

QUICK = Patience(attempts=4, first_wait=0.05, longest_wait=0.2)


@pytest.fixture(scope="module")
def shared_front(s3_server: str) -> Iterator[Front]:
    front = Front(s3_server)
    yield front
    front.refuse()


@pytest.fixture
def front(shared_front: Front, tmp_path: Path) -> Iterator[Front]:
    """The only way to the S3 server, for this test."""
    shared_front.mend()
    with using(environment(shared_front.url) | {"XDG_CACHE_HOME": str(tmp_path / "cache")}):
        yield shared_front


@pytest.fixture
def store(front: Front, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(files, "S3_TRIES", 1)
    return Store(f"s3://bucket-{uuid.uuid4().hex}/store", patience=QUICK)


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (botocore.exceptions.EndpointConnectionError(endpoint_url="u"), True),
        (botocore.exceptions.ConnectionClosedError(endpoint_url="u"), True),
        (botocore.exceptions.ConnectTimeoutError(endpoint_url="u"), True),
        (botocore.exceptions.ReadTimeoutError(endpoint_url="u"), True),
        (botocore.exceptions.ResponseStreamingError(error="cut"), True),
        (botocore.exceptions.IncompleteReadError(actual_bytes=1, expected_bytes=2), True),
        (botocore.exceptions.NoCredentialsError(), False),
        (botocore.exceptions.ParamValidationError(report="r"), False),
        (aiohttp.ClientPayloadError("cut"), True),
        (aiohttp.ServerDisconnectedError(), True),
        (aiohttp.ClientConnectionError(), True),
        (aiohttp.InvalidURL("u"), False),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), True),
        (TimeoutError(), True),
        (socket.gaierror(-3, "Temporary failure in name resolution"), True),
        (OSError(errno.EIO, "Input/output error"), True),
        (OSError(errno.EBUSY, "SlowDown"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), False),
        (OSError(errno.EROFS, "Read-only file system"), False),
        (shutil.Error([("a", "b", "[Errno 28] No space left on device")]), False),
        (FileNotFoundError("x"), False),
        (PermissionError("The provided token has expired."), False),
        (IsADirectoryError("x"), False),
        (ValueError("wrong"), False),
        (KeyError("wrong"), False),
    ],
    ids=repr,
)
def test_what_may_pass(error: Exception, passes: bool) -> None:
    assert may_pass(error) == passes


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (RuntimeError("I/O error: No space left on device (os error 28)"), True),  # as safetensors says it
        (shutil.Error([("a", "b", "[Errno 28] No space left on device")]), True),
        (OSError(errno.EIO, "An error occurred (XMinioStorageFull) when calling the PutObject operation"), True),
        (OSError(errno.EIO, "An error occurred (QuotaExceeded) when calling the PutObject operation"), True),
        (OSError(errno.EIO, "Input/output error"), False),
        (RuntimeError("os error 2"), False),
    ],
    ids=repr,
)
def test_what_is_full(error: Exception, full: bool) -> None:
    assert is_full(error) == full


def failing(times: int, error: Exception) -> tuple[Callable[[], str], list[float]]:
    """Returns an operation that fails the first ``times``, and the list of the times at which it was called."""
    calls: list[float] = []

    def operation() -> str:
        calls.append(time.monotonic())
        if len(calls) <= times:
            raise error
        return "done"

    return operation, calls


def test_a_failure_that_passes_is_waited_for_ever_longer(caplog: pytest.LogCaptureFixture) -> None:
    operation, calls = failing(3, ConnectionResetError("reset"))
    assert persist(operation, "reading x", "s3://b", QUICK) == "done"
    waits = [later - earlier for earlier, later in pairwise(calls)]
    for number, wait in enumerate(waits):
        assert 0.05 * 2**number <= wait <= 0.05 * 2**number + 0.05 + 0.2  # the jitter, and a slow machine
    assert caplog.text.count("s3://b: reading x failed (reset); again in") == 3


def test_a_failure_that_lasts_ends_after_the_stated_number_of_tries() -> None:
    operation, calls = failing(ALWAYS, ConnectionResetError("reset"))
    with pytest.raises(StoreUnavailable, match=r"store 's3://b': reading x failed 4 times \(reset\).*run the same"):
        persist(operation, "reading x", "s3://b", QUICK)
    assert len(calls) == 4


@pytest.mark.parametrize("error", [FileNotFoundError("x"), PermissionError("x"), ValueError("x")])
def test_a_failure_that_cannot_pass_is_raised_at_once(error: Exception) -> None:
    operation, calls = failing(ALWAYS, error)
    with pytest.raises(type(error)):
        persist(operation, "reading x", "s3://b", QUICK)
    assert len(calls) == 1


def test_a_message_shows_no_credentials_of_a_url() -> None:
    error = OSError(f"cannot connect to https://me:{SECRET}@host/path\nsecond line")
    assert first_line(error) == "cannot connect to https://***@host/path"


@pytest.mark.parametrize("kind", [500, 503, "cut"])
@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_faults_that_pass_cost_tries_and_nothing_else(
    kind: Any, method: str, store: Store, front: Front, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publish(store, tmp_path, "k0", {"z": b"z" * 100})
    places = ["/payload/", "/manifest/"] if method == "PUT" else ["a.bin", "/manifest/"]
    for place in places:
        front.fail(kind, method, place, times=2)
    ref = publish(store, tmp_path)
    assert store.find("gather", "k1") == ref
    assert read(store.local(ref)) == FILES
    assert [fault.times for fault in front.faults] == [0, 0]
    assert caplog.text.count("; again in") >= (4 if kind != "cut" else 1)  # s3fs goes on with a download that was cut
    assert Store(store.uri, verify=True).find("gather", "k1") == ref


def test_a_server_that_comes_back_is_waited_for(
    store: Store, front: Front, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    front.refuse()
    Timer(0.2, front.listen).start()
    ref = publish(store, tmp_path)
    assert store.find("gather", "k1") == ref
    assert "Could not connect to the endpoint URL" in caplog.text
    assert "; again in" in caplog.text


def test_a_server_that_is_gone_is_named(store: Store, front: Front, tmp_path: Path) -> None:
    ref = publish(store, tmp_path)
    front.refuse()
    calls: list[Callable[[], object]] = [
        lambda: store.find("gather", "k1"),
        lambda: store.manifest("gather", "k1"),
        lambda: list(store.manifests()),
        lambda: store.local(ref),
        lambda: store.withdraw("gather", "k1"),
        lambda: publish(store, tmp_path, "k2"),
        lambda: store.work("k1").fetch(),
        lambda: Store(store.uri, patience=QUICK),
    ]
    for call in calls:
        with pytest.raises(StoreUnavailable, match=rf"store '{store.uri}': .* failed 4 times .*run the same command"):
            call()
    front.listen()
    assert store.find("gather", "k1") == ref


def test_a_slow_server_is_waited_for(store: Store, front: Front, tmp_path: Path) -> None:
    for method in ("GET", "PUT", "HEAD"):
        front.fail("slow", method, times=2, seconds=0.3)
    ref = publish(store, tmp_path)
    assert read(store.local(ref)) == FILES


@pytest.fixture
def silent() -> Iterator[None]:
    """A server that accepts connections and never says or takes anything."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(100)
        with using(environment(f"http://127.0.0.1:{listener.getsockname()[1]}")):
            yield


def test_a_server_that_hangs_is_given_up(silent: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(files.S3_LIMITS, "read_timeout", 0.2)
    monkeypatch.setattr(files, "UPLOAD_SECONDS", 0.4)
    monkeypatch.setattr(files, "SLOWEST_UPLOAD", 1 << 26)
    store = Store("s3://bucket/store", writable=False, patience=QUICK)
    (tmp_path / "large").write_bytes(b"1" * (1 << 24))  # more than the buffers between hold
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: store.find("gather", "k1"), "Read timeout on endpoint URL"),
        (lambda: store.files.write("small", b"1"), "not taken within 0 s"),
        (lambda: store.files.upload(tmp_path / "large", "large"), "not taken within 1 s"),
        (lambda: Store(store.uri, patience=QUICK), "not taken within 0 s"),
    ]
    for call, said in calls:
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match=said):
            call()
        assert 4 * 0.4 <= time.monotonic() - started < 4 * (0.65 + 0.2 + 0.05) + 3


def test_a_server_that_hangs_is_given_up_within_two_minutes_by_default() -> None:
    usual = Patience()
    waits = [min(usual.first_wait * 2**i + usual.first_wait, usual.longest_wait) for i in range(usual.attempts - 1)]
    assert files.S3_LIMITS["retries"] == {"total_max_attempts": 1}
    asked = files.S3_TRIES * (max(files.S3_LIMITS["connect_timeout"], files.S3_LIMITS["read_timeout"]) + 0.2)
    assert usual.attempts * max(asked, files.UPLOAD_SECONDS) + sum(waits) <= 125


@pytest.mark.parametrize("broken_at", ["a.bin", "sub/b.json", "empty", "/manifest/"])
@pytest.mark.parametrize("kind", [500, "cut"])
def test_a_publication_that_fails_is_not_seen(
    kind: Any, broken_at: str, store: Store, front: Front, tmp_path: Path
) -> None:
    front.fail(kind, "PUT", broken_at)
    folder = make_folder(tmp_path)
    with pytest.raises(StoreUnavailable, match=r"(uploading|writing) .* failed 4 times"):
        store.publish("gather", "k1", folder, LINEAGE)
    assert front.count("PUT", broken_at) == QUICK.attempts * (2 if kind == "cut" else 1)  # aiohttp asks twice
    assert list(store.places()) == []
    assert store.find("gather", "k1") is None
    front.mend()
    ref = store.publish("gather", "k1", folder, LINEAGE)
    assert read(store.local(ref)) == FILES
    assert Store(store.uri, verify=True).find("gather", "k1") == ref


def test_at_no_moment_is_there_a_manifest_without_its_payload(
    store: Store, front: Front, s3_server: str, tmp_path: Path
) -> None:
    seen: set[tuple[bool, bool]] = set()
    bucket = store.uri.split("/")[2]
    beside = boto3.client("s3", endpoint_url=s3_server)

    def look() -> None:
        names = [entry["Key"] for entry in beside.list_objects_v2(Bucket=bucket).get("Contents", [])]
        whole = all(any(name.endswith(f"/{file}") for name in names) for file in FILES)
        seen.add((any("/manifest/" in name for name in names), whole))

    front.watch = look
    for name in (*FILES, "/manifest/"):
        front.fail(500, "PUT", name, times=1)
        front.fail("cut", "PUT", name, times=1)
    publish(store, tmp_path)
    assert seen == {(False, False), (False, True), (True, True)}


def test_credentials_that_have_expired_are_an_error_that_says_so(store: Store, front: Front, tmp_path: Path) -> None:
    ref = publish(store, tmp_path)
    front.fail(403, "GET")
    front.fail(403, "PUT")
    for call in (lambda: store.find("gather", "k1"), lambda: store.local(ref), lambda: publish(store, tmp_path, "k2")):
        with pytest.raises(
            StoreError, match=rf"store '{store.uri}': .* failed \(no\): fix its permissions or the cred"
        ):
            call()
    front.mend()
    assert store.find("gather", "k1") == ref  # it was not taken for damaged


def test_a_store_elsewhere_that_is_full_is_an_error_that_says_so(store: Store, front: Front, tmp_path: Path) -> None:
    front.fail(507, "PUT", "/payload/")
    with pytest.raises(StoreFull, match=rf"'{store.uri}' is full: uploading payload/.* name another store"):
        publish(store, tmp_path)
    assert list(store.places()) == []


def test_work_goes_on_while_its_store_does_not_answer(
    store: Store, front: Front, caplog: pytest.LogCaptureFixture
) -> None:
    work = store.work("k1")
    work.fetch()
    (work.path / "step").write_text("1")
    front.fail(503, "PUT", "/work/")
    work.keep()
    assert front.count("PUT", "/work/") == 1  # the next call is the next try
    assert "work/k1 is kept on this machine alone for now" in caplog.text
    front.mend()
    work.keep()
    assert store.files.read("work/k1/step") == b"1"
