"""Tensors of a pickled checkpoint (.ckpt, .pt, .pth, .bin) → safetensors, which the rest of this project reads; and a
pipeline folder of Stable Diffusion 1.x, 2.x or XL → one file in the original layout, for ComfyUI and A1111.

    python scripts/convert_checkpoint.py old.ckpt new.safetensors [--key state_dict]
    python scripts/convert_checkpoint.py runs/mine/current_pipeline mine.safetensors

A pickle is a program. So it is opened here only, with torch's unpickler that knows tensors and nothing else, in a
process of its own: with an empty environment, without network where the system lets a process give it up, and with
limits on memory, files and time. A file that needs more than tensors is refused; there is no way round.
"""

import argparse
import ctypes
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sd_training.checkpoint.folder import whole_file
from sd_training.cli import run_cli
from sd_training.config.plan import counted
from sd_training.config.value_types import path_argument
from sd_training.errors import ConfigError, DataError

OLDEST_TORCH = (2, 10)
"""Older ones ran code in spite of `weights_only=True` (CVE-2025-32434, CVE-2026-24747)."""
MEMORY_PER_BYTE = 4
"""Memory that the process may take per byte of the file, besides `SPARE_BYTES`; a packed file that needs more is
refused."""
SPARE_BYTES = 2 << 30
MAX_ENTRIES = 10_000_000
"""Of one file [count]. A container may stand in many places, so few bytes can name more than any time suffices for."""
CPU_S = 3600
"""Processor time that the process may take [s]."""
_KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR", "SYSTEMROOT", "OMP_NUM_THREADS")
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_INSIDE = "--inside"


def tensors_in(value: Any) -> dict[str, Any]:
    """Names and tensors of nested dicts and lists; names are joined by dots.

    Raises:
        DataError: two tensors have one name, or there is more than the limit allows.
        RecursionError: containers are nested too deeply, or one holds itself.
    """
    import torch

    found: dict[str, Any] = {}
    for number, (name, entry) in enumerate(_entries(value, "")):
        if number > MAX_ENTRIES:
            raise DataError(f"more than {MAX_ENTRIES:,} entries; no checkpoint needs so many")
        if isinstance(entry, torch.Tensor):
            if name in found:
                raise DataError(f"two of its tensors have the name '{name[:60]}'; --key takes one part of the file")
            found[name] = entry
    return found


def _entries(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The value and all that it holds."""
    yield path or "tensor", value
    if isinstance(value, (dict, list, tuple)):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _entries(entry, f"{path}.{key}" if path else str(key))


def load(path: Path, key: str | None = None) -> dict[str, Any]:
    """The tensors of a pickled checkpoint.

    Args:
        path: the file.
        key: which entry of it; None takes `state_dict` where there is one, else everything.

    Raises:
        DataError: it needs more than tensors, is damaged, holds none, or holds them so that names are not clear.
    """
    content = _opened(path)
    try:
        return _chosen(content, key)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    except RecursionError:
        raise DataError(f"{path}: nested too deeply, or holds itself") from None
    except MemoryError:
        raise DataError(f"{path}: cannot be read: not enough memory") from None


def _opened(path: Path) -> Any:
    """What torch's unpickler for tensors makes of it."""
    import torch

    if tuple(int(number) for number in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        raise ConfigError(f"torch {torch.__version__}: is too old to open a pickle; 2.10 or newer is needed")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (MemoryError, OSError) as error:
        raise DataError(f"{path}: cannot be read: {error or 'not enough memory'}") from None
    except Exception as error:  # pickle, zip and torch raise many kinds
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"{path}: holds more than tensors, or is damaged; it is not opened ({type(error).__name__}: {reason})"
        ) from None


def _chosen(content: Any, key: str | None) -> dict[str, Any]:
    """The tensors of one entry, each with memory of its own."""
    chosen = key or ("state_dict" if isinstance(content, dict) and isinstance(content.get("state_dict"), dict) else "")
    if chosen:
        if not isinstance(content, dict) or chosen not in content:
            raise DataError(f"has no entry {chosen!r}; it has {_some(content)}")
        content = content[chosen]
    found = {name: _stored(name, tensor) for name, tensor in tensors_in(content).items()}
    if not found:
        raise DataError(f"holds no tensors; it has {_some(content)}")
    return found


def _stored(name: str, tensor: Any) -> Any:
    """A dense copy."""
    try:
        return tensor.detach().contiguous().clone()
    except (RuntimeError, TypeError) as error:  # sparse ones, and those that there is no memory for
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"tensor '{name[:60]}' ({tensor.layout}) cannot be stored: {reason}") from None


