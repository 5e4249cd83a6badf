"""The training steps: what every trained module shares, latent diffusion, and autoencoders.

Nothing here waits for the device: losses, norms, flags and the record of a micro-batch stay tensors until a callback
reads them.
"""

import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args

import pytorch_lightning as pl
import torch
from diffusers import AutoencoderKL
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure

from sd_training.config.changes import Change
from sd_training.config.schema import LoraConfig, ObjectiveConfig
from sd_training.diffusion import Objective
from sd_training.errors import CheckpointError
from sd_training.models.family import Family, autocast
from sd_training.models.reconstruction import (
    PatchDiscriminator,
    Perceptual,
    adaptive_weight,
    hinge_loss,
    last_layer_gradients,
)
from sd_training.optim import Optimization, clip_gradients, make_optimizer
from sd_training.parallel.strategies import strategy_of
from sd_training.types import Conditioning, PixelBatch


class MicroBatchRecord(NamedTuple):
    """One forward pass of this process. Nothing here holds a graph."""

    sample_losses: Tensor
    """[B]."""
    positions: Tensor
    """[B] int64, as in the batch."""
    sample_ids: Tensor
    """[B] int64, as in the batch."""
    timesteps: Tensor | None
    """[B] the denoiser's timestep input; None for autoencoders."""


PART = "denoiser"
"""The trained network's name in `optimizer.rates_by_part`."""
DISCRIMINATOR = "discriminator"
"""That of what is trained against it."""

Section = Literal[
    "data_wait", "upload", "encode", "forward", "backward", "optimizer",
    "average", "logging", "validation", "drawing", "saving", "other",
]  # fmt: skip
SECTIONS: tuple[Section, ...] = get_args(Section)
_MAX_OPEN = 4096
"""Moments kept before those that have passed are summed; a logging window seldom has more."""
BEGIN_ANOTHER = "take another experiment.name and start from its export (model.pretrained or model.vae.pretrained)"
"""Remedy of a checkpoint that cannot go on; the second option names an autoencoder."""


class Ledger:
    """Where the time of a training process goes: every moment belongs to the section that was entered last, so the
    sections sum to the wall time.

    On CUDA `enter` records an event on the current stream and does not wait. A section is then the time from the moment
    at which the device reached its beginning to the moment at which it reached the next one's: its own work, and the
    time in which the device had nothing to do because the host was in that section. So `data_wait` is what the device
    lost by waiting for data, not how long the host waited while the device still had work; a save, which the host
    alone writes, counts in full. Copies and averaging beside the device's work count where something waits for them.
    On the CPU sections are those of the host.
    """

    def __init__(self) -> None:
        self.start(torch.device("cpu"))

    def start(self, device: torch.device) -> None:
        """Forgets what was measured; time counts from now on.

        Args:
            device: what executes the training step.
        """
        self._has_events = device.type == "cuda"
        self._entered: deque[tuple[Section, Any]] = deque()
        self._seconds: dict[Section, float] = dict.fromkeys(SECTIONS, 0.0)
        self.enter("other")

    def enter(self, section: Section) -> None:
        """What follows belongs to `section`; waits for nothing."""
        moment: Any = time.perf_counter()
        if self._has_events:
            moment = torch.cuda.Event(enable_timing=True)
            moment.record()
        self._entered.append((section, moment))
        if len(self._entered) > _MAX_OPEN:
            self._book()

    def take(self) -> dict[Section, float]:
        """Seconds of each section since the last call, until the newest `enter`; that one must have passed on the
        device, which a value that was computed after it and read on the host ensures."""
        self._book()
        taken, self._seconds = self._seconds, dict.fromkeys(SECTIONS, 0.0)
        return taken

    def _book(self) -> None:
        """Sums what has passed."""
        while len(self._entered) > 1:
            (section, began), (_, ended) = self._entered[0], self._entered[1]
            if self._has_events and not ended.query():
                return
            self._seconds[section] += began.elapsed_time(ended) / 1e3 if self._has_events else ended - began
            self._entered.popleft()


