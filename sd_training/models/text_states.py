"""Hidden states and pooled vectors of captions, from any text encoder or decoder of transformers.

The trainer and the pipeline call the same functions, so that sampling sees the conditioning of the training.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sd_training.config.schema import TextOptions
from sd_training.data.samples.captions import Tokenizer
from sd_training.errors import ConfigError
from sd_training.types import Conditioning

_OPTIONS = TypeAdapter(TextOptions)


def read_text_options(stored: Mapping[str, Any], encoders: Sequence[str]) -> dict[str, TextOptions]:
    """Text encoder → its options.

    Args:
        stored: as a pipeline stores them; encoders and options that are left out have the defaults.
        encoders: names of those that there are.

    Raises:
        ConfigError: an encoder or an option is unknown, or a value is wrong.
    """
    problems = [f"text_options.{name}: there is no such text encoder" for name in stored if name not in encoders]
    options = {}
    for name in encoders:
        try:
            options[name] = _OPTIONS.validate_python(dict(stored.get(name, {})))
        except ValidationError as error:
            problems += [f"text_options.{name}.{e['loc'][0]}: is {e['input']!r}; {e['msg']}" for e in error.errors()]
    if problems:
        raise ConfigError(problems)
    return options


def tokenize(tokenizer: PreTrainedTokenizerBase, captions: Sequence[str], max_tokens: int) -> tuple[Tensor, Tensor]:
    """Token ids and mask, truncated and padded to `max_tokens` as training does.

    Returns:
        [B, L] int64 ids and [B, L] bool, True for tokens of the caption.
    """
    encode = Tokenizer(tokenizer, max_tokens).encode_counted
    encoded = [encode(caption) for caption in captions]
    tokens, masks = np.stack([row.tokens for row in encoded]), np.stack([row.mask for row in encoded])
    return torch.from_numpy(tokens), torch.from_numpy(masks)


def encode_texts(
    encoders: Sequence[PreTrainedModel],
    tokens: Sequence[Tensor],
    masks: Sequence[Tensor],
    options: Sequence[TextOptions],
) -> Conditioning:
    """States and pooled vectors of every encoder; the four sequences run over the encoders.

    Args:
        tokens: [B, L_i] int64 each.
        masks: [B, L_i] bool each; not used for an encoder with `use_mask=False`.
    """
    result, pooled = Conditioning([]), []
    for encoder, ids, given, option in zip(encoders, tokens, masks, options, strict=True):
        mask = given if option.use_mask else None
        layer = -1 if option.layer is None else option.layer
        states, vector = encode_tokens(encoder, ids, mask, layer, option.pooling, option.apply_final_norm)
        if option.layer is not None:
            result.states.append(states)
            result.masks.append(mask)
        if vector is not None:
            pooled.append(vector)
    result.pooled = torch.cat(pooled, dim=-1) if pooled else None
    return result


def encode_tokens(
    encoder: PreTrainedModel,
    tokens: Tensor,
    mask: Tensor | None,
    layer: int,
    pooling: str,
    apply_final_norm: bool,
) -> tuple[Tensor, Tensor | None]:
    """Hidden states and pooled vector of one text encoder, in the encoder's mode and precision.

    The head of a language model and the decoder of an encoder-decoder are left out.

    Args:
        encoder: any text encoder or decoder of transformers.
        tokens: [B, L] int64.
        mask: [B, L] bool, True for tokens of the caption; None lets every token count. States of masked tokens are 0.
        layer: -1 is the last layer, -N-1 the embeddings of an encoder of N layers.
        pooling: as `TextOptions.pooling`.
        apply_final_norm: whether states go through the encoder's final norm, if it has one.

    Returns:
        [B, L, D] states and [B, P] pooled vector (None for pooling none).
    """
    network = encoder
    if getattr(encoder.config, "is_encoder_decoder", False):
        network = encoder.get_encoder()
    elif encoder.get_output_embeddings() is not None:
        network = encoder.base_model
    attention_mask = None if mask is None else mask.long()
    with _final_norm_calls(network) as calls:
        output = network(input_ids=tokens, attention_mask=attention_mask, output_hidden_states=layer != -1)
    last = output.last_hidden_state
    # The norm that made `last`, and its input; there is none where the layers end in norms of their own.
    made = (call[:2] for call in reversed(calls) if call[2].shape == last.shape)
    norm, before_norm = next(made, (nn.Identity(), last))
    if layer == -1:
        states = last if apply_final_norm else before_norm
    else:
        states = output.hidden_states[layer]
        states = norm(states) if apply_final_norm else states
    if mask is not None:
        states, last = (x.masked_fill(~mask[..., None], 0.0) for x in (states, last))
    return states, _pool(encoder, output, last, tokens, mask, pooling)


@contextmanager
def _final_norm_calls(network: nn.Module) -> Iterator[list[tuple[nn.Module, Tensor, Tensor]]]:
    """Module, input and output of every norm that runs outside layers and embeddings.

    Whether the last of `hidden_states` has been normed differs between classes and versions of transformers, and so
    does the norm's name; what went in and came out does not.
    """
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []
    hooks = [
        module.register_forward_hook(lambda module, inputs, output: calls.append((module, inputs[0], output)))
        for name, module in network.named_modules()
        if "norm" in type(module).__name__.lower()
        and "embed" not in name
        and not any(step.isdigit() for step in name.split("."))
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def is_clip(encoder: PreTrainedModel) -> bool:
    """Whether it pools the end of the text without a mask."""
    return bool(encoder.config.model_type == "clip_text_model")


def _pool(
    encoder: PreTrainedModel, output: Any, last: Tensor, tokens: Tensor, mask: Tensor | None, pooling: str
) -> Tensor | None:
    """The pooled vector; `last` is the last layer after its norm, zero where masked."""
    if pooling == "none":
        return None
    if pooling == "projection":
        return output.text_embeds
    rows = torch.arange(len(last), device=last.device)
    if pooling == "eos" and is_clip(encoder):
        # The first end-of-text token, as it also pads. Old configs say 2, which their vocabularies do not mean: there
        # the end is the highest id.
        end = encoder.config.eos_token_id
        return last[rows, tokens.argmax(dim=1) if end == 2 else (tokens == end).int().argmax(dim=1)]
    assert mask is not None, "checked when the parts are put together: padding would count as text"
    if pooling == "mean":
        return last.sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return last[rows, (torch.arange(mask.shape[1], device=mask.device) * mask).argmax(dim=1)]
