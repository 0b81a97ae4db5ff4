"""Opening the store that a configuration names: a folder, an fsspec URI, or a Prefect block that holds its secrets."""

from functools import cache
from pathlib import Path
from typing import Any

from storage.digest import digest_bytes
from storage.faults import StoreError
from storage.files import limits
from storage.store import Store

BLOCK = "block://"


def open_store(place: str, *, verify: bool = False, writable: bool = True) -> Store:
    """Returns the store at ``place``.

    ``block://remote-file-system/NAME`` is the Prefect block of that name, whose settings are the file system's.
    Errors: ``StoreError`` if it cannot be had or used.
    """
    if not place.startswith(BLOCK):
        return Store(place, verify=verify, writable=writable)
    block = _block(place)
    return Store(block.basepath, verify=verify, writable=writable, options=block.settings, place=place)


def results_storage(place: str, store: Store) -> Any:
    """Returns where Prefect keeps its own records: in the store, as what Prefect takes for a task's result storage."""
    if place.startswith(BLOCK):
        return _block(place)
    return Path(store.uri) if store.files.is_local else _results_block(store.uri)


@cache
def _results_block(uri: str) -> Any:
    from prefect.filesystems import RemoteFileSystem

    block = RemoteFileSystem(basepath=uri, settings=limits(uri))  # the environment holds the secrets
    block.save(f"lsp-store-{digest_bytes(uri.encode())[:16]}", overwrite=True)
    return block


@cache
def _block(place: str) -> Any:
    from prefect.filesystems import RemoteFileSystem

    kind, _, name = place.removeprefix(BLOCK).partition("/")
    if kind != "remote-file-system" or not name:
        raise StoreError(f"store {place!r}: a block is named as block://remote-file-system/NAME")
    try:
        return RemoteFileSystem.load(name)
    except ValueError as error:
        raise StoreError(
            f"store {place!r}: {str(error).splitlines()[0]}; make it in Prefect's UI under Blocks"
        ) from None
