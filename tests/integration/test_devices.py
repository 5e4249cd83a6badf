"""Where tensors are: on a device whose tensors cannot be mixed with those of the CPU, and what goes there and back."""

import json
from typing import Any

import pytest

from tests.family_makers import PIPELINES
from tests.faults.fork_server import shared_server

KNOWN: dict[str, dict[str, int]] = {
    # Lists of captions of their own length. The tables are uploaded here only: on CUDA they stay.
    "z_image": {"wait: z_image.py _lengths": 1, "to the device: z_image.py predict": 3},
    "qwen_image": {"to the device: dits.py predict": 1},  # the transformer's own, of a number
}
"""Family → what crosses in a micro-batch between two rows of the metrics, though nothing should."""


@pytest.fixture(scope="module")
def crossings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("devices")
    shared_server().call("tests.integration.on_another_device:main", [str(folder)], folder / "log")
    return json.loads((folder / "crossings.json").read_text())


@pytest.mark.parametrize("name", PIPELINES)
def test_nothing_crosses_in_a_step(name: str, crossings: Any) -> None:
    """The host would wait for the device, and the device then for the host."""
    assert crossings[name] == KNOWN.get(name, {})


@pytest.mark.parametrize("name", ["everything", "autoencoder"])
def test_validation_previews_and_adapters_train_there(name: str, crossings: Any) -> None:
    assert sum(crossings[name].values()) > 0, "a recorder that sees nothing"
