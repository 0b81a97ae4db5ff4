"""``python -m flows benchmark distributed``: measured by ``lsp_core`` and printed."""

import json

from lsp_core.distributed_benchmark import DistributedSettings, table
from lsp_core.distributed_benchmark import distributed as measure


def distributed(processes: int, device: str, rounds: int, *, as_json: bool) -> None:
    """Measures, and prints a table or one JSON object. Errors: as ``DistributedSettings``."""
    result = measure(DistributedSettings(processes=processes, device=device, rounds=rounds))
    print(json.dumps(result) if as_json else "\n".join(table(result)))
