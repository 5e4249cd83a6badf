"""A device that is none: its tensors lie in CPU memory, but say that they are on `simulated`, and an operation that
mixes them with others fails, as on a GPU. What goes between host and device is recorded, with the function that asked
for it.

Of the process that calls `begin` there is no way back; PyTorch has one backend of this kind ("PrivateUse1").
"""

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

import sd_training

NAME = "simulated"
_PACKAGE = str(Path(sd_training.__file__).parent)
_COPIES = {"aten._to_copy.default", "aten.copy_.default"}
_WAITING = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.equal.default"}
"""What makes the host wait for the device: `.item()`, `bool(tensor)`, `nonzero`, comparisons of whole tensors."""
crossings: Counter[str] = Counter()
"""What happened, and the package's own line → how often."""


class OnDevice(Tensor):
    """Behaves as the tensor in CPU memory that it stands for."""

    cpu_tensor: Tensor

    @staticmethod
    def __new__(cls, own: Tensor) -> "OnDevice":
        layout = {"strides": own.stride(), "storage_offset": own.storage_offset(), "dtype": own.dtype}
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, own.size(), **layout, device=torch.device(NAME, 0), requires_grad=own.requires_grad
        )
        made.cpu_tensor = own.detach()
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})

    def __deepcopy__(self, memo: Any) -> Tensor:
        copied = OnDevice(self.cpu_tensor.clone())
        return nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({self.cpu_tensor})"

    def storage(self) -> Any:
        return self.cpu_tensor.storage()

    def untyped_storage(self) -> Any:
        return self.cpu_tensor.untyped_storage()

    def data_ptr(self) -> int:
        return self.cpu_tensor.data_ptr()

    def tolist(self) -> Any:
        _record("wait")
        return self.cpu_tensor.tolist()

    def new_tensor(self, data: Any, **options: Any) -> Tensor:
        return torch.tensor(data, **{"dtype": self.dtype, "device": self.device} | options)


def begin() -> torch.device:
    """Every operation of this thread goes through here from now on."""
    _setup_privateuseone_for_python_backend(NAME, _Backend())
    for mode in (_Operations(), _FromPython()):
        mode.__enter__()  # type: ignore[attr-defined]
    return torch.device(NAME, 0)


class _Backend(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


class _FromPython(TorchFunctionMode):
    """`torch.tensor` makes a tensor where no mode sees it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if function in (torch.tensor, torch.as_tensor) and _is_ours(options.get("device")):
            return function(*args, **options | {"device": None}).to(options["device"])
        return function(*args, **options)


def _is_ours(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _run(function: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """An operation on the CPU; its results are where its tensors are, or on the device that it names."""
    name, tensors = str(function), [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    own = [tensor for tensor in tensors if isinstance(tensor, OnDevice)]
    if not own and not _is_ours(kwargs.get("device")):
        return function(*args, **kwargs)
    target = kwargs.get("device")
    is_ours = bool(own) if target is None else _is_ours(target)
    others = [tensor for tensor in tensors if not isinstance(tensor, OnDevice)]
    if name in _COPIES:
        if is_ours != bool(own) or (own and others):
            _record("to the device" if is_ours and others else "to the host")
    elif own and any(tensor.ndim for tensor in others):
        raise RuntimeError(f"{name}: tensors on different devices, {[tuple(tensor.shape) for tensor in tensors]}")
    elif name in _WAITING:
        _record("wait")
    options = {key: value for key, value in kwargs.items() if key != "non_blocking" or name not in _COPIES}
    if target is not None:
        options["device"] = torch.device("cpu") if is_ours else target
    known: dict[int, Any] = {}

    def taken_off(leaf: Any) -> Any:
        plain = leaf.cpu_tensor if isinstance(leaf, OnDevice) else leaf
        known[id(plain)] = leaf
        return plain

    def put_on(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not is_ours:
            return leaf
        return known[id(leaf)] if id(leaf) in known else OnDevice(leaf)

    return tree_map(put_on, function(*tree_map(taken_off, args), **tree_map(taken_off, options)))


def _record(what: str) -> None:
    frame: Any = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    asked = f"{Path(frame.f_code.co_filename).name} {frame.f_code.co_name}" if frame else "not by the package"
    crossings[f"{what}: {asked}"] += 1
