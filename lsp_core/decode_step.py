"""One decode step of a model at a fixed context, as it is, or compiled and replayed as a CUDA graph; and its timing."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, Cache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

MASKLESS = "sdpa_every_place"  # sdpa without a mask: transformers makes one under compile even where nothing is masked
AttentionInterface.register(MASKLESS, sdpa_attention_forward)

WARM_STEPS = 2
TURN_SECONDS = 2.0  # of one arm, at most about
COPY_RUNS = 5
COPY_BYTES = {"cpu": 1 << 29, "cuda": 1 << 31}  # several times the last-level cache


class DecodeStep:
    """Decodes the token at place ``context`` again and again: the token that it gives is the next one's input.

    ``position_ids`` (B, 1) hold ``context``; ``restore`` brings a cache that grew back to ``context`` tokens.
    """

    def __init__(
        self, model: PreTrainedModel, cache: Cache, batch: int, context: int, restore: Callable[[], None] | None = None
    ) -> None:
        device = model.device
        self._device = device.type
        self._tokens = torch.arange(batch, device=device).remainder(7).add(3).unsqueeze(1)
        self._positions = torch.full((batch, 1), context, device=device)
        self._model, self._cache, self._restore = model, cache, restore
        self._graph: torch.cuda.CUDAGraph | None = None
        self.logits: Tensor | None = None  # (B, 1, V) of the last step
        self.peak_bytes: int | None = None  # what a step allocates at its most; on a GPU
        self.seconds = 0.0  # of the last warm step

    @torch.no_grad()
    def __call__(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            self._run()
        if self._restore is not None:
            self._restore()

    def _run(self) -> None:
        outputs: Any = self._model(
            input_ids=self._tokens, position_ids=self._positions, past_key_values=self._cache, use_cache=True
        )
        self.logits = outputs.logits
        self._tokens.copy_(outputs.logits[:, -1:].argmax(-1))

    @torch.no_grad()
    def prepare(self, *, tuned: bool) -> None:
        """Takes the first steps, compiles and captures them where ``tuned``, and measures the memory of one.

        Errors: ``RuntimeError`` if the logits are not finite, or if the step cannot be captured.
        """
        if tuned:
            self._capture()
        else:
            for _ in range(WARM_STEPS):
                self()
            if self._tokens.is_cuda:
                self._measured(self)
        started = now(self._device)
        self()
        self.seconds = now(self._device) - started
        assert self.logits is not None
        if not self.logits.isfinite().all():
            raise RuntimeError(f"the logits of a {type(self._model).__name__} with random weights are not finite")

    def _capture(self) -> None:
        """Compiles the step with ``max-autotune`` and captures it; the graph is ours, so that a failure is an error."""
        model = self._model
        torch._dynamo.config.recompile_limit = 256  # every arm and context is another of the same function
        compiled = torch.compile(model.forward, mode="max-autotune-no-cudagraphs", fullgraph=True, dynamic=False)

        def run() -> None:
            outputs: Any = compiled(
                input_ids=self._tokens, position_ids=self._positions, past_key_values=self._cache, use_cache=True
            )
            self.logits = outputs.logits
            self._tokens.copy_(outputs.logits[:, -1:].argmax(-1))

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_STEPS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()

        def capture() -> None:
            with torch.cuda.graph(graph):
                run()

        self._measured(capture)
        self._compiled = run  # what the graph reads lives as long as this does
        self._graph = graph

    def _measured(self, action: Callable[[], None]) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        action()
        torch.cuda.synchronize()
        self.peak_bytes = torch.cuda.max_memory_allocated() - before

    def steps_at_a_time(self, most: int) -> int:
        """Returns how many steps one turn takes: ``most``, or fewer where they are slow."""
        return max(1, min(most, int(TURN_SECONDS / max(self.seconds, 1e-9))))


def now(device: str) -> float:
    """Returns the seconds of a clock, once the device has done what it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def timed_rounds(steps: Sequence[DecodeStep], rounds: int, tokens: int, device: str) -> list[list[float]]:
    """Returns the seconds of a step, a list by round for each of ``steps``, which take turns: drift hits all alike.

    ``tokens``: consecutive steps, fewer where they are slow, whose mean makes one figure.
    """
    seconds: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for step, figures in zip(steps, seconds, strict=True):
            count = step.steps_at_a_time(tokens)
            started = now(device)
            for _ in range(count):
                step()
            figures.append((now(device) - started) / count)
    return seconds


def copy_bandwidth(device: str) -> float:
    """Returns the bytes that ``Tensor.copy_`` reads and writes a second, the median of ``COPY_RUNS`` runs.

    A decode step reads and hardly writes: where that is quicker its share of this bandwidth may exceed 1.
    """
    size = COPY_BYTES[torch.device(device).type]
    source = torch.ones(size // 4, device=device)
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(COPY_RUNS):
        started = now(device)
        target.copy_(source)
        seconds.append(now(device) - started)
    return 2 * size / sorted(seconds)[COPY_RUNS // 2]