def _some(content: Any) -> str:
    names = [str(key)[:60] for key in content][:10] if isinstance(content, dict) else [type(content).__name__]
    return ", ".join(names) or "nothing"


def convert(source: Path, target: Path, key: str | None = None) -> int:
    """Writes the tensors of `source` to `target`; returns how many. `target` appears when it is whole.

    Raises:
        DataError: as `load`; also for a kind of tensor that safetensors does not know.
    """
    from safetensors.torch import save_file

    found = load(source, key)
    try:
        with whole_file(target) as beside:
            save_file(found, beside, metadata={"format": "pt"})
    except Exception as error:
        raise DataError(f"{target}: cannot be written: {error}") from None
    return len(found)


def give_up_network() -> bool:
    """Moves this process into a network of its own without any device; False where the system refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    flags = _CLONE_NEWNET if os.geteuid() == 0 else _CLONE_NEWNET | _CLONE_NEWUSER
    try:
        return int(libc.unshare(flags)) == 0
    except AttributeError:  # no Linux
        return False


def limit_resources(size: int) -> None:
    """For a file of `size` bytes, besides what this process has by now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    memory = pages * resource.getpagesize() + MEMORY_PER_BYTE * size + SPARE_BYTES
    for kind, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, MEMORY_PER_BYTE * size + SPARE_BYTES),
        (resource.RLIMIT_CPU, CPU_S),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def inside(source: Path, target: Path, key: str | None) -> None:
    """What the process of its own does."""
    has_network = not give_up_network()
    import safetensors.torch  # noqa: F401  # before the limit, which their libraries need not fit in
    import torch  # noqa: F401

    limit_resources(source.stat().st_size)
    print(f"{target}: {counted(convert(source, target, key), 'tensor')}, {target.stat().st_size:,} bytes")
    how = "with the network, which this system does not let a process give up" if has_network else "without network"
    print(f"opened {how}")


def main() -> None:
    """Parse, check, start the process that opens the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="pickled checkpoint, or pipeline folder")
    parser.add_argument("target", type=path_argument, help="safetensors file to write; must not exist")
    parser.add_argument("--key", help="entry of the checkpoint; default: state_dict where there is one, else all")
    parser.add_argument(_INSIDE, action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        inside(given.source, given.target, given.key)
        return
    if not given.source.exists():
        raise DataError(f"{given.source}: no such file")
    if given.target.exists():
        raise ConfigError(f"{given.target}: exists; give another name, or remove it")
    if given.target.suffix != ".safetensors" or not given.target.absolute().parent.is_dir():
        raise ConfigError(f"{given.target}: must be a *.safetensors file in a folder that exists")
    if given.source.is_dir():
        from sd_training.export.pipeline import CURRENT  # these take seconds to import
        from sd_training.export.single_file import write_single_file

        folder = given.source / CURRENT if (given.source / CURRENT).is_dir() else given.source
        print(f"{given.target}: {counted(write_single_file(folder, given.target), 'tensor')}")
        return
    words = [sys.executable, "-I", str(Path(__file__).resolve()), str(given.source.absolute())]
    words += [str(given.target.absolute()), _INSIDE, *([f"--key={given.key}"] if given.key else [])]
    environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    status = subprocess.run(words, env=environment, stdin=subprocess.DEVNULL).returncode
    if status == 2:  # it has said why
        raise SystemExit(2)
    if status:
        given.target.with_name(f"{given.target.name}.partial").unlink(missing_ok=True)
        raise DataError(f"{given.source}: the process that opened it ended with status {status}; nothing was written")


if __name__ == "__main__":
    run_cli(main)
