"""Two replicas that differ draw with one average, and differ afterwards; started in tests."""

import torch
from torch import distributed, nn

from sd_training.parallel.strategies import ReplicatedSharding


def main() -> None:
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    parameters = [nn.Parameter(torch.full((3,), 10.0 * rank + number)) for number in range(2)]
    own = [parameter.detach().clone() for parameter in parameters]
    sharding = ReplicatedSharding(parameters, torch.optim.SGD(parameters), 2)
    backups = [sharding.backup(parameter) for parameter in parameters]
    for parameter in parameters:
        sharding.swap_in(parameter, sharding.shard_of(parameter, torch.full((3,), 7.0)))
        assert torch.equal(parameter, torch.full((3,), 7.0))
    if rank == 0:
        distributed.barrier()  # the other one restores alone, as one that fails alone does
    for parameter, backup, before in zip(parameters, backups, own, strict=True):
        sharding.restore(parameter, backup)
        assert torch.equal(parameter, before)
    if rank == 1:
        distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
