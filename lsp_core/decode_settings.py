"""What the decode benchmark measures."""

from dataclasses import dataclass

import torch

from lsp_core.allocation import check_ratio

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DENSE, UNTIED, UNTIED_READY, OURS, READY, REBUILT, ROTATED = KINDS = (
    "dense",
    "untied",
    "untied-ready",  # made ready for decoding: ``fuse`` on a GPU, ``lay_out`` on a CPU
    "ours",
    "ours-ready",  # likewise, and so are those with a latent cache
    "latent-rebuilt",
    "latent-rotated",
)
LATENT = (REBUILT, ROTATED)
MADE_READY = (UNTIED_READY, READY, *LATENT)
TUNED = "-tuned"
ARMS = tuple(kind + suffix for kind in KINDS for suffix in ("", TUNED))
LEAST = {"contexts": 2, "batches": 1, "rounds": 2, "tokens": 1, "threads": 1}


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """Every arm for each of ``dtypes`` x ``batches`` x ``contexts``, the compressed ones at each of ``ratios``.

    ``model``: a named shape, a folder with a config.json, or a config's JSON file; of a compressed model the units are
    its own and ``ratios`` do not count. ``rounds`` in which the arms take turns of ``tokens`` steps, fewer where they
    are slow.
    ``threads``: of torch on a CPU; None: as they are. ``device``: "cpu", "cuda" or "cuda:1"; None: a GPU
    where there is one.
    Errors: ``ValueError`` for numbers out of range and unknown names.
    """

    model: str
    contexts: tuple[int, ...] = (512, 4096, 16_384)
    batches: tuple[int, ...] = (1,)
    ratios: tuple[float, ...] = (0.3, 0.7)
    dtypes: tuple[str, ...] = ("float32",)
    arms: tuple[str, ...] = ARMS
    rounds: int = 9
    tokens: int = 4
    threads: int | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            values = getattr(self, name)
            for value in values if isinstance(values, tuple) else (values,):
                if value is not None and value < least:
                    raise ValueError(f"{name}: {value} is too few, {least} or more are needed")
        for name, allowed in (("arms", ARMS), ("dtypes", tuple(DTYPES))):
            for value in getattr(self, name):
                if value not in allowed:
                    raise ValueError(f"{name}: there is no {value!r}; there are {', '.join(allowed)}")
        for name in ("contexts", "batches", "ratios", "dtypes", "arms"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name}: give at least one, and each once")
        for ratio in self.ratios:
            check_ratio(ratio, 1.0)
        self._check_device()

    @property
    def place(self) -> str:
        """The device that is measured."""
        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def on_gpu(self) -> bool:
        return torch.device(self.place).type == "cuda"

    def _check_device(self) -> None:
        try:
            kind, index = torch.device(self.place).type, torch.device(self.place).index
        except RuntimeError:
            kind, index = "", None
        if kind not in ("cpu", "cuda"):
            raise ValueError(f"device: decoding is measured on cpu or cuda, not on {self.place!r}")
        if kind == "cuda" and not torch.cuda.is_available():
            raise ValueError("device: torch sees no GPU here; drop --device, or ask for cpu")
        if kind == "cuda" and index is not None and index >= torch.cuda.device_count():
            raise ValueError(f"device: there is no {self.place}, torch sees {torch.cuda.device_count()} GPUs")
