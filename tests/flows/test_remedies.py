"""One line for every kind of failure: what went wrong, what to do, no secret."""

import httpx
import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError
from pydantic import ValidationError

from flows.config import CompressConfig
from flows.remedies import KEPT, LONGEST, MEMORY, error_line
from storage.faults import StoreFull
from tasks.running import StageTimeout

RESPONSE = httpx.Response(503, request=httpx.Request("GET", "https://hub/model"))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("training.epochs=0: raise it"), "training.epochs=0: raise it"),
        (StoreFull("'/disk' is full: free some"), "'/disk' is full: free some"),
        (StageTimeout("gather took longer: raise it"), "gather took longer: raise it"),
        (ValueError("two\n  lines"), "two lines"),
        (ValueError(), "ValueError"),
        (ConnectionError("no answer"), f"no answer: run again once it answers; {KEPT}"),
        (
            PermissionError(13, "Permission denied", "/root/x"),
            f"[Errno 13] Permission denied: '/root/x': see that it is there and may be read and written; {KEPT}",
        ),
        (
            HfHubHTTPError("503 Service Unavailable", response=RESPONSE),
            f"503 Service Unavailable: run again once the hub answers; HF_HUB_OFFLINE=1 takes what is here; {KEPT}",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
            f"CUDA out of memory. Tried to allocate 2 GiB: {MEMORY}",
        ),
        (
            ZeroDivisionError("division by zero"),
            f"division by zero: an unforeseen ZeroDivisionError, its traceback is in the log; {KEPT}",
        ),
    ],
)
def test_what_is_said(error: Exception, said: str) -> None:
    assert error_line(error) == said


def test_credentials_are_not_said_and_no_line_is_endless() -> None:
    assert error_line(ValueError("s3://key:secret@host/bucket")) == "s3://***@host/bucket"
    assert len(error_line(ValueError("x" * 10_000))) == LONGEST


def test_every_field_that_is_wrong_is_named_without_its_value() -> None:
    with pytest.raises(ValidationError) as caught:
        CompressConfig.model_validate({"model": {"name_or_path": "m"}, "micro_batch": 0, "store": "s3://a:secret@b/c"})
    line = error_line(caught.value)
    assert line.startswith("store: ")
    assert "; micro_batch: Input should be greater than or equal to 1" in line
    assert "secret" not in line
