import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys, warnings
from sd_training.log import quiet_libraries
quiet_libraries()
import torch
from torch import distributed, nn

class OtherStrides(torch.autograd.Function):
    # As oneDNN gives the gradient of a 1x1 convolution on some CPUs: only strides of lengths of 1 differ.
    @staticmethod
    def forward(ctx, weight):
        return weight * 1
    @staticmethod
    def backward(ctx, gradient):
        return gradient.contiguous().as_strided((4, 4, 1, 1), (4, 1, 4, 4))

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4, 1, 1))
    def forward(self, x):
        return nn.functional.conv2d(x, OtherStrides.apply(self.weight))

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
torch.set_warn_always(True)
network = nn.parallel.DistributedDataParallel(Network(), gradient_as_bucket_view=True)
for _ in range(2):
    network(torch.ones(1, 4, 2, 2)).sum().backward()
    print("then with the user's filters", file=sys.stderr)
    warnings.resetwarnings()
    network.zero_grad()
distributed.destroy_process_group()
"""


def test_advice_on_strides_of_gradients_is_left_out() -> None:
    """It is about the speed of one copy, and comes from every rank."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True)
    quiet, _, loud = done.stderr.partition("then with the user's filters\n")
    assert quiet == "" and "Grad strides do not match bucket view strides" in loud
