"""Whether a hub id can be read: one early request, before the libraries request each file five times."""

import os
from functools import cache
from pathlib import Path

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.file_download import repo_folder_name

_TIMEOUT_S = 10.0
_FILE = "config.json"
"""The requested file; it need not exist, because the response shows whether the repository does."""


def hub_problem(name: str, revision: str | None, option: str) -> str | None:
    """Why a folder or hub id cannot be loaded; None for a local folder, or a repository that is cached or reachable.

    Args:
        name: the option's value.
        revision: branch, tag or commit.
        option: dotted option, which the sentence starts with.
    """
    if os.path.exists(name) or (reason := _refusal(name, revision)) is None:
        return None
    fetch = f"python scripts/download_diffusers.py -m {name} -o FOLDER"
    if option != "model.pretrained":
        fetch = f"hf download {name} --local-dir FOLDER"
    remedy = f"Correct it, or fetch it where the hub can be reached ({fetch}) and write {option}=FOLDER"
    return f"{option}: {name!r} is no folder here, and {reason}. {remedy}"


@cache
def _refusal(name: str, revision: str | None) -> str | None:
    """The problem of a hub id."""
    try:
        url = hf_hub_url(name, _FILE, revision=revision)
        snapshots = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"), "snapshots")
        if snapshots.is_dir() and any(snapshots.iterdir()):
            return None
        if constants.is_offline_mode():
            return "it is not in the local cache, and HF_HUB_OFFLINE disables requests to the hub"
        get_hf_file_metadata(url, timeout=_TIMEOUT_S)
    except EntryNotFoundError:
        return None
    except HFValidationError:
        return "no hub id either (owner/name)"
    except GatedRepoError:
        terms = f"accept them on https://huggingface.co/{name} and log in (hf auth login, or HF_TOKEN)"
        return f"the hub gives it only to users who accepted its terms: {terms}"
    except RepositoryNotFoundError:
        return "the hub has no such repository, or shows it only after hf auth login (or with HF_TOKEN)"
    except Exception as error:  # which library makes the request, and what it raises, differs between versions
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return f"it is not in the local cache, and the hub cannot be reached ({reason})"
    return None
