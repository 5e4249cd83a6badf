"""The project's own denoiser `MMDiTRope`: the two-stream transformer of Stable Diffusion 3 with rotary image positions.

Against Esser et al. 2024 ("Scaling Rectified Flow Transformers", section 4) it has 2-D rotary positions on image tokens
instead of added ones, any number of text encoders with a norm and a scale each, a learnable time scale, SwiGLU MLPs and
RMS-normed queries and keys throughout. It follows the from-scratch training of gmongaras, with position scaling that
works at resolutions other than the first.

Exported pipelines name this module, so it keeps its place.

Shape letters: B samples, W width of the transformer, N heads, E width of a head, I image tokens, L text tokens,
M = L + I joint tokens. In the joint sequence text comes first.
"""

import math
from collections.abc import Sequence

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import Tensor, nn
from torch.nn import functional as F

NORM_EPS = 1e-6
TIMESTEPS_PER_UNIT = 1000.0
"""A timestep is the noise level σ in [0, 1] times this, as in diffusers' flow-matching schedulers."""


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """[B, width] sines, then cosines, of `positions / 10000^(2i/width)` (Vaswani et al. 2017, section 3.5).

    Args:
        positions: [B] float32.
        width: even.
    """
    steps = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width
    angles = positions[:, None] * torch.exp(-math.log(10000.0) * steps)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def axial_angles(rows: int, columns: int, head_dim: int, theta: float, scale: float, device: torch.device) -> Tensor:
    """[rows·columns, head_dim/2] float32 angles of 2-D rotary positions: row angles, then column angles.

    Each axis has head_dim/4 frequencies theta^(-4j/head_dim) (Su et al. 2021, equation 15, for half a head).

    Args:
        scale: what row and column numbers are multiplied by.
    """
    frequencies = theta ** (-torch.arange(0, head_dim, 4, device=device, dtype=torch.float32) / head_dim)
    row = torch.arange(rows, device=device, dtype=torch.float32)[:, None] * scale * frequencies
    column = torch.arange(columns, device=device, dtype=torch.float32)[:, None] * scale * frequencies
    row, column = row[:, None].expand(-1, columns, -1), column[None].expand(rows, -1, -1)
    return torch.cat([row, column], dim=-1).flatten(0, 1)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turns each pair (x_2j, x_2j+1) of the last axis by its angle (Su et al. 2021, equation 34); in float32.

    Args:
        x: [B, N, I, E].
        angles: [I, E/2].
    """
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)


def modulate(normed: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """AdaLN(x) = LN(x)·(1 + scale) + shift, LN without weights (Peebles & Xie 2023, section 3.2).

    Args:
        normed: [B, tokens, W] LN(x).
        scale, shift: [B, 1, W].
    """
    return normed * (1 + scale) + shift


class RMSNorm(nn.RMSNorm):
    """x / rms(x) · weight (Zhang & Sennrich 2019, equation 4), in the type of x, so that autocast keeps one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] → [..., width]."""
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class SwiGLU(nn.Module):
    """W2(SiLU(W1 x) · W3 x), without biases (Shazeer 2020, equation 6)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] → [..., width]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class TimestepEmbedding(nn.Module):
    """Linear(sinusoids(σ · scale)) with a learnable scale, so that the model finds the range of times that suits it."""

    def __init__(self, width: int, scale_init: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), float(scale_init)))  # not 0-dimensional: sharding needs an axis
        self.linear = nn.Linear(width, width)

    def forward(self, timestep: Tensor) -> Tensor:
        """[B] timesteps (σ × 1000) → [B, W]."""
        waves = sinusoids(timestep.float() / TIMESTEPS_PER_UNIT * self.scale.float(), self.linear.in_features)
        return self.linear(waves.to(self.linear.weight.dtype))


