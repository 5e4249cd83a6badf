"""The digest changes with every bit, and with the place of every number."""

import pytest
import torch

from sd_training.callbacks import numerics as digest
from sd_training.callbacks.numerics import bit_digest

INTEGERS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}


@pytest.mark.parametrize("dtype", INTEGERS)
def test_every_flipped_bit_changes_it(dtype: torch.dtype) -> None:
    tensors = [torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype), torch.zeros(4, dtype=dtype)]
    before = int(bit_digest(tensors))
    integers = INTEGERS[dtype]
    for tensor in tensors:
        bits = tensor.view(-1).view(integers)
        for place in range(len(bits)):
            for number in range(8 * tensor.element_size()):
                is_sign = number == 8 * tensor.element_size() - 1
                flip = torch.iinfo(integers).min if is_sign else 1 << number
                bits[place] ^= flip
                assert int(bit_digest(tensors)) != before
                bits[place] ^= flip
    assert int(bit_digest(tensors)) == before


def test_places_count_over_chunks_and_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.randn(100)
    whole = int(bit_digest([numbers]))
    monkeypatch.setattr(digest, "_CHUNK", 7)
    assert int(bit_digest([numbers])) == whole == int(bit_digest([numbers[:30], numbers[30:]]))
    swapped = numbers.clone()
    swapped[[3, 50]] = swapped[[50, 3]]
    assert int(bit_digest([swapped])) != whole
    assert int(bit_digest([-torch.zeros(1)])) != int(bit_digest([torch.zeros(1)]))


def test_layout_in_memory_does_not_count() -> None:
    image = torch.randn(2, 3, 4, 4)
    assert int(bit_digest([image])) == int(bit_digest([image.to(memory_format=torch.channels_last)]))
    assert int(bit_digest([])) == 0
