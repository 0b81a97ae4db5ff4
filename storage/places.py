"""Where things are kept: what a store may be called, and this machine's own folder for what can be had again."""

import os
import re
from pathlib import Path

CREDENTIALS = re.compile(r"//[^/@\s]*@|//[^@\s]*:[^@\s]*@|[?#]")  # a secret key may hold slashes


def cache_folder() -> Path:
    """Returns the folder; it need not exist. ``XDG_CACHE_HOME`` moves it, as it does for other programs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lsp"


def check_uri(uri: str) -> str:
    """Returns ``uri`` if it carries no secret. Errors: ``ValueError``, which does not repeat it."""
    if "://" in uri and CREDENTIALS.search(uri):
        raise ValueError(
            "the store's URI carries credentials or a query, which would end up in logs and reports: give them in the "
            "environment (AWS_ACCESS_KEY_ID, ...) or in a Prefect block (store: block://remote-file-system/NAME)"
        )
    return uri
