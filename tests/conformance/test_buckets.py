"""The gradient of bucketed batches against that of all samples at once.

A picture's loss is the mean over its own latent cells, so pictures of all sizes weigh the same in a batch. Over an
epoch in which every bucket holds whole batches

- each sample is in exactly one batch;
- the mean over the steps of the batch gradients is the gradient of the mean over all samples: bucketing does not bias
  it.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from sd_training.config.data_schema import DatasetParams
from sd_training.data.order.buckets import BucketTable
from sd_training.data.order.order import SampleOrder
from sd_training.diffusion import Objective
from tests.conformance.cases import draws_of, numbers, objective_for, settings, tensor

GLOBAL_BATCH, CHANNELS = 4, 3
TABLE = BucketTable(((8, 8), (4, 16), (4, 4), (4, 8)))
"""Latent cells; of a full, a full, a quarter and half of the area."""
BATCHES = (3, 2, 2, 4)
"""Per bucket and epoch."""


def order_of_whole_batches() -> tuple[SampleOrder, np.ndarray]:
    """An order of buckets that hold whole batches, and the bucket of each sample."""
    bucket_of = np.repeat(np.arange(len(BATCHES), dtype=np.int32), np.array(BATCHES) * GLOBAL_BATCH)
    bucket_of = np.random.default_rng(1).permutation(bucket_of)
    blocks = np.arange(len(bucket_of), dtype=np.int32) // 7
    return SampleOrder(DatasetParams(path="."), 5, GLOBAL_BATCH, blocks, bucket_of), bucket_of


def gradient(objective: Objective, bucket_of: np.ndarray, samples: np.ndarray) -> Tensor:
    """Of the mean loss of a batch under a linear denoiser. What is drawn for a sample belongs to the sample, so that
    batches can be compared."""
    height, width = TABLE.sizes[int(bucket_of[samples[0]])]
    shape = (CHANNELS, height, width)
    pictures, noise = (np.stack([numbers(2 * int(s) + kind, *shape) for s in samples]) for kind in (0, 1))
    # Samples of different buckets differ in more than their size, or a bias could not show.
    pictures = pictures + 0.5 * bucket_of[samples][:, None, None, None]
    u = (samples * 0.6180339887) % 1
    weights = torch.linspace(-1, 1, CHANNELS**2).view(CHANNELS, CHANNELS, 1, 1).requires_grad_()
    made = objective.draw(tensor(pictures), draws_of(u, noise))
    loss = objective.loss(torch.nn.functional.conv2d(made.noised_latents, weights), made).mean()
    return torch.autograd.grad(loss, weights)[0].double()


@pytest.mark.parametrize("product", [("epsilon", "scaled_linear", "min_snr"), ("flow_prediction", "flow", "cosmap")])
def test_bucketing_does_not_bias_the_gradient(product: tuple[str, str, str]) -> None:
    order, bucket_of = order_of_whole_batches()
    batches = [order.at(step).samples for step in range(sum(BATCHES))]
    assert np.array_equal(np.sort(np.concatenate(batches)), np.arange(len(bucket_of)))
    assert all(len(set(bucket_of[batch])) == 1 for batch in batches)

    objective = objective_for(settings(*product)[0])
    of_batches = [gradient(objective, bucket_of, batch) for batch in batches]
    of_samples = [gradient(objective, bucket_of, np.array([sample])) for sample in range(len(bucket_of))]
    torch.testing.assert_close(torch.stack(of_batches).mean(0), torch.stack(of_samples).mean(0), rtol=1e-4, atol=1e-6)


def test_a_picture_weighs_the_same_whatever_its_size() -> None:
    """Repeating every latent cell changes the size and nothing else, and so not the loss."""
    objective = objective_for(settings("flow_prediction", "flow", "constant")[0])
    picture, noise, answer = (numbers(seed, 2, CHANNELS, 2, 2) for seed in (1, 2, 3))
    u = np.array([0.2, 0.7])
    small = objective.loss(tensor(answer), objective.draw(tensor(picture), draws_of(u, noise)))
    wide, wide_noise, wide_answer = (np.repeat(a, 3, axis=3) for a in (picture, noise, answer))
    large = objective.loss(tensor(wide_answer), objective.draw(tensor(wide), draws_of(u, wide_noise)))
    torch.testing.assert_close(small, large, rtol=1e-5, atol=0)