class TextProjection(nn.Module):
    """W(s · RMSNorm(h)) of one text encoder: encoders differ in magnitude by orders, hence norm and learnable s."""

    def __init__(self, text_dim: int, width: int, scale_init: float) -> None:
        super().__init__()
        self.norm = RMSNorm(text_dim, eps=NORM_EPS)
        self.scale = nn.Parameter(torch.full((1,), float(scale_init)))
        self.linear = nn.Linear(text_dim, width, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """[B, L, D] → [B, L, W]."""
        return self.linear(self.norm(states) * self.scale)


class Stream(nn.Module):
    """The weights that image tokens, or text tokens, have of their own in one block.

    Args:
        has_output: False for the text of the last block, which nothing reads: it only gives keys and values.
    """

    def __init__(self, width: int, head_dim: int, hidden: int, has_output: bool = True) -> None:
        super().__init__()
        self.head_dim, self.has_output = head_dim, has_output
        self.norm = nn.LayerNorm(width, eps=NORM_EPS, elementwise_affine=False)
        self.modulation = nn.Linear(width, width * (6 if has_output else 2))
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        self.key_norm = RMSNorm(head_dim, eps=NORM_EPS)
        if has_output:
            self.query = nn.Linear(width, width, bias=False)
            self.query_norm = RMSNorm(head_dim, eps=NORM_EPS)
            self.out = nn.Linear(width, width, bias=False)
            self.mlp = SwiGLU(width, hidden)

    def modulate_in(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Query (of no token without output), key and value, [B, N, tokens, E] each, queries and keys normed per head;
        and the modulations of `gate_residual`."""
        scale, shift, *rest = self.modulation(condition).chunk(6 if self.has_output else 2, dim=-1)
        x = modulate(self.norm(x), scale, shift)
        key, value = (self._heads(part) for part in self.key_value(x).chunk(2, dim=-1))
        query = self.query_norm(self._heads(self.query(x))) if self.has_output else key[:, :, :0]
        return query, self.key_norm(key), value, rest

    def _heads(self, x: Tensor) -> Tensor:
        """[B, tokens, W] → [B, N, tokens, E]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def gate_residual(self, x: Tensor, attended: Tensor, modulations: Sequence[Tensor]) -> Tensor:
        """x + g1·Attn, then x + g2·MLP(AdaLN(x)): both skips start at the stream, not at the normed input."""
        gate, mlp_scale, mlp_shift, mlp_gate = modulations
        x = x + gate * self.out(attended)
        return x + mlp_gate * self.mlp(modulate(self.norm(x), mlp_scale, mlp_shift))


class JointBlock(nn.Module):
    """One block of the two-stream transformer (Esser et al. 2024, figure 2b), with the skip connections as above."""

    def __init__(self, width: int, head_dim: int, hidden: int, text_has_output: bool) -> None:
        super().__init__()
        self.condition = nn.Linear(width, width)
        self.image = Stream(width, head_dim, hidden)
        self.text = Stream(width, head_dim, hidden, has_output=text_has_output)

    def forward(
        self, image: Tensor, text: Tensor, condition: Tensor, angles: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Image and text tokens after the block; the text comes back as it went in where it has no output.

        Args:
            image: [B, I, W].
            text: [B, L, W].
            condition: [B, W] time and pooled text.
            angles: [I, E/2] of the image tokens; text has no positions here.
            mask: [B, 1, 1, M] bool, True where a token may be attended to; None for everywhere.
        """
        condition = F.silu(self.condition(condition))[:, None]
        query, key, value, image_rest = self.image.modulate_in(image, condition)
        *of_text, text_rest = self.text.modulate_in(text, condition)
        of_image = (rotate(query, angles), rotate(key, angles), value)
        query, key, value = (torch.cat(pair, dim=2) for pair in zip(of_text, of_image, strict=True))
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2).flatten(2)
        text_attended, image_attended = attended.tensor_split([-image.shape[1]], dim=1)
        image = self.image.gate_residual(image, image_attended, image_rest)
        if self.text.has_output:
            text = self.text.gate_residual(text, text_attended, text_rest)
        return image, text


def to_patches(latents: Tensor, size: int) -> Tensor:
    """[B, C, h, w] → [B, I, C·p·p]."""
    return F.pixel_unshuffle(latents, size).flatten(2).mT.contiguous()


def from_patches(tokens: Tensor, rows: int, size: int) -> Tensor:
    """[B, I, C·p·p] → [B, C, h, w]."""
    return F.pixel_shuffle(tokens.mT.unflatten(2, (rows, -1)), size)


# `ModelMixin` must stay a name of this module: diffusers looks it up here to learn how the class is loaded.


class MMDiTRope(ModelMixin, ConfigMixin, PeftAdapterMixin):
    """Velocity of a rectified flow, from noised latents, a time and text conditioning.

    Args:
        in_channels: C.
        patch_size: latent cells along one side of a token.
        num_layers: blocks; the last one has no text output.
        num_attention_heads: N.
        attention_head_dim: E, a multiple of 4; the width W is N·E.
        text_dims: D_i of each text encoder that gives states.
        pooled_dim: P; 0 for a model without pooled vector.
        mlp_ratio: hidden width of the MLPs as a multiple of W.
        rope_theta: base of the rotary frequencies.
        rope_base_size: tokens along one side of the square whose positions the rotary angles are made for; grids of
            another area are squeezed (or stretched) into it (Chen et al. 2023, "position interpolation"). Both axes
            share the factor, so nothing is distorted. Also the usual size of a picture.
        time_scale_init: what σ in [0, 1] is first multiplied by.
        text_scale_init: what normed text states are first multiplied by.
        zero_init: start as the identity with zero output ("adaLN-zero", Peebles & Xie 2023); False starts from random
            gates.

    Raises:
        ValueError: a parameter that makes no network.
    """

    _no_split_modules = ["JointBlock"]  # noqa: RUF012 - diffusers reads a list

    @register_to_config
    def __init__(
        self,
        in_channels: int = 16,
        patch_size: int = 2,
        num_layers: int = 19,
        num_attention_heads: int = 19,
        attention_head_dim: int = 64,
        text_dims: Sequence[int] = (2304, 1024),
        pooled_dim: int = 768,
        mlp_ratio: float = 4.0,
        rope_theta: float = 1e4,
        rope_base_size: int = 32,
        time_scale_init: float = 1000.0,
        text_scale_init: float = 0.01,
        zero_init: bool = True,
    ) -> None:
        super().__init__()
        if attention_head_dim % 4:
            raise ValueError(f"attention_head_dim: {attention_head_dim} is not a multiple of 4 (pairs of two axes)")
        width = num_attention_heads * attention_head_dim
        self.patchify = nn.Linear(in_channels * patch_size**2, width)
        self.time_embedding = TimestepEmbedding(width, time_scale_init)
        self.pooled_projection = nn.Linear(pooled_dim, width) if pooled_dim else None
        self.text_projections = nn.ModuleList(TextProjection(dim, width, text_scale_init) for dim in text_dims)
        self.blocks = nn.ModuleList(
            JointBlock(width, attention_head_dim, int(mlp_ratio * width), text_has_output=layer < num_layers - 1)
            for layer in range(num_layers)
        )
        self.final_norm = nn.LayerNorm(width, eps=NORM_EPS, elementwise_affine=False)
        self.final_modulation = nn.Linear(width, 2 * width)
        self.unpatchify = nn.Linear(width, in_channels * patch_size**2)
        self._initialise(zero_init)

    def _initialise(self, zero_init: bool) -> None:
        """Xavier for every linear layer, then zeros where the network shall start as the identity."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if not zero_init:
            return
        gates = [module.modulation for module in self.modules() if isinstance(module, Stream)]
        for layer in [*gates, self.final_modulation, self.unpatchify]:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Sequence[Tensor],
        pooled_projections: Tensor | None = None,
        encoder_attention_mask: Sequence[Tensor | None] | None = None,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """The velocity noise − latents, [B, C, h, w].

        Args:
            hidden_states: [B, C, h, w] noised latents; h and w multiples of the patch size.
            timestep: [B] σ × 1000, where 0 is the picture and 1000 is noise.
            encoder_hidden_states: [B, L_i, D_i] of each text encoder.
            pooled_projections: [B, P].
            encoder_attention_mask: [B, L_i] bool beside each of the states, False for tokens that must not count; None
                for an encoder, or for all, lets every token count.

        """
        config, patch = self.config, self.config.patch_size
        rows, columns = (side // patch for side in hidden_states.shape[-2:])
        image = self.patchify(to_patches(hidden_states, patch))
        text, mask = self._text(encoder_hidden_states, encoder_attention_mask, image.shape[1])
        condition = self.time_embedding(timestep)
        if self.pooled_projection is not None:
            condition = condition + self.pooled_projection(pooled_projections)
        spacing = config.rope_base_size / math.sqrt(rows * columns)
        head_dim, theta = config.attention_head_dim, config.rope_theta
        angles = axial_angles(rows, columns, head_dim, theta, spacing, hidden_states.device)
        for block in self.blocks:
            image, text = block(image, text, condition, angles, mask)
        scale, shift = self.final_modulation(F.silu(condition))[:, None].chunk(2, dim=-1)
        sample = from_patches(self.unpatchify(modulate(self.final_norm(image), scale, shift)), rows, patch)
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)

    def _text(
        self, states: Sequence[Tensor], masks: Sequence[Tensor | None] | None, image_length: int
    ) -> tuple[Tensor, Tensor | None]:
        """Text tokens [B, L, W], and the mask [B, 1, 1, L + I] over the joint sequence if any token is masked."""
        text = torch.cat([project(s) for project, s in zip(self.text_projections, states, strict=True)], dim=1)
        if masks is None or all(mask is None for mask in masks):
            return text, None
        pairs = zip(states, masks, strict=True)
        kept = torch.cat([s.new_ones(s.shape[:2]).bool() if mask is None else mask.bool() for s, mask in pairs], dim=1)
        text = text.masked_fill(~kept[..., None], 0.0)  # a weight of 0 would not stop a NaN in a masked token
        return text, F.pad(kept, (0, image_length), value=True)[:, None, None]
