"""The autoencoder's losses and gradients, and the measured spread of the latents."""

import math
import os
from dataclasses import MISSING, fields, replace
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins import MixedPrecision
from torch import Tensor
from torch.func import functional_call
from torch.utils.data import DataLoader

from sd_training.config.schema import (
    AdversarialConfig,
    LRScheduleConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ReconstructionConfig,
)
from sd_training.models.reconstruction import PatchDiscriminator, load_perceptual
from sd_training.optim import Optimization, gradient_norm, lr_schedule
from sd_training.parallel.strategies import SingleProcessStrategy
from sd_training.training import AutoencoderModule, scaled_pixels
from sd_training.types import PixelBatch
from tests import makers

ADVERSARIAL = AdversarialConfig(weight=0.7, channels=8, layers=1)


def pixel_batch(count: int) -> PixelBatch:
    """Pictures of 16 × 16 pixels; an autoencoder reads nothing else of a batch but the noise."""
    generator, nothing = torch.Generator().manual_seed(0), torch.zeros(count)
    made = {field.name: nothing for field in fields(PixelBatch) if field.default_factory is MISSING}
    made["pixels"] = torch.randint(0, 256, (count, 3, 16, 16), generator=generator, dtype=torch.uint8)
    made["posterior_noise"] = torch.randn(count, 4, 8, 8, generator=generator)
    return PixelBatch(**made)  # type: ignore[arg-type]


def module_of(objective: ObjectiveConfig, step: int = 0, **settings: object) -> AutoencoderModule:
    """After so many optimizer steps of a trainer."""
    schedule = lr_schedule(LRScheduleConfig(), num_steps=10, global_batch=2)
    optimization = Optimization(OptimizerConfig(max_grad_norm=0.1), 1e-4, schedule)
    discriminator = PatchDiscriminator(objective.adversarial, seed=1) if objective.adversarial.weight else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vae = makers.tiny_vae()
    module = AutoencoderModule(vae, objective, optimization, discriminator=discriminator, **settings)  # type: ignore[arg-type]
    strategy = SingleProcessStrategy(device="cpu")
    module.trainer = pl.Trainer(strategy=strategy, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    module.trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = step
    assert module.trainer.global_step == step
    return module


def gradients(module: AutoencoderModule) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def test_one_backward_pass_gives_both_gradients(tmp_path: Path) -> None:
    """Against two passes as the two papers write them: the generator's through a discriminator that is held fixed, the
    discriminator's on reconstructions that are held fixed."""
    perceptual = load_perceptual(makers.perceptual_folder(tmp_path))
    reconstruction = ReconstructionConfig(loss="l2", perceptual_path="given", perceptual_weight=0.3)
    objective = ObjectiveConfig(reconstruction=reconstruction, adversarial=ADVERSARIAL, kl_weight=1e-3)
    module, batch = module_of(objective, perceptual=perceptual), pixel_batch(4)
    losses, _, logged = module.sample_losses(batch)
    losses.mean().backward()
    found = gradients(module)

    other, discriminator = module_of(objective, perceptual=perceptual), module.discriminator
    vae, pixels = other.network, scaled_pixels(batch.pixels)
    posterior = vae.encode(pixels).latent_dist
    picture = vae.decode(posterior.mean + posterior.std * batch.posterior_noise).sample
    compared = (picture - pixels).square().mean() + 0.3 * perceptual(picture, pixels).mean()
    fixed = {name: p.detach() for name, p in discriminator.named_parameters()}
    adversarial = -functional_call(discriminator, fixed, (picture,)).mean()
    last = vae.decoder.conv_out.weight
    norms = [torch.autograd.grad(loss, last, retain_graph=True)[0].norm() for loss in (compared, adversarial)]
    weight = 0.7 * norms[0] / (norms[1] + 1e-4)
    (compared + weight.detach() * adversarial + 1e-3 * posterior.kl().mean() / pixels[0].numel()).backward()
    real, fake = other.discriminator(pixels), other.discriminator(picture.detach())
    (0.5 * ((1 - real).clamp(min=0).mean() + (1 + fake).clamp(min=0).mean())).backward()
    expected = gradients(other)
    assert found.keys() == expected.keys() == dict(module.named_parameters()).keys()
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=1e-3, atol=1e-6 * float(gradient.norm() + 1)), name
    assert float(logged["adversarial_weight"]) == pytest.approx(float(weight), rel=1e-4)
    assert float(losses.mean()) == pytest.approx(float(compared + 1e-3 * logged["kl"]), rel=1e-5)


def test_each_network_is_clipped_alone_and_a_bad_gradient_of_one_skips_both() -> None:
    module = module_of(ObjectiveConfig(adversarial=ADVERSARIAL))
    optimizer, before = module.configure_optimizers(), {name: p.clone() for name, p in module.named_parameters()}
    module.sample_losses(pixel_batch(2))[0].mean().backward()
    norms = {name: gradient_norm(getattr(module, name).parameters()) for name in ("network", "discriminator")}
    module.configure_gradient_clipping(optimizer)
    assert module.grad_norm == pytest.approx(sum(norm**2 for norm in norms.values()) ** 0.5)
    for name, norm in norms.items():
        clipped = gradient_norm(getattr(module, name).parameters())
        assert float(clipped) == pytest.approx(min(0.1, float(norm)), rel=1e-4), name
    next(module.discriminator.parameters()).grad[0] = float("nan")
    module.configure_gradient_clipping(optimizer)
    optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())


