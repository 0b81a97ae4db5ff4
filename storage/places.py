"""Where this machine keeps what can be had again: digests, downloads, measured rates."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Returns the folder; it need not exist. ``XDG_CACHE_HOME`` moves it, as it does for other programs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lsp"
