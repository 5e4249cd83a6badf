"""What several tests of models stand on."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny pipelines that a module of tests saves and loads."""
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module")
def process_group(root: Path) -> Iterator[None]:
    """One process, over gloo, without a port."""
    dist.init_process_group("gloo", store=dist.FileStore(str(root / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
