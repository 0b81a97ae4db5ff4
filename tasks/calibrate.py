"""calibrate: text -> token blocks."""

import numpy as np

from storage.grid import save_tokens
from tasks.caching import Work, stage
from tasks.models import TokenizerSource, load_tokenizer
from tasks.text import Part, TextOrigin, joined_windows, token_windows


@stage()
def calibrate(
    work: Work,
    *,
    text: TextOrigin,
    tokenizer: TokenizerSource,
    length: int,
    take: int,
    pool: int,
    part: Part,
    seed: int,
) -> None:
    """Publishes ``take`` sequences of ``length`` tokens, drawn from the first ``pool`` of one part of ``text``."""
    loaded = load_tokenizer(tokenizer)
    ids = token_windows(text, loaded, length=length, take=take, pool=pool, part=part, seed=seed)
    _check(ids, len(loaded))
    save_tokens(work.output, ids)


@stage(name="calibrate")
def calibrate_test(
    work: Work, *, text: TextOrigin, tokenizer: TokenizerSource, length: int, max_tokens: int | None, bos: str
) -> None:
    """Publishes the whole of ``text`` as non-overlapping windows of ``length`` tokens."""
    loaded = load_tokenizer(tokenizer)
    ids = joined_windows(text, loaded, length=length, max_tokens=max_tokens, bos=bos)
    _check(ids, len(loaded))
    save_tokens(work.output, ids)


def _check(ids: np.ndarray, vocabulary: int) -> None:
    assert ids.min() >= 0
    assert ids.max() < vocabulary
