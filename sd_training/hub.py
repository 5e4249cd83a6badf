"""Whether a hub id can be read: asked once and early, before the libraries ask for each file, five times each."""

import os
from functools import cache
from pathlib import Path

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name

_TIMEOUT_S = 10.0
_FILE = "config.json"
"""Asked for; it need not be there, because the answer also tells that the repository is."""


def hub_problem(name: str, revision: str | None, option: str) -> str | None:
    """Why a folder or hub id cannot be loaded; None for a local folder, and for a repository that is cached or answers.

    Args:
        name: the option's value.
        revision: branch, tag or commit.
        option: dotted option, which the sentence starts with.
    """
    if os.path.exists(name):
        return None
    why = _refusal(name, revision)
    if why is None:
        return None
    fetch = f"python scripts/download_diffusers.py -m {name} -o FOLDER"
    if option != "model.pretrained":
        fetch = f"hf download {name} --local-dir FOLDER"
    return f"{option}: {name!r} is no folder here, and {why[0]}. {why[1].format(name=name, option=option, fetch=fetch)}"


def cached_file(name: str, file: str, revision: str | None) -> Path | None:
    """A file of a repository that was downloaded before; None where it is not in the cache."""
    try:
        path = try_to_load_from_cache(name, file, revision=revision)
    except HFValidationError:
        return None
    return Path(path) if isinstance(path, str) else None


@cache
def _refusal(name: str, revision: str | None) -> tuple[str, str] | None:
    """What is wrong with a hub id, and what to do."""
    fetch = "Correct the path, or fetch it where the hub can be reached ({fetch}) and write {option}=FOLDER"
    try:
        url = hf_hub_url(name, _FILE, revision=revision)
        if _is_cached(name):
            return None
        if constants.is_offline_mode():
            return "it is not in the local cache, and HF_HUB_OFFLINE keeps the hub from being asked", fetch
        get_hf_file_metadata(url, timeout=_TIMEOUT_S)
    except HFValidationError:
        return "no hub id either (owner/name)", "Correct the path"
    except GatedRepoError:
        return (
            "the hub gives it only to users who accepted its terms",
            "Accept them on https://huggingface.co/{name}, and log in (hf auth login, or HF_TOKEN)",
        )
    except RepositoryNotFoundError:
        return (
            "the hub has no such repository, or keeps it private",
            "Correct the name, or log in (hf auth login, or HF_TOKEN)",
        )
    except RevisionNotFoundError:
        return f"its repository on the hub has no revision {revision!r}", "Correct the revision"
    except EntryNotFoundError:
        return None
    except Exception as error:  # which library makes the request, and what it raises, differs between versions
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return f"it is not in the local cache, and the hub cannot be reached ({reason})", fetch
    return None


def _is_cached(name: str) -> bool:
    snapshots = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"), "snapshots")
    return snapshots.is_dir() and any(snapshots.iterdir())
