"""Hidden states and pooled vectors of captions, from any text encoder or decoder of transformers.

The trainer and the pipeline call the same functions, so that sampling sees the conditioning of the training.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor
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
        ConfigError: an option is unknown, or a value is wrong.
    """
    options = {}
    for name in encoders:
        try:
            options[name] = _OPTIONS.validate_python(dict(stored.get(name, {})))
        except ValidationError as error:
            problems = [f"text_options.{name}.{e['loc'][0]}: is {e['input']!r}; {e['msg']}" for e in error.errors()]
            raise ConfigError(problems) from error
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
        masks: [B, L_i] bool each, True for tokens of the caption.
    """
    result, pooled = Conditioning([]), []
    for encoder, ids, mask, option in zip(encoders, tokens, masks, options, strict=True):
        states, vector = encode_tokens(encoder, ids, mask, option)
        if option.layer is not None:
            result.states.append(states)
            result.masks.append(mask if option.use_mask else None)
        if vector is not None:
            pooled.append(vector)
    result.pooled = torch.cat(pooled, dim=-1) if pooled else None
    return result


def encode_tokens(
    encoder: PreTrainedModel, tokens: Tensor, mask: Tensor, option: TextOptions
) -> tuple[Tensor, Tensor | None]:
    """Hidden states and pooled vector of one text encoder, in the encoder's mode and precision.

    The head of a language model and the decoder of an encoder-decoder are left out.

    Args:
        encoder: any text encoder or decoder of transformers.
        tokens: [B, L] int64.
        mask: [B, L] bool, True for tokens of the caption. Without `use_mask` only pooling reads it; with it states of
            masked tokens are 0.
        option: layer (-1 is the last one with its norm, -N-1 the embeddings of an encoder of N layers) and pooling.

    Returns:
        [B, L, D] states and [B, P] pooled vector of the last layer (None for pooling none).
    """
    network = encoder
    if getattr(encoder.config, "is_encoder_decoder", False):
        network = encoder.get_encoder()
    elif encoder.get_output_embeddings() is not None:
        network = encoder.base_model
    is_last = option.layer in (None, -1)
    attention_mask = mask.long() if option.use_mask else None
    output = network(input_ids=tokens, attention_mask=attention_mask, output_hidden_states=not is_last)
    last = output.last_hidden_state
    states = last if is_last else output.hidden_states[option.layer]
    of_caption = last.masked_fill(~mask[..., None], 0.0)
    if option.use_mask:
        states, last = states.masked_fill(~mask[..., None], 0.0), of_caption
    rows = torch.arange(len(last), device=last.device)
    match option.pooling:
        case "none":
            return states, None
        case "projection":
            return states, output.text_embeds
        case "mean":
            return states, of_caption.sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp(min=1)
        case "eos" if encoder.config.model_type == "clip_text_model":
            # The first end-of-text token, as it also pads. Old configs say 2, which their vocabularies do not mean:
            # there the end is the highest id.
            end = encoder.config.eos_token_id
            return states, last[rows, tokens.argmax(dim=1) if end == 2 else (tokens == end).int().argmax(dim=1)]
        case "eos":
            return states, last[rows, (torch.arange(mask.shape[1], device=mask.device) * mask).argmax(dim=1)]
