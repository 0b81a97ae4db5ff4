"""The flow ``benchmark``: one of the benchmarks of the command line, its figures as an artifact and a file."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from prefect import flow
from pydantic import Field

from flows.artifacts import show_markdown, show_table
from flows.benchmark import Shape, grid, train
from flows.benchmark_decode import settings_of
from flows.benchmark_store import store
from flows.config import Ratio
from flows.operated import VERSION, operated
from flows.sources import Section
from lsp_core.decode_benchmark import decode
from lsp_core.decode_report import table as decode_table
from lsp_core.distributed_benchmark import DistributedSettings, distributed
from lsp_core.distributed_benchmark import table as distributed_table
from storage.files import write_whole

FIGURES = "benchmark.json"
Arm = Literal["dense", "untied", "untied-ready", "ours", "ours-ready", "latent-rebuilt", "latent-rotated"]


class ShapeConfig(Section):
    """The model and the data of grid and train; the defaults are OPT-125M's, randomly initialized."""

    blocks: int = Field(12, ge=1, description="Blocks.")
    hidden: int = Field(768, ge=8, description="Hidden width.")
    feed_forward: int = Field(3072, ge=8, description="Width of the feed-forward layers.")
    heads: int = Field(12, ge=1, description="Attention heads; they divide the hidden width.")
    vocabulary: int = Field(50_272, ge=8, description="Tokens of the vocabulary.")
    sequences: int = Field(16, ge=1, description="Sequences that the grid is measured on.")
    length: int = Field(512, ge=2, description="Tokens a sequence.")
    candidates_per_block: int = Field(2, ge=1, description="Units of a block that are measured, at one count each.")
    micro_batches: int = Field(4, ge=1, description="Micro-batches of the training step, two sequences each.")
    ratio: Ratio = Field(0.7, description="Share of the targeted layers' parameters that the training step removes.")
    check_length: int = Field(96, ge=2, description="Tokens a sequence of the comparison of gradients in float64.")


class StoreConfig(Section):
    """What the store benchmark writes, in a temporary folder."""

    file_mib: int = Field(1024, ge=1, description="Size of the file that is digested, in MiB.")
    rows: int = Field(10_000, ge=1, description="Rows of the grid.")
    points: int = Field(7, ge=1, description="Points of a row.")
    left: int = Field(10, ge=0, description="Rows that are left to find.")


class DecodeBenchmarkConfig(Section):
    """What decoding is timed at."""

    model: str = Field(
        "llama-810m",
        min_length=1,
        description="A shape (llama-810m, llama-2-7b, llama-2-13b, qwen3-4b, opt-125m), a folder, or a config.json.",
    )
    context: tuple[Annotated[int, Field(ge=2)], ...] = Field((512,), min_length=1, description="Tokens in the cache.")
    batch: tuple[Annotated[int, Field(ge=1)], ...] = Field((1,), min_length=1, description="Sequences at once.")
    ratio: tuple[Ratio, ...] = Field((0.3, 0.7), min_length=1, description="Shares of parameters removed.")
    dtype: tuple[Literal["float32", "bfloat16", "float16"], ...] = Field(
        ("float32",), min_length=1, description="Dtypes of the weights."
    )
    arms: tuple[Arm, ...] = Field((), description="What is measured; empty: all.")
    rounds: int = Field(9, ge=2, description="Rounds in which the arms take turns.")
    tokens: int = Field(4, ge=1, description="Steps of an arm in a round.")
    threads: int | None = Field(None, ge=1, description="Threads of torch on a CPU; none: as many as it takes.")


class DistributedBenchmarkConfig(Section):
    """What training on several processes is timed at."""

    processes: int = Field(2, ge=2, description="Processes of one thread each, or of a GPU each.")
    ratio: Ratio = Field(0.5, description="Share of parameters removed.")
    steps: int = Field(2, ge=1, description="Steps of an arm in a round.")
    rounds: int = Field(3, ge=1, description="Rounds in which the arms take turns.")


class BenchmarkConfig(Section):
    """Which benchmark is run, and its settings; those of the others have no effect."""

    benchmark: Literal["grid", "train", "store", "decode", "distributed"] = Field(
        description="grid: the streamed KL grid against full forward passes; train: one optimizer step against the "
        "obvious loop; store: digests and a large grid; decode: tokens per second; distributed: training on several "
        "processes against one."
    )
    shape: ShapeConfig = Field(ShapeConfig(), description="Of grid and train: the model and the data.")
    store: StoreConfig = Field(StoreConfig(), description="Of store: what is written.")
    decode: DecodeBenchmarkConfig = Field(DecodeBenchmarkConfig(), description="Of decode: what is timed.")
    distributed: DistributedBenchmarkConfig = Field(
        DistributedBenchmarkConfig(), description="Of distributed: what is timed."
    )
    device: str | None = Field(None, description="cpu, cuda or cuda:1; none: a GPU where there is one.")
    output: Path = Field(Path("runs/benchmark"), description="Folder for benchmark.json.")


@flow(name="benchmark", version=VERSION, persist_result=False)
@operated
def benchmark_flow(config: BenchmarkConfig) -> dict[str, Any]:
    """Runs one benchmark, writes and returns its figures. Nothing of it is cached."""
    config.output.mkdir(parents=True, exist_ok=True)
    content = measured(config)
    write_whole(config.output / FIGURES, json.dumps(content, indent=2, allow_nan=False) + "\n")
    key, title = f"benchmark-{config.benchmark}", f"benchmark {config.benchmark}"
    if config.benchmark == "decode":
        show_markdown(key, lambda: decode_table(content), title)
    elif config.benchmark == "distributed":
        show_markdown(key, lambda: ["```text", *distributed_table(content), "```"], title)
    else:
        show_table(key, lambda: figure_rows(content), title)
    return content


def measured(config: BenchmarkConfig) -> dict[str, Any]:
    """Returns the figures of the benchmark that ``config`` names.

    Errors: ``ValueError`` for what cannot be measured.
    """
    if config.benchmark == "decode":
        return decode(settings_of(config.decode.model_dump() | {"device": config.device}), None)
    if config.benchmark == "store":
        sizes = config.store.model_dump()
        return store(file_bytes=sizes.pop("file_mib") << 20, **sizes)
    if config.benchmark == "distributed":
        device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
        return distributed(DistributedSettings(**config.distributed.model_dump(), device=device))
    function = {"grid": grid, "train": train}[config.benchmark]
    given = {} if config.device is None else {"device": config.device}
    return function(Shape(**config.shape.model_dump(), **given))


def figure_rows(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns every figure as a row, those of listed things with the name of the thing."""
    rows = []
    for name, value in content.items():
        for one in value if isinstance(value, list) else [{name: value}]:
            of = f"{one['name']}: " if "name" in one else ""
            rows += [{"figure": f"{of}{key}", "value": figure} for key, figure in one.items() if key != "name"]
    return rows
