"""Prefect's task runners, by the section ``workers`` of a configuration: threads, a Dask cluster, a Ray cluster.

A cluster of this machine is started when there is work to share out, and ended with the flow. On a cluster that runs
already, the workers need this checkout and ``kernels`` on their ``PYTHONPATH``, the same packages, the model under the
same path, the store (a shared folder or a URI), and the Prefect server of the flow, by its ``PREFECT_API_URL``.
"""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prefect.task_runners import ThreadPoolTaskRunner

from flows.config import WorkersConfig
from flows.server import uninterrupted
from tasks.fanout import Workers

REPOSITORY = Path(__file__).parents[1]
SOURCES = (REPOSITORY, REPOSITORY / "kernels")  # what workers import from
LOGGERS = "tasks,storage,lsp_core"  # that Prefect shows beside a part
KNOCK_SECONDS = 10.0
OBJECT_STORE_BYTES = 128 << 20  # of a Ray cluster of this machine; parts hand over next to nothing


def workers_of(config: WorkersConfig, device: str) -> Workers:
    """Returns the workers that ``config`` names; nothing is started yet.

    Errors: ``ValueError`` if the packages that they need are not installed.
    """
    if config.runner == "threads":
        return Workers(config.count, partial(ThreadPoolTaskRunner, max_workers=config.count))
    if find_spec(f"prefect_{config.runner}") is None:
        raise ValueError(
            f"workers.runner={config.runner} needs packages of its own: pip install 'lsp[{config.runner}]'"
        )
    if config.runner == "dask":
        return Workers(config.count, partial(_dask, config))
    return Workers(config.count, partial(_ray, config, num_gpus=int(device.startswith("cuda"))))


def _knock(address: str | None) -> None:
    """Errors: ``ConnectionError`` if nothing listens at ``address``: a Ray client would go on asking for minutes."""
    if address is None:
        return
    place = urlsplit(address if "://" in address else f"//{address}")
    if place.hostname is None or place.port is None:
        return
    try:
        socket.create_connection((place.hostname, place.port), timeout=KNOCK_SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"nothing answers at {address}: {error}") from error


@contextmanager
def _dask(config: WorkersConfig) -> Iterator[Any]:
    _knock(config.address)
    from prefect_dask import DaskTaskRunner

    logging.getLogger("distributed").setLevel(logging.WARNING)
    cluster = {
        "n_workers": config.count,
        "threads_per_worker": 1,
        "processes": True,
        "memory_limit": 0,  # by default a worker is killed that takes more than its share of this machine's
        "dashboard_address": "127.0.0.1:0",
        "env": _environment(),
    }
    local = {"cluster_class": "distributed.LocalCluster", "cluster_kwargs": cluster}
    with DaskTaskRunner(**local if config.address is None else {"address": config.address}) as runner:
        with uninterrupted():
            assert runner.client  # starts the cluster, or connects
        yield runner


@contextmanager
def _ray(config: WorkersConfig, *, num_gpus: int) -> Iterator[Any]:
    _knock(config.address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when ray is imported
    from prefect_ray import RayTaskRunner
    from prefect_ray.context import remote_options

    cluster: dict[str, Any] = {
        "address": "local",  # one of its own, whatever runs here
        "num_cpus": config.count,
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        "runtime_env": {"env_vars": _environment()},
    }
    runner = RayTaskRunner(init_kwargs=cluster) if config.address is None else RayTaskRunner(address=config.address)
    with remote_options(num_gpus=num_gpus), runner:
        yield runner


def _environment() -> dict[str, str]:
    """Returns what makes a process of this machine import what this one does, and log to Prefect."""
    given = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join([*map(str, SOURCES), *filter(None, [given])])
    return {"PYTHONPATH": path, "PREFECT_LOGGING_EXTRA_LOGGERS": LOGGERS}
