"""A folder that may not be entered, also for root, who may enter all."""

import builtins
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def locked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes the folder; the system refuses it and what is in it to this process from now on."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("scandir", "stat", "listdir"):
        monkeypatch.setattr(os, name, _refusing(getattr(os, name), folder, enters=name == "stat"))
    monkeypatch.setattr(builtins, "open", _refusing(builtins.open, folder, enters=True))
    return folder


def _refusing(call: Callable[..., Any], folder: Path, enters: bool) -> Callable[..., Any]:
    def refuse(path: Any = ".", *args: Any, **options: Any) -> Any:
        is_path = isinstance(path, (str, os.PathLike))
        inside = is_path and (folder in Path(path).parents or (not enters and Path(path) == folder))
        if inside:
            raise PermissionError(13, "Permission denied", str(path))
        return call(path, *args, **options)

    return refuse
