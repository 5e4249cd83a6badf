"""What no engine can do is said before a run starts."""

import pytest

from sd_training.config.load import load_config
from sd_training.errors import ConfigError

BASE = [
    "experiment.log_dir=runs",
    "experiment.name=first",
    "experiment.num_examples_to_see=100000",
    "dataset.params.path=data.tar",
    "model.pretrained=someone/pipeline",
]


_TRAINED_VAE = "model.train: vae is trained with single, ddp, fsdp or hsdp, not with"


@pytest.mark.parametrize(
    "words",
    [
        ["distributed.strategy=fsdp", "distributed.offload_parameters=true", "distributed.reshard_after_forward=false"],
        ["distributed.mesh={data: -1, fsdp: 8, tensor: 1}"],
        ["distributed.strategy=deepspeed_2", "distributed.offload_optimizer=true", "model.mixed_precision=fp16"],
        ["distributed.strategy=deepspeed_3", "distributed.offload_parameters=true", "optimizer.name=lion"],
        ["distributed.strategy=hsdp", "trainer.compile=true", "model.gradient_checkpointing=true"],
        ["distributed.strategy=fsdp", "model.float8=rowwise"],
        ["distributed.strategy=ddp", "optimizer.name=muon", "trainer.compile=full"],
        ["distributed.mesh={data: 1, fsdp: 1, tensor: 2}", "trainer.compile=blocks"],
    ],
)
def test_what_works_together(words: list[str]) -> None:
    load_config([*BASE, *words])


@pytest.mark.parametrize(
    ("words", "start"),
    [
        (["distributed.mesh.fsdp=8", "distributed.strategy=ddp"], "distributed.strategy: ddp, but distributed.mesh"),
        (
            ["distributed.offload_optimizer=true"],
            "distributed.offload_optimizer: is true, but is only read with distributed.strategy=deepspeed_1",
        ),
        (["distributed.offload_parameters=true"], "distributed.offload_parameters: is only read with fsdp"),
        (
            [
                "distributed.strategy=fsdp",
                "distributed.offload_parameters=true",
                "model.use_ema=true",
                "ema.device=cuda",
            ],
            "ema.device: cuda, but distributed.offload_parameters keeps the weights",
        ),
        (["distributed.reshard_after_forward=false"], "distributed.reshard_after_forward: is only read with fsdp"),
        (["distributed.strategy=fsdp", "optimizer.name=muon"], "optimizer.name: muon needs whole tensors"),
        (["distributed.mesh.tensor=2", "optimizer.name=prodigy"], "optimizer.name: prodigy needs whole tensors"),
        (["distributed.strategy=fsdp", "model.mixed_precision=fp16"], "model.mixed_precision: fp16 needs a loss scale"),
        (
            ["distributed.strategy=fsdp", "model.bf16_weights=true", "optimizer.stochastic_rounding=true"],
            "model.bf16_weights: fsdp keeps sharded fp32",
        ),
        (["distributed.strategy=deepspeed_1", "model.train=vae"], f"{_TRAINED_VAE} deepspeed_1"),
        (["distributed.mesh.tensor=2", "model.train=vae"], f"{_TRAINED_VAE} distributed.mesh.tensor"),
        (
            ["optimizer.name=prodigy", "model.train=vae", "objective.adversarial.weight=1"],
            "optimizer.name: prodigy estimates one learning rate, but a discriminator",
        ),
        (
            ["trainer.compile_mode=max-autotune"],
            'trainer.compile_mode: is "max-autotune", but is only read with trainer.co',
        ),
        (
            ["trainer.compile=blocks", "trainer.compile_mode=reduce-overhead", "system.gradient_accumulation=2"],
            "trainer.compile_mode: CUDA graphs overwrite gradients that are accumulated; use default",
        ),
        (
            ["trainer.compile=blocks", "trainer.compile_mode=reduce-overhead", "distributed.strategy=fsdp"],
            "trainer.compile_mode: CUDA graphs need weights that stay in place, which fsdp moves; use default",
        ),
        (["distributed.encoders=1", "model.train=vae"], "distributed.encoders: the autoencoder is trained"),
        (["distributed.encoders=1", "dataset.cache.path=x"], "distributed.encoders: the cache holds what they would"),
        (
            ["distributed.encoders=2", "distributed.encoder_devices=[3]"],
            "distributed.encoder_devices: has 1; set distributed.encoders=1",
        ),
        (["trainer.activation_budget=0"], "trainer.activation_budget: is 0.0, but is only read with trainer.compile"),
        (["model.xformers=true", "model.attention=math"], "model.xformers: true means model.attention=xformers, but"),
        (["distributed.strategy=deepspeed_2", "model.float8=rowwise"], "model.float8: is not known to work with deep"),
        (["distributed.mesh.tensor=2", "model.float8=rowwise"], "distributed.mesh.tensor: cannot split layers that"),
        (["distributed.strategy=fsdp", "trainer.compile=full"], "trainer.compile: full does not work with fsdp"),
        (["distributed.mesh.tensor=2", "trainer.compile=full"], "trainer.compile: full does not work with"),
        (["distributed.strategy=deepspeed_2", "trainer.compile=true"], "trainer.compile: is not known to work"),
        (
            ["distributed.strategy=deepspeed_2", "trainer.channels_last=true"],
            "trainer.channels_last: true, but deepspeed_2 shards",
        ),
        (["distributed.strategy=deepspeed_2", "model.train_text_encoder=true"], "model.train_text_encoder: deepspeed"),
        (
            ["distributed.strategy=deepspeed_2", "distributed.offload_optimizer=true", "optimizer.name=lion"],
            "optimizer.name: lion cannot be offloaded",
        ),
    ],
)
def test_what_does_not(words: list[str], start: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config([*BASE, *words])
    assert any(problem.startswith(start) for problem in error.value.problems), error.value.problems