def test_before_its_start_nothing_is_different() -> None:
    batch = pixel_batch(2)
    plain, later = module_of(ObjectiveConfig()), module_of(ObjectiveConfig(adversarial=ADVERSARIAL.replace(start=3)), 2)
    for module in (plain, later):
        module.sample_losses(batch)[0].mean().backward()
    found, expected = gradients(later), gradients(plain)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    later.on_before_optimizer_step(later.configure_optimizers())
    assert gradients(later).keys() == expected.keys()


def test_the_kl_weight_grows() -> None:
    batch = pixel_batch(2)

    def part(step: int, warmup: int) -> float:
        losses, _, logged = module_of(ObjectiveConfig(kl_weight=0.5, kl_warmup=warmup), step).sample_losses(batch)
        return float((losses.mean() - logged["l1"]) / (0.5 * logged["kl"]))

    assert [part(step, 4) for step in (0, 1, 3, 9)] == pytest.approx([0.25, 0.5, 1.0, 1.0], abs=1e-4)
    assert part(0, 0) == pytest.approx(1.0, abs=1e-4)


def test_only_the_decoder_is_trained() -> None:
    module = module_of(ObjectiveConfig(kl_weight=1e6, adversarial=ADVERSARIAL), is_decoder_only=True)
    losses, _, logged = module.sample_losses(pixel_batch(2))
    assert float(losses.mean()) == pytest.approx(float(logged["l1"]))
    losses.mean().backward()
    parts = {".".join(name.split(".")[:2]) for name in gradients(module) if name.startswith("network.")}
    assert parts == {"network.decoder", "network.post_quant_conv"}


def test_posteriors_that_overflow_fp16_are_finite() -> None:
    """A mean of 300 has a square above 65,504."""
    module = module_of(ObjectiveConfig())
    with torch.no_grad():
        module.network.quant_conv.bias[:4] = 300.0
    with torch.autocast("cpu", torch.float16):
        losses, _, logged = module.sample_losses(pixel_batch(2))
    assert losses.isfinite().all()
    assert float(logged["kl"]) == pytest.approx(0.5 * 300.0**2 * 4 * 64 / (3 * 256), rel=0.01)


def test_fp16_trains_both_networks(tmp_path: Path) -> None:
    """With the loss scale of Lightning, which a GPU would use: it is halved until nothing overflows. Steps are skipped
    as a whole, no value that is kept is infinite or NaN, and both networks learn. FP16_STEPS=2000 trains longer."""
    steps = int(os.environ.get("FP16_STEPS", 60))
    perceptual = load_perceptual(makers.perceptual_folder(tmp_path))
    adversarial = AdversarialConfig(weight=0.1, start=10, channels=8, layers=1)
    reconstruction = ReconstructionConfig(perceptual_path="given", perceptual_weight=0.3)
    objective = ObjectiveConfig(reconstruction=reconstruction, adversarial=adversarial)
    module = module_of(objective, perceptual=perceptual)
    module.optimization = replace(module.optimization, learning_rate=1e-3, has_gradient_scaler=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    precision = MixedPrecision("16-mixed", "cpu", scaler)
    seen: list[dict[str, float]] = []
    scales: list[float] = []
    norms: list[float] = []

    class Look(pl.Callback):
        def on_train_batch_end(self, *_: object) -> None:
            seen.append({name: float(value) for name, value in module.logged_sums.items()})
            norms.append(float(module.grad_norm))
            scales.append(scaler.get_scale())
            module.reset_logged()

    trainer = pl.Trainer(
        strategy=SingleProcessStrategy(device="cpu", precision_plugin=precision),
        max_steps=steps,
        callbacks=[Look()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader([pixel_batch(4)] * steps, batch_size=None))
    skipped = [i for i, norm in enumerate(norms) if not math.isfinite(norm)]
    assert 0 < len(skipped) < 16 and scales[-1] == 2.0 ** (24 - len(skipped))
    assert all(math.isfinite(value) for values in seen for value in values.values())
    (optimizer,) = trainer.optimizers
    kept = [*module.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    assert all(torch.isfinite(value).all() for value in kept)
    for name, first in {"l1": 0, "perceptual": 0, "discriminator": 20}.items():
        assert seen[-1][name] < seen[first][name], name


def test_held_out_measures(tmp_path: Path) -> None:
    """Of a decoder that gives grey pictures."""
    perceptual = load_perceptual(makers.perceptual_folder(tmp_path))
    module = module_of(ObjectiveConfig(adversarial=ADVERSARIAL), perceptual=perceptual)
    with torch.no_grad():
        module.network.decoder.conv_out.weight.zero_()
        module.network.decoder.conv_out.bias.zero_()
    batch = pixel_batch(3)
    measures, pairs = module.held_out_measures(batch, [0.5])
    values = dict(zip(module.held_out, measures, strict=True))
    pixels = scaled_pixels(batch.pixels)
    assert torch.equal(pairs[..., :16], batch.pixels)
    assert (pairs[..., 16:] == 128).all()
    squares = pixels.square().mean((1, 2, 3))
    assert torch.allclose(values["psnr"], 10 * torch.log10(4 / squares)[None], atol=1e-4)
    assert values["ssim"].abs().max() < 0.1
    assert torch.allclose(values["perceptual"], perceptual(torch.zeros_like(pixels), pixels)[None])


def test_latents_that_are_not_finite_are_left_out() -> None:
    module = module_of(ObjectiveConfig())
    assert module.latent_statistics() is None
    latents = 3 + 4 * torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    module._measure(latents)
    before = module.latent_statistics()
    assert before == pytest.approx((latents.mean().item(), latents.std().item()), rel=0.01)
    for bad in (float("nan"), float("inf")):
        poisoned = latents.clone()
        poisoned[0, 0, 0, 0] = bad
        module._measure(poisoned)
        assert module.latent_statistics() == before
    module._measure(2 * latents)
    assert module.latent_statistics() > before
