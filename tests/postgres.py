"""A PostgreSQL cluster on loopback, from the system's own packages, that goes with the test."""

import os
import pwd
import random
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OWNER = "prefect"  # of the database
ACCOUNT = "postgres"  # of the machine: PostgreSQL refuses to run as root, and Debian's package makes this one
PORTS = range(20_000, 32_000)  # below those that Linux gives to outgoing connections
SECONDS = 120  # until it must have started, or stopped


def programs() -> Path | None:
    """Returns the folder of the newest PostgreSQL server of this machine; None where there is none to be run."""
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    on_path = shutil.which("initdb")
    if not found and on_path is not None:
        found = [Path(on_path).parent]
    if os.geteuid() == 0 and ACCOUNT not in {entry.pw_name for entry in pwd.getpwall()}:
        return None
    return max(found, key=lambda folder: int(folder.parent.name) if folder.parent.name.isdigit() else 0, default=None)


def free_port() -> int:
    """Returns a port of loopback that nobody listens on."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


@contextmanager
def serving() -> Iterator[str]:
    """Runs an empty database and gives its URL, as SQLAlchemy wants it for asyncpg.

    Errors: ``AssertionError`` with what it printed, if it does not start.
    """
    binaries = programs()
    assert binaries is not None
    folder = Path(tempfile.mkdtemp(prefix="lsp-postgres-"))
    if os.geteuid() == 0:
        shutil.chown(folder, ACCOUNT)
    data, port = folder / "data", free_port()

    def run(program: str, *arguments: str) -> None:
        """The log goes to a file: a pipe would be held open by the server that ``pg_ctl`` leaves behind."""
        log = folder / f"{program}.log"
        with log.open("ab") as output:
            done = subprocess.run(
                [binaries / program, *arguments],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=SECONDS,
                **_account(),
            )
        assert done.returncode == 0, log.read_text()

    settings = {
        "listen_addresses": "127.0.0.1",
        "port": port,
        "unix_socket_directories": "",
        "fsync": "off",  # it is thrown away
        "max_connections": 200,
    }
    options = " ".join(f"-c {name}='{value}'" for name, value in settings.items())
    try:
        run(
            "initdb",
            f"--pgdata={data}",
            f"--username={OWNER}",
            "--auth=trust",
            "--locale=C",
            "--encoding=UTF8",
            "--no-sync",
        )
        run("pg_ctl", "start", f"--pgdata={data}", f"--options={options}", "--wait", f"--timeout={SECONDS}")
        yield f"postgresql+asyncpg://{OWNER}@127.0.0.1:{port}/postgres"
    finally:
        if (data / "postmaster.pid").exists():
            run("pg_ctl", "stop", f"--pgdata={data}", "--mode=immediate", "--wait", f"--timeout={SECONDS}")
        shutil.rmtree(folder, ignore_errors=True)


def _account() -> dict[str, Any]:
    """Returns the arguments of a process that is not root's."""
    if os.geteuid() != 0:
        return {}
    entry = pwd.getpwnam(ACCOUNT)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
