"""calibrate_labelled: texts with labels -> padded rows of tokens and class ids, for the probe of an encoder."""

import numpy as np
import torch

from storage.tensors import save_tensors
from tasks.artifacts import write_json
from tasks.caching import Work, stage
from tasks.images import IMAGES
from tasks.models import TokenizerSource, load_tokenizer
from tasks.text import TextOrigin, labelled_documents


@stage(name="calibrate")
def calibrate_labelled(work: Work, *, text: TextOrigin, tokenizer: TokenizerSource, length: int) -> None:
    """Publishes ``tokens`` (N, T) int64, a row a text, cut to ``length`` and padded, and ``labels`` (N,) int64.

    Errors: ``ValueError`` for a tokenizer without padding, or a record without text or label.
    """
    loaded = load_tokenizer(tokenizer)
    if loaded.pad_token_id is None:
        raise ValueError(f"the tokenizer {tokenizer.folder} has no padding token: name its pad_token")
    records = [(content, label) for _, content, label in labelled_documents(text, loaded)]
    if not records:
        raise ValueError(f"{text.name} holds no labelled text: add some")
    rows = loaded([content for content, _ in records], truncation=True, max_length=length, padding="max_length")
    names = sorted({str(label) for _, label in records})
    labels = np.array([names.index(str(label)) for _, label in records])
    save_tensors(
        work.output,
        {"tokens": torch.tensor(rows["input_ids"], dtype=torch.int64), "labels": torch.from_numpy(labels)},
    )
    write_json(work.output / IMAGES, {"counts": [len(records)], "classes": names})