def scaled_pixels(pixels: Tensor) -> Tensor:
    """[B, 3, H, W] float32 in [-1, 1], contiguous, from the loader's bytes, whose channels are last."""
    return pixels.to(torch.float32, memory_format=torch.contiguous_format).div_(127.5).sub_(1.0)


def byte_pixels(pixels: Tensor) -> Tensor:
    """uint8 pictures of [B, 3, H, W] in [-1, 1], what lies outside is cut: the inverse of `scaled_pixels`."""
    return ((pixels.clamp(-1.0, 1.0) + 1.0) * 127.5).round().byte()


def changed_requirements(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The error of a checkpoint that was trained with other options; empty where none has changed."""
    changes = (Change(key, before[key], value) for key, value in now.items() if before.get(key, value) != value)
    changed = "; ".join(change.sentence() for change in changes)
    said = f"the checkpoint belongs to a run with other options: {changed}. Restore them, or {BEGIN_ANOTHER}"
    return said if changed else ""


class TrainedModule(pl.LightningModule):
    """A LightningModule that trains exactly one network, `self.network`; everything else it uses is not a child module,
    except for a discriminator, which is trained and checkpointed, but neither averaged nor exported.

    Args:
        network: the trained network; the only thing wrapped, averaged and checkpointed.
        optimization: optimizer, peak learning rate and schedule.
    """

    held_out: tuple[str, ...] = ("loss",)
    """What `held_out_measures` gives."""
    perceptual: Perceptual | None = None
    """What pictures and their reconstructions are compared by."""
    has_adapters = False
    """Whether what is trained are adapters, and the network's own weights are frozen."""

    def __init__(self, network: nn.Module, optimization: Optimization) -> None:
        super().__init__()
        # Loaded networks come in evaluation mode.
        self.network = network.train()
        self.optimization = optimization
        self.reset_logged()
        self.was_step_skipped: Tensor | None = None
        self._trained: list[list[nn.Parameter]] = []
        """What the optimizer updates, by what is clipped together; to walk through the network at every step takes
        milliseconds."""
        self.last_micro_batch: MicroBatchRecord | None = None
        """The latest micro-batch."""
        self.ledger = Ledger()
        """Module and callbacks enter their sections."""
        self._has_dropout = any(isinstance(m, nn.Dropout) and m.p > 0 for m in network.modules())

    def __setattr__(self, name: str, value: Any) -> None:
        """Lightning sets the name of the hook that it is in forty times per step; torch compares whatever is set with
        parameters, modules and buffers, which takes a microsecond."""
        if name == "_current_fx_name":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def reset_logged(self) -> None:
        """Start a new logging window."""
        self.logged_sums: dict[str, Tensor] = {}
        self.logged_micro_batches = 0
        self.logged_images: Counter[tuple[int, int]] = Counter()
        """Height and width [latent cells] → images of this process."""
        self.grad_norm: Tensor | None = None

    def training_step(self, batch: PixelBatch, batch_index: int) -> Tensor:
        """[] the mean loss of a micro-batch, which is minimised. Keeps, on the device, the values for logs and incident
        reports.

        Where the loss is not finite, its gradient is NaN, which the average over processes carries to all of them: an
        infinite loss may have a finite gradient, and the gradient alone decides whether a step is skipped. No bit of a
        finite loss or of its gradient changes: both are multiplied by 1.
        """
        losses, timesteps, logged = self.sample_losses(batch)
        loss = losses.mean()
        for name, value in {"loss": loss, **logged}.items():
            value = value.detach().float()
            self.logged_sums[name] = self.logged_sums[name] + value if name in self.logged_sums else value
        self.logged_micro_batches += 1
        height, width = batch.posterior_noise.shape[-2:]
        self.logged_images[height, width] += len(batch.posterior_noise)
        self.last_micro_batch = MicroBatchRecord(losses.detach(), batch.positions, batch.sample_ids, timesteps)
        minimised = loss * (loss.detach() * 0.0 + 1.0)
        self.ledger.enter("backward")
        return minimised

    def on_train_start(self) -> None:
        """After the callbacks' start, which may validate and draw."""
        self.ledger.enter("data_wait")

    def on_before_batch_transfer(self, batch: PixelBatch, dataloader_idx: int) -> PixelBatch:
        """The loader has delivered."""
        self.ledger.enter("upload")
        return batch

    def on_after_backward(self) -> None:
        """What follows is the optimizer step: the norm of the gradient, clipping, the update."""
        self.ledger.enter("optimizer")

    def on_train_batch_end(self, *_: Any) -> None:
        """After the callbacks; each of them has entered a section."""
        self.ledger.enter("data_wait")

    def on_train_batch_start(self, batch: PixelBatch, batch_index: int) -> None:
        """Dropout layers alone use torch's global generator: key it by rank and step, so that resume is exact."""
        self.ledger.enter("encode")
        if self._has_dropout:
            strategy = strategy_of(self.trainer)
            torch.manual_seed(batch_index * strategy.data_ranks + strategy.data_rank)

    def on_fit_start(self) -> None:
        """The module's own device is the CPU where FSDP2 offloads weights."""
        self.move_frozen_to(self.trainer.strategy.root_device)

    def move_frozen_to(self, device: torch.device) -> None:
        """Move what the training step uses, but is no child module, to `device`."""

    def sample_losses(self, batch: PixelBatch) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """[B] loss of each sample, with gradients; [B] the denoiser's timestep input, None without a denoiser; and []
        further scalars to log."""
        raise NotImplementedError

    def held_out_measures(self, batch: PixelBatch, quantiles: Sequence[float]) -> tuple[Tensor, Tensor | None]:
        """[N, K, B] the N values that `held_out` names, of each sample at K quantiles of the timestep density; and
        [B, 3, H, 2W] uint8: pictures, each with its reconstruction on the right, None where there are none. Nothing is
        logged or recorded."""
        raise NotImplementedError

    def reconstructions(self, batch: PixelBatch, count: int) -> Tensor | None:
        """[B, 3, H, 2W] uint8: the first `count` pictures, each with what the autoencoder makes of it on the right;
        None where latents were delivered. Collective where the autoencoder is trained, and sharded."""
        raise NotImplementedError

    def configure_model(self) -> None:
        """Strategies that shard weights do so here, before the optimizer is made."""
        strategy_of(self.trainer).shard_network()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer over the network's trainable parameters; the learning rate is set before each step."""
        trained = [(name, p) for name, p in self.named_trained() if p.requires_grad]
        apart = [p for name, p in trained if name.startswith(f"{DISCRIMINATOR}.")]
        self._trained = [[p for name, p in trained if not name.startswith(f"{DISCRIMINATOR}.")], apart]
        return make_optimizer(self.optimization, trained)

    def named_trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Everything that the optimizer updates; names begin with the part."""
        for name, parameter in self.network.named_parameters():
            yield f"{PART}.{name}", parameter

    def resume_requirements(self) -> dict[str, Any]:
        """Option → value that a run resumed from a checkpoint must have."""
        names, config = ("name", "no_decay_on_norms_and_biases"), self.optimization.config
        return {f"optimizer.{name}": getattr(config, name) for name in names}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Records what a resumed run must have in common."""
        checkpoint["trained_as"] = self.resume_requirements()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuses to resume with another optimizer or objective, whose state and weights have another meaning.

        Raises:
            CheckpointError: naming every option that has changed.
        """
        if changed := changed_requirements(checkpoint["trained_as"], self.resume_requirements()):
            raise CheckpointError(changed)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next optimizer step."""
        return self.optimization.learning_rate * self.optimization.schedule(self.trainer.global_step)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Set the learning rate: a pure function of the optimizer step, hence nothing to restore on resume."""
        for group in optimizer.param_groups:
            group["lr"] = self.learning_rate * group["lr_factor"]

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """Clip once per optimizer step, and mark a non-finite gradient so that the optimizer skips the step.

        The gradient is already averaged over ranks, so every rank sees the same norm and decides alike; a loss that is
        not finite has made its gradient so (`training_step`). Fused AdamW reads `found_inf` on the device; the
        host does not wait. With other optimizers it does (see `make_optimizer`). DeepSpeed does all of this itself.
        """
        if strategy_of(self.trainer).clips_gradients:
            return
        most = self.optimization.config.max_grad_norm
        # A discriminator has no gradients before its first step, and most runs have no discriminator.
        norms = [clip_gradients(own, most) for own in self._trained if any(p.grad is not None for p in own)]
        self.grad_norm = norms[0] if len(norms) == 1 else torch.stack(norms).norm()
        if not self.optimization.has_gradient_scaler:
            self.was_step_skipped = (~torch.isfinite(self.grad_norm)).float()
            optimizer.found_inf = self.was_step_skipped


class DiffusionModule(TrainedModule):
    """Trains the denoiser of a family, and its text encoders if requested, on latents of a frozen autoencoder.

    Trained weights stay fp32, so that exports are exact; precisions are autocast's.

    Args:
        family: networks and tokenizers; the frozen ones are deliberately no child modules, so they are never wrapped,
            averaged or checkpointed.
        objective: the prediction target, noise schedule, timestep density, weighting and loss.
        vae_precision, text_precision: of autoencoder and text encoders.
        is_text_trained: whether the text encoders are trained; the autoencoder is always frozen here.
        vae_batch: pictures that the autoencoder encodes together; 0: a whole micro-batch.
        idle: frozen networks by part name that never run, because a cache or encoder processes deliver what they give.
        prior_weight: λ of DreamBooth's class images, which are the samples at odd positions; null: there are none.
        lora: of the adapters that the networks have; rank 0: they have none.
    """

    held_out = ("loss", "timestep")

    def __init__(
        self,
        family: Family,
        objective: Objective,
        optimization: Optimization,
        *,
        vae_precision: str = "fp32",
        text_precision: str = "fp32",
        is_text_trained: bool = False,
        vae_batch: int = 0,
        idle: Collection[str] = (),
        prior_weight: float | None = None,
        lora: LoraConfig = LoraConfig(),  # noqa: B008 - is not changed
    ) -> None:
        text_encoders = family.text_encoders()
        for network in [family.vae, *([] if is_text_trained else text_encoders.values())]:
            network.requires_grad_(False).eval()
        family.freeze_unread()
        network = family.denoiser
        super().__init__(nn.ModuleDict({PART: network, **text_encoders}) if is_text_trained else network, optimization)
        self.family, self.objective, self.is_text_trained = family, objective, is_text_trained
        self.vae_precision, self.text_precision, self.vae_batch = vae_precision, text_precision, vae_batch
        self.idle, self.prior_weight = frozenset(idle), prior_weight
        self.lora, self.has_adapters = lora, lora.rank > 0

    def named_trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As `TrainedModule.named_trained`; a trained text encoder is a separate part."""
        return self.network.named_parameters() if self.is_text_trained else super().named_trained()

    def resume_requirements(self) -> dict[str, Any]:
        """As `TrainedModule.resume_requirements`, with the prediction type and what is trained beside the denoiser."""
        return super().resume_requirements() | {
            "objective.prediction_type": self.objective.prediction_type,
            "objective.rescale_betas_zero_snr": bool(self.objective.config.rescale_betas_zero_snr),
            # Of earlier versions: the optimizer state of such a checkpoint has one more part.
            "objective.loss_weighting.name=learned_uncertainty": False,
            "model.train_text_encoder": self.is_text_trained and not self.lora.text_encoder,
            **{f"model.lora.{name}": getattr(self.lora, name) for name in ("rank", "alpha", "targets", "text_encoder")},
        }

    def move_frozen_to(self, device: torch.device) -> None:
        """Encoders but idle ones, and the tables of the objective."""
        for name, network in {"vae": self.family.vae, **self.family.text_encoders()}.items():
            if name not in self.idle:
                network.to(device)
        self.objective = self.objective.to(device)

    def sample_losses(self, batch: PixelBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """As `TrainedModule.sample_losses` (Rombach et al. 2022, arXiv:2112.10752, eq. 3). The family's denoiser is
        `self.network` or a part of it, so this call goes through what a strategy has wrapped."""
        latents, conditioning = self._encoded(batch)
        self.ledger.enter("forward")
        noised = self.objective.draw(latents, batch)
        prediction = self.family.predict(self.family.denoiser, noised, conditioning)
        losses = self.objective.loss(prediction, noised)
        if self.prior_weight is None:
            return losses, noised.timesteps, {}
        # Ruiz et al. 2022, eq. 2: a mean over the subject's samples plus λ times one over as many class images.
        is_prior = (batch.positions % 2).to(losses.dtype)
        weighted = 2 * losses * (1 + (self.prior_weight - 1) * is_prior)
        return weighted, noised.timesteps, {"prior_loss": 2 * (losses * is_prior).mean()}

    def held_out_measures(self, batch: PixelBatch, quantiles: Sequence[float]) -> tuple[Tensor, None]:
        """As `TrainedModule.held_out_measures`. Images and captions are encoded once, and the noise of a sample is the
        same at all levels. Input perturbation belongs to training and is disabled."""
        latents, conditioning = self._encoded(batch)
        objective = replace(self.objective, config=self.objective.config.replace(input_perturbation=0.0))
        losses, timesteps = [], []
        for quantile in quantiles:
            draws = replace(batch, timestep_draw=torch.full_like(batch.timestep_draw, quantile))
            noised = objective.draw(latents, draws)
            prediction = self.family.predict(self.family.denoiser, noised, conditioning)
            losses.append(objective.loss(prediction, noised))
            timesteps.append(noised.timesteps.float())
        return torch.stack((torch.stack(losses), torch.stack(timesteps))), None

    def reconstructions(self, batch: PixelBatch, count: int) -> Tensor | None:
        """As `TrainedModule.reconstructions`, from the mean of the posterior."""
        if not batch.pixels.numel():
            return None
        pixels, at_once = batch.pixels[:count], self.vae_batch or 1
        mean, _ = self.family.moments(scaled_pixels(pixels), self.vae_precision, at_once).chunk(2, dim=1)
        with autocast(pixels.device, self.vae_precision):
            decoded = [self.family.decode(part).float() for part in mean.split(at_once)]
        return torch.cat((pixels, byte_pixels(torch.cat(decoded))), dim=3)

    def _encoded(self, batch: PixelBatch) -> tuple[Tensor, Conditioning]:
        moments = batch.moments.float()
        if not batch.moments.numel():
            moments = self.family.moments(scaled_pixels(batch.pixels), self.vae_precision, self.vae_batch)
        latents = self.family.draw_latents(moments, batch.posterior_noise)
        gradients = torch.set_grad_enabled(self.is_text_trained and torch.is_grad_enabled())
        with gradients, autocast(batch.pixels.device, self.text_precision):
            return latents, self.family.encode(batch)


_STATISTICS_DECAY = 0.99


class AutoencoderModule(TrainedModule):
    """Trains an AutoencoderKL, if requested against a discriminator, and measures the spread of its latents.

    One optimizer object updates both: every tensor by its own gradient and state, so that is the same as two. The
    discriminator is a part with a learning rate of its own (`optimizer.rates_by_part`), and is clipped alone. One
    backward pass gives both gradients (`_against_discriminator`), so skipped steps, accumulation and the fp16 loss
    scale are those of any run; what is computed in fp32 cannot overflow by that scale.

    Args:
        vae: the autoencoder.
        objective: weights of the terms; all terms are means per pixel value.
        is_decoder_only: the encoder stays as it is, so there is no KL term.
        perceptual: the perceptual distance; None: that term is 0.
        discriminator: trained from `objective.adversarial.start` on.
    """

    latent_moments: Tensor
    """[3] running mean, running mean square and weight of the latents."""

    def __init__(
        self,
        vae: AutoencoderKL,
        objective: ObjectiveConfig,
        optimization: Optimization,
        *,
        is_decoder_only: bool = False,
        perceptual: Perceptual | None = None,
        discriminator: PatchDiscriminator | None = None,
    ) -> None:
        frozen = [vae.encoder, vae.quant_conv] if is_decoder_only else []
        for network in filter(None, frozen):
            network.requires_grad_(False)
        super().__init__(vae, optimization)
        self.network: AutoencoderKL = self.network
        self.discriminator = discriminator
        self.objective, self.is_decoder_only, self.perceptual = objective, is_decoder_only, perceptual
        self.held_out = ("loss", "psnr", "ssim", *(["perceptual"] if perceptual else []))
        self._last_features: Tensor | None = None
        """[B, C, H, W] what the decoder's last convolution was given; only with an adaptive weight."""
        if discriminator is not None and objective.adversarial.adaptive:
            vae.decoder.conv_out.register_forward_pre_hook(self._keep_features)
        self.register_buffer("latent_moments", torch.zeros(3))

    def _keep_features(self, layer: nn.Module, inputs: tuple[Tensor]) -> None:
        self._last_features = inputs[0].detach() if layer.training else None

    def named_trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As `TrainedModule.named_trained`; the discriminator is a separate part."""
        yield from super().named_trained()
        for name, parameter in self.discriminator.named_parameters() if self.discriminator is not None else ():
            yield f"{DISCRIMINATOR}.{name}", parameter

    def resume_requirements(self) -> dict[str, Any]:
        """As `TrainedModule.resume_requirements`, with what is trained."""
        return super().resume_requirements() | {
            "model.vae_trained=decoder": self.is_decoder_only,
            "objective.adversarial.weight>0": self.discriminator is not None,
        }

    def move_frozen_to(self, device: torch.device) -> None:
        """The perceptual network."""
        if self.perceptual is not None:
            self.perceptual.to(device)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """As `TrainedModule.on_before_optimizer_step`. Without a gradient, a parameter and its state do not change."""
        super().on_before_optimizer_step(optimizer)
        if self.discriminator is not None and self.trainer.global_step < self.objective.adversarial.start:
            for parameter in self.discriminator.parameters():
                parameter.grad = None

    def _measure(self, latents: Tensor) -> None:
        """Mean and mean square of the latents, as they change with the weights. A batch whose latents are not finite is
        left out: its step is skipped, and the average would never recover."""
        now = torch.stack((latents.mean(), latents.square().mean(), latents.new_ones(())))
        self.latent_moments.lerp_(torch.where(now.isfinite().all(), now, self.latent_moments), 1.0 - _STATISTICS_DECAY)

    def sample_losses(self, batch: PixelBatch) -> tuple[Tensor, None, dict[str, Tensor]]:
        """As `TrainedModule.sample_losses`. The loss is that of the autoencoder without the adversarial term, so it can
        be compared over the whole run; its gradient has that term and the discriminator's."""
        self.ledger.enter("forward")
        pixels, reconstruction, kl, latents = self._reconstruct(batch)
        self._measure(latents.detach())
        with autocast(pixels.device, "fp32"):
            if self.discriminator is None:
                losses, logged = self._distances(reconstruction, pixels)
            else:
                losses, logged = self._against_discriminator(self.discriminator, reconstruction, pixels)
        self._last_features = None
        logged["kl"] = kl.mean()
        if self.is_decoder_only:
            return losses, None, logged
        weight, warmup = self.objective.kl_weight, self.objective.kl_warmup
        if warmup:
            weight *= min(1.0, (self.trainer.global_step + 1) / warmup)
        return losses + weight * kl, None, logged

    def held_out_measures(self, batch: PixelBatch, quantiles: Sequence[float]) -> tuple[Tensor, Tensor]:
        """As `TrainedModule.held_out_measures`; there are no noise levels, so all quantiles have the same values. The
        loss has the full KL weight."""
        pixels, reconstruction, kl, _ = self._reconstruct(batch)
        with autocast(pixels.device, "fp32"):
            losses, _ = self._distances(reconstruction, pixels)
            if not self.is_decoder_only:
                losses = losses + self.objective.kl_weight * kl
            shown = reconstruction.clamp(-1.0, 1.0)
            psnr = peak_signal_noise_ratio(shown, pixels, data_range=2.0, reduction="none", dim=(1, 2, 3))
            ssim: Any = structural_similarity_index_measure(shown, pixels, data_range=2.0, reduction="none")
            values = [losses, psnr, ssim]
            if self.perceptual is not None:
                values.append(self.perceptual(shown, pixels))
        pairs = byte_pixels(torch.cat((pixels, shown), dim=3))
        return torch.stack([value.expand(len(quantiles), -1) for value in values]), pairs

    def reconstructions(self, batch: PixelBatch, count: int) -> Tensor:
        """As `TrainedModule.reconstructions`, from a draw of the posterior, as in training."""
        some = replace(batch, pixels=batch.pixels[:count], posterior_noise=batch.posterior_noise[:count])
        pixels, reconstruction, *_ = self._reconstruct(some)
        return byte_pixels(torch.cat((pixels, reconstruction), dim=3))

    def _reconstruct(self, batch: PixelBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Pixels and their reconstruction [B, 3, H, W], [B] KL per pixel value, and the latents; all fp32. In fp16 the
        sum of the KL, and the exponential in it, would overflow."""
        pixels = scaled_pixels(batch.pixels)
        posterior = DiagonalGaussianDistribution(self.network.encode(pixels).latent_dist.parameters.float())
        latents = posterior.mean + posterior.std * batch.posterior_noise
        reconstruction = self.network.decode(latents).sample.float()
        # kl() sums over a sample's latents; per pixel value it keeps its meaning at any resolution.
        return pixels, reconstruction, posterior.kl() / pixels[0].numel(), latents

    def _distances(self, reconstruction: Tensor, pixels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """[B] weighted sum of the terms that compare a picture with its own, and [] their means."""
        config, difference = self.objective.reconstruction, reconstruction - pixels
        own = difference.abs() if config.loss == "l1" else difference.square()
        losses = own.mean(dim=(1, 2, 3))
        logged: dict[str, Tensor] = {config.loss: losses.mean()}
        if self.perceptual is not None:
            perceptual = self.perceptual(reconstruction, pixels)
            logged["perceptual"] = perceptual.mean()
            losses = losses + config.perceptual_weight * perceptual
        return losses, logged

    def _against_discriminator(
        self, discriminator: PatchDiscriminator, reconstruction: Tensor, pixels: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """[B] as `_distances`, with another gradient; and [] scalars to log.

        The losses are computed on a copy of the reconstruction that is cut from the autoencoder's graph. Their
        gradients by it, weighted, are the autoencoder's gradient at its output: the scalar product with the output has
        that gradient. None of them reaches the discriminator, and the discriminator's loss does not reach the
        autoencoder. A value that is not finite makes the loss so.
        """
        config = self.objective.adversarial
        if self.trainer.global_step < config.start:
            losses, logged = self._distances(reconstruction, pixels)
            zero = losses.new_zeros(())
            logged |= dict.fromkeys(("adversarial", "adversarial_weight", "discriminator"), zero)
            # DDP waits for a gradient of every parameter; FSDP2 does not.
            whole = (p.sum() for p in discriminator.parameters() if not isinstance(p, DTensor))
            return losses + 0.0 * sum(whole), logged
        seen = reconstruction.detach().requires_grad_()
        losses, logged = self._distances(seen, pixels)
        (gradient,) = torch.autograd.grad(losses.mean(), seen)
        fake = discriminator(seen)
        adversarial = -fake.mean()
        (against,) = torch.autograd.grad(adversarial, seen, retain_graph=True)
        weight = losses.new_full((), config.weight)
        if config.adaptive:
            weight = weight * self._adaptive_weight(gradient, against)
        discriminating = hinge_loss(discriminator(pixels), fake)
        logged |= {"adversarial": adversarial, "adversarial_weight": weight, "discriminator": discriminating}
        minimised = (reconstruction * (gradient + weight * against)).sum() + discriminating
        return losses.detach() + (minimised - minimised.detach()), logged

    def _adaptive_weight(self, *gradients: Tensor) -> Tensor:
        """[] of the gradients by the output, averaged over all processes as those of the weights are."""
        assert self._last_features is not None
        kernel = self.network.decoder.conv_out.weight.shape
        last = last_layer_gradients(self._last_features, kernel, gradients)
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(last)
            last /= self.trainer.world_size
        return adaptive_weight(last)

    @torch.no_grad()
    def latent_statistics(self) -> tuple[float, float] | None:
        """Mean and standard deviation of the latents; None before the first batch whose latents are finite.

        Collective: averages the moments of all ranks.
        """
        moments = self.latent_moments.clone()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(moments)
        total, total_square, weight = moments.tolist()
        if weight == 0:
            return None
        mean = total / weight
        return mean, max(total_square / weight - mean**2, 1e-12) ** 0.5
