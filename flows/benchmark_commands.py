"""The subcommands of ``benchmark``."""

from pathlib import Path

from pydantic import BaseModel, Field
from pydantic_settings import CliApp, CliImplicitFlag, CliPositionalArg, CliSubCommand

from flows.config import Ratio
from flows.printing import print_facts

Json = CliImplicitFlag[bool]


class BenchmarkOptions(BaseModel):
    """What every ``benchmark`` command takes."""

    json_: Json = Field(False, alias="json", description="Print one JSON object instead of a table.")


class BenchmarkGrid(BenchmarkOptions):
    """Measuring the KL grid: streamed, against a full forward pass per candidate."""

    def cli_cmd(self) -> None:
        from flows.benchmark import grid

        print_facts(grid(), as_json=self.json_)


class BenchmarkTrain(BenchmarkOptions):
    """One optimizer step, against teacher, QR and full logits in every micro-batch."""

    def cli_cmd(self) -> None:
        from flows.benchmark import train

        print_facts(train(), as_json=self.json_)


class BenchmarkStore(BenchmarkOptions):
    """Digests against sha256sum, and a large grid."""

    def cli_cmd(self) -> None:
        from flows.benchmark_store import store

        print_facts(store(), as_json=self.json_)


class BenchmarkDecode(BenchmarkOptions):
    """Tokens a second of dense, of untied factor pairs, of tied groups, and of these with the latent cache.

    All with random weights, side by side in one run. ``python -m lsp_core.decode_benchmark`` is the same where only
    torch and transformers are installed.
    """

    model: CliPositionalArg[str] = Field(
        description="A shape (llama-810m, llama-2-7b, llama-2-13b, qwen3-4b, opt-125m), a folder, or a config.json."
    )
    context: tuple[int, ...] = Field((512, 4096, 16_384), description="Tokens in the cache.")
    batch: tuple[int, ...] = Field((1,), description="Sequences that are decoded together.")
    ratio: tuple[Ratio, ...] = Field((0.3, 0.7), description="Share of the targeted layers' parameters removed.")
    dtype: tuple[str, ...] = Field(("float32",), description="float32, bfloat16, float16.")
    arms: tuple[str, ...] = Field(
        (),
        description="What is measured: dense, untied, ours, both -ready (laid out or fused for it), "
        "latent-rebuilt, latent-rotated, and each with -tuned, on a GPU, compiled in a CUDA graph; by default all.",
    )
    rounds: int = Field(9, description="Rounds in which the arms take turns.")
    tokens: int = Field(4, description="Steps of an arm in a round.")
    threads: int | None = Field(None, description="Threads of torch on a CPU, by default as many as it takes.")
    device: str | None = Field(None, description="cpu, cuda or cuda:1; by default a GPU where there is one.")
    output: Path | None = Field(None, description="File for the JSON, rewritten whenever a context is done.")

    def cli_cmd(self) -> None:
        from flows.benchmark_decode import decode

        options = {name: getattr(self, name) for name in type(self).model_fields if name not in ("json_", "output")}
        decode(options, self.output, as_json=self.json_)


class BenchmarkScaling(BenchmarkOptions):
    """What 1 to 1,024 GPUs would take for the long stages: a simulation on paper, with its assumptions."""

    model: CliPositionalArg[str] = Field("llama-2-7b", description="A shape, a folder, or a config.json.")
    ratio: Ratio = Field(0.5, description="Share of the targeted layers' parameters removed.")

    def cli_cmd(self) -> None:
        from flows.scaling import Job, print_scaling, scaling

        print_scaling(scaling(Job(model=self.model, ratio=self.ratio)), as_json=self.json_)


class BenchmarkDistributed(BenchmarkOptions):
    """Training by several processes against one, and orthonormalization by owners against the same in every process.

    ``python -m lsp_core.distributed_benchmark`` is the same, with more options, where only torch and transformers are
    installed.
    """

    processes: int = Field(2, ge=2, description="Processes of one thread each, or of a GPU each.")
    device: str = Field("cpu", description="cpu or cuda.")
    rounds: int = Field(3, ge=1, description="Rounds in which the arms take turns.")

    def cli_cmd(self) -> None:
        from flows.benchmark_distributed import distributed

        distributed(self.processes, self.device, self.rounds, as_json=self.json_)


class Benchmark(BaseModel):
    """Time and memory of the expensive parts against the obvious alternative, in one run."""

    grid: CliSubCommand[BenchmarkGrid]
    train: CliSubCommand[BenchmarkTrain]
    store: CliSubCommand[BenchmarkStore]
    decode: CliSubCommand[BenchmarkDecode]
    distributed: CliSubCommand[BenchmarkDistributed]
    scaling: CliSubCommand[BenchmarkScaling]

    def cli_cmd(self) -> None:
        CliApp.run_subcommand(self)
