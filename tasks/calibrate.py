"""calibrate: text -> token blocks."""

import numpy as np

from storage.grid import save_tokens
from tasks.artifacts import write_json
from tasks.caching import Work, stage
from tasks.mixing import shuffled
from tasks.models import TokenizerSource, load_tokenizer
from tasks.text import Part, TextOrigin
from tasks.windows import Packing, all_documents, draw, joined_windows

MIX = "mix.json"


@stage()
def calibrate(
    work: Work,
    *,
    text: TextOrigin | list[TextOrigin],
    tokenizer: TokenizerSource,
    length: int,
    take: int | list[int],
    pool: int | list[int],
    part: Part,
    seed: int,
    packing: Packing = "windows",
) -> None:
    """Publishes ``take`` sequences of ``length`` tokens, drawn from the first ``pool`` of one part of ``text``.

    Of a mix, ``text``, ``take`` and ``pool`` are lists, and the sequences of all texts are shuffled together;
    ``mix.json`` tells how many came from the text of which digest, in the order of the texts.
    """
    loaded = load_tokenizer(tokenizer)
    texts, counts, pools = (value if isinstance(value, list) else [value] for value in (text, take, pool))
    parts = [
        draw(origin, loaded, length=length, take=count, pool=among, part=part, seed=seed, packing=packing)
        for origin, count, among in zip(texts, counts, pools, strict=True)
        if count
    ]
    ids = shuffled(parts, seed) if isinstance(text, list) else parts[0]
    _check(ids, len(loaded))
    save_tokens(work.output, ids)
    if isinstance(text, list):
        sources = [{"text": origin.digest, "sequences": count} for origin, count in zip(text, counts, strict=True)]
        write_json(work.output / MIX, sources)


@stage(name="calibrate")
def calibrate_test(
    work: Work,
    *,
    text: TextOrigin,
    tokenizer: TokenizerSource,
    length: int,
    max_tokens: int | None,
    bos: str = "none",
    packing: Packing = "windows",
) -> None:
    """Publishes the whole of ``text`` as non-overlapping windows of ``length`` tokens, or document by document."""
    loaded = load_tokenizer(tokenizer)
    if packing == "windows":
        ids = joined_windows(text, loaded, length=length, max_tokens=max_tokens, bos=bos)
    else:
        ids = all_documents(text, loaded, length=length, max_tokens=max_tokens)
    _check(ids, len(loaded))
    save_tokens(work.output, ids)


def _check(ids: np.ndarray, vocabulary: int) -> None:
    assert ids.min() >= 0
    assert ids.max() < vocabulary
