"""The 8-bit optimizer runs on the CPU for tests; the check that forbids it there looks at CUDA only."""

import pytest
import torch


@pytest.fixture
def any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
