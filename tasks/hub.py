"""What of the Hugging Face hub the stages need: the commit behind a name, and errors that say which it was."""

import re
from typing import Literal

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, HTTPError, RepositoryNotFoundError, RevisionNotFoundError

from storage.faults import first_line

COMMIT = re.compile(r"[0-9a-f]{40}")


def commit_of(kind: Literal["model", "dataset"], name: str, revision: str | None) -> str:
    """Returns the commit that ``revision`` of a hub repository, or its newest, stands for; a commit is its own.

    Errors: ``ValueError`` if there is no such repository or revision, ``ConnectionError`` if the hub is out of reach.
    """
    if revision is not None and COMMIT.fullmatch(revision):
        return revision
    try:
        commit = HfApi().repo_info(name, repo_type=kind, revision=revision).sha
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise ValueError(f"{kind} {name!r} is neither a local folder nor on the hub: {first_line(error)}") from None
    except (HTTPError, OSError) as error:
        message = (
            f"{name!r} is no local folder (see that the path is right, from where this runs), and the hub cannot be "
            f"asked for a {kind} of that name: {first_line(error)}"
        )
        raise ConnectionError(message) from error
    assert commit is not None
    return commit
