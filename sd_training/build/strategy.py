"""Lightning's strategy and precision for a run, from layout and options."""

from datetime import timedelta
from importlib.util import find_spec
from typing import Any, Literal

import torch
from pytorch_lightning.strategies import Strategy

from sd_training.build.plan import Plan
from sd_training.distributed.launch import process_group_backend, set_rendezvous, use_one_worker_per_gloo_group
from sd_training.distributed.strategies import CutOptions, CutProcesses, Cuts, ReplicatedProcesses, SingleProcess
from sd_training.errors import ConfigError
from sd_training.models.encoders import AUTOCAST_DTYPE

LIGHTNING_PRECISION: dict[str, Literal["32-true", "bf16-mixed", "16-mixed"]] = {
    "no": "32-true",
    "bf16": "bf16-mixed",
    "fp16": "16-mixed",
}
"""This trainer's word for a precision → Lightning's."""


def make_strategy(plan: Plan, cuts: Cuts) -> Strategy:
    """What runs the step; one process needs no process group.

    Raises:
        ConfigError: the config of DeepSpeed cannot be used.
    """
    if plan.layout.strategy == "single":
        device = torch.device("cuda", 0) if plan.launch.accelerator == "cuda" else torch.device(plan.launch.accelerator)
        return SingleProcess(device=device)
    config = plan.config.distributed
    set_rendezvous(config.dist_url)
    use_one_worker_per_gloo_group()
    backend = process_group_backend(config, plan.launch.accelerator)
    match plan.layout.strategy:
        case "ddp":
            return _ddp(plan, backend)
        case "fsdp" | "hsdp":
            options = CutOptions(
                AUTOCAST_DTYPE[plan.precision], config.reshard_after_forward, offload=config.offload_parameters
            )
            if options.offload and backend == "nccl":  # blocks in CPU memory are put together by gloo
                backend = "cpu:gloo,cuda:nccl"
            return CutProcesses(plan.layout.mesh, cuts, options, backend, _timeout(plan))
        case _:
            return _deepspeed(plan, backend)


def _timeout(plan: Plan) -> timedelta:
    return timedelta(seconds=plan.config.watch.collective_timeout_s)


def _ddp(plan: Plan, backend: str) -> Strategy:
    """Gradients live in the communication buckets (no copy), accumulation communicates on the last micro-batch only
    (Lightning's `no_sync`), and every parameter is used once in every step (static graph; PyTorch cannot learn it from
    first micro-batch without communication)."""
    return ReplicatedProcesses(
        process_group_backend=backend,
        timeout=_timeout(plan),
        gradient_as_bucket_view=True,
        static_graph=plan.batch.accumulation == 1,
        broadcast_buffers=False,
    )


def zero_options(plan: Plan) -> dict[str, Any]:
    """DeepSpeed's configuration for a run.

    Raises:
        ConfigError: the file of `distributed.deepspeed_config` cannot be used, or DeepSpeed is not there.
    """
    from sd_training.distributed.deepspeed_strategy import deepspeed_options  # takes seconds

    config = plan.config
    if find_spec("deepspeed") is None:
        raise ConfigError(
            f"distributed.strategy: {config.distributed.strategy} needs the package deepspeed; pip install deepspeed, "
            "or use fsdp"
        )
    options = deepspeed_options(
        int(plan.layout.strategy[-1]),
        offload_optimizer=config.distributed.offload_optimizer,
        offload_parameters=config.distributed.offload_parameters,
        path=config.distributed.deepspeed_config,
    )
    options["train_micro_batch_size_per_gpu"] = config.system.batch_size
    if plan.precision == "bf16":
        options["bf16"] = {"enabled": True, "check_grad_overflow": True}  # or a non-finite step would be taken
    return options


def _deepspeed(plan: Plan, backend: str) -> Strategy:
    from sd_training.distributed.deepspeed_strategy import ZeroProcesses

    return ZeroProcesses(zero_options(plan), plan.config.optimizer.max_grad_norm, backend, _timeout(plan))


def precision_plugins(plan: Plan) -> list[Any]:
    """DeepSpeed rounds inputs unless it is told not to."""
    if not plan.layout.strategy.startswith("deepspeed"):
        return []
    from sd_training.distributed.deepspeed_strategy import ZeroPrecision

    return [ZeroPrecision(LIGHTNING_PRECISION[plan.precision])]
