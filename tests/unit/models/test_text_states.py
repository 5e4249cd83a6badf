"""States and pooled vectors of text encoders, against what transformers itself gives for each kind of encoder."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from sd_training.config.schema import TextOptions
from sd_training.data.samples.captions import Tokenizer
from sd_training.models.families import mmdit
from sd_training.models.families.mmdit import MMDiTRopePipeline, encode_texts
from tests import makers

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
END = 1
SPECIAL = {"bos_token_id": 0, "eos_token_id": END, "pad_token_id": END}
MASK = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])


def t5_config() -> transformers.T5Config:
    return transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=3, num_heads=2, decoder_start_token_id=0
    )


def gemma_config() -> transformers.Gemma2Config:
    return transformers.Gemma2Config(**SIZES, num_key_value_heads=1, head_dim=8)


# Each with the layer list and the final norm, written down by hand from the architecture.
MAKERS: dict[str, Callable[[], Any]] = {
    "clip": lambda: transformers.CLIPTextModel(transformers.CLIPTextConfig(**SIZES, **SPECIAL)),
    "clip_projection": lambda: transformers.CLIPTextModelWithProjection(
        transformers.CLIPTextConfig(**SIZES, **SPECIAL, projection_dim=12)
    ),
    "t5": lambda: transformers.T5EncoderModel(t5_config()),
    "gemma": lambda: transformers.Gemma2Model(gemma_config()),
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SIZES)),
    "modernbert": lambda: transformers.ModernBertModel(transformers.ModernBertConfig(**SIZES, **SPECIAL)),
}
LAYERS: dict[str, Callable[[Any], tuple[nn.ModuleList, nn.Module]]] = {
    "clip": lambda m: (m.encoder.layers, m.final_layer_norm),
    "clip_projection": lambda m: (m.text_model.encoder.layers, m.text_model.final_layer_norm),
    "t5": lambda m: (m.encoder.block, m.encoder.final_layer_norm),
    "gemma": lambda m: (m.layers, m.norm),
    "bert": lambda m: (m.encoder.layer, nn.Identity()),
    "modernbert": lambda m: (m.layers, m.final_norm),
}
every_encoder = pytest.mark.parametrize("kind", MAKERS)


def make(kind: str) -> Any:
    torch.manual_seed(0)
    encoder = MAKERS[kind]().eval()
    with torch.no_grad():  # norms start at one, where applying them twice would go unnoticed
        for name, parameter in encoder.named_parameters():
            if "norm" in name.lower():
                parameter.add_(0.3 * torch.randn_like(parameter))
    return encoder


def encode_tokens(encoder: Any, ids: Tensor, mask: Tensor | None, layer: Any, pooling: Any) -> Any:
    option = TextOptions(layer=layer, pooling=pooling, use_mask=mask is not None)
    read = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    text = encode_texts({"a": encoder}, {"a": ids}, {"a": read}, {"a": option})
    return text.states[0], text.pooled


def tokenize(tokenizer: Any, captions: list[str], max_tokens: int) -> tuple[Tensor, Tensor]:
    """What the pipeline gives to a text encoder."""
    options, name = {"text_encoder": TextOptions(max_tokens=max_tokens)}, "text_encoder"
    pipeline: Any = SimpleNamespace(options=options, tokenizer=tokenizer, components={}, _execution_device="cpu")
    pipeline.config = SimpleNamespace(force_zeros_for_empty_prompt=False)
    with mock.patch.object(mmdit, "encode_texts", lambda _, tokens, masks, *__: (tokens[name], masks[name])):
        read: Any = MMDiTRopePipeline.encode_prompts(pipeline, captions)
    return read


def tokens() -> Tensor:
    ids = torch.randint(3, 50, (2, 7), generator=torch.Generator().manual_seed(1))
    ids[0, 5:], ids[1, 3:] = END, END
    return ids


def library_states(kind: str, encoder: Any, ids: Tensor, mask: Tensor | None) -> tuple[list[Tensor], Any]:
    """Output of every layer as it left the layer, and the library's own output."""
    layers, _ = LAYERS[kind](encoder)
    outputs: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda m, i, o: outputs.append(o[0] if isinstance(o, tuple) else o))
        for layer in layers
    ]
    attention = None if mask is None else mask.long()
    result = encoder(input_ids=ids, attention_mask=attention)
    for hook in hooks:
        hook.remove()
    return outputs, result


@every_encoder
@pytest.mark.parametrize("mask", [None, MASK], ids=["unmasked", "masked"])
@torch.no_grad()
def test_states_are_those_of_the_library(kind: str, mask: Tensor | None) -> None:
    encoder, ids = make(kind), tokens()
    layers, output = library_states(kind, encoder, ids, mask)
    _, norm = LAYERS[kind](encoder)
    counts = torch.ones_like(MASK) if mask is None else mask
    for layer in (-2, -3):
        raw, _ = encode_tokens(encoder, ids, mask, layer, "none")
        assert torch.equal(raw[counts], layers[layer][counts])
        assert not raw[~counts].any()
    last, _ = encode_tokens(encoder, ids, mask, -1, "none")
    assert torch.equal(last[counts], output.last_hidden_state[counts]) and not last[~counts].any()
    assert torch.allclose(last[counts], norm(layers[-1])[counts], atol=1e-6)


@every_encoder
@torch.no_grad()
def test_masked_tokens_and_their_number_do_not_matter(kind: str) -> None:
    encoder, ids = make(kind), tokens()
    ids[1, 3] = END
    states, pooled = encode_tokens(encoder, ids, MASK, -2, "mean")
    other = ids.clone()
    other[1, 4:] = 7
    changed, changed_pooled = encode_tokens(encoder, other, MASK, -2, "mean")
    short, short_pooled = encode_tokens(encoder, ids[1:, :4], MASK[1:, :4], -2, "mean")
    assert pooled is not None and changed_pooled is not None and short_pooled is not None
    assert torch.equal(states, changed) and torch.equal(pooled, changed_pooled)
    assert torch.allclose(states[1:, :4], short, atol=1e-5) and torch.allclose(pooled[1:], short_pooled, atol=1e-5)


@every_encoder
@torch.no_grad()
def test_the_mean_is_of_the_last_layer_whatever_layer_is_asked_for(kind: str) -> None:
    encoder, ids = make(kind), tokens()
    last, _ = encode_tokens(encoder, ids, MASK, -1, "none")
    _, mean = encode_tokens(encoder, ids, MASK, -3, "mean")
    assert mean is not None
    for row, length in ((0, 7), (1, 4)):
        assert torch.allclose(mean[row], last[row, :length].mean(dim=0), atol=1e-6)


@torch.no_grad()
def test_projection_is_text_embeds() -> None:
    encoder, ids = make("clip_projection"), tokens()
    states, pooled = encode_tokens(encoder, ids, None, -2, "projection")
    library = encoder(ids, output_hidden_states=True)
    assert pooled is not None and torch.equal(pooled, library.text_embeds)
    assert torch.equal(states, library.hidden_states[-2])  # what SDXL's pipeline takes


@torch.no_grad()
def test_deepest_layer_is_the_embeddings() -> None:
    encoder, ids = make("gemma"), tokens()
    states, _ = encode_tokens(encoder, ids, None, -4, "none")
    assert torch.allclose(states, encoder.embed_tokens(ids))


@torch.no_grad()
def test_a_caption_without_tokens_gives_zeros() -> None:
    encoder, mask = make("gemma"), MASK.clone()
    mask[1] = False
    states, pooled = encode_tokens(encoder, tokens(), mask, -1, "mean")
    assert pooled is not None and not states[1].any() and not pooled[1].any() and pooled[0].any()


def test_gradients_reach_a_trained_encoder() -> None:
    encoder = make("clip")
    encode_tokens(encoder, tokens(), None, -1, "none")[0].square().sum().backward()
    assert all(parameter.grad is not None for parameter in encoder.parameters())


def word_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    words = tokenizers.Tokenizer(
        models.WordLevel({"<e>": 0, "a": 1, "red": 2, "blue": 3, "<p>": 4, "?": 5}, unk_token="?")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **special)


def test_tokens_are_padded_on_the_right_and_cut() -> None:
    ids, mask = tokenize(word_tokenizer(pad_token="<p>"), ["a red", "a a red blue a", ""], 4)
    assert ids.tolist() == [[1, 2, 4, 4], [1, 1, 2, 3], [4, 4, 4, 4]]
    assert mask.sum(dim=1).tolist() == [2, 4, 0]
    ids, _ = tokenize(word_tokenizer(eos_token="<e>"), ["a red"], 4)
    assert ids.tolist() == [[1, 2, 0, 0]]


def test_sampling_cuts_captions_as_the_loader_does() -> None:
    captions = ["a red", "a a red blue a", "", "green ?"]
    for tokenizer in (word_tokenizer(pad_token="<p>"), word_tokenizer(eos_token="<e>"), makers.tiny_tokenizer()):
        ids, mask = tokenize(tokenizer, captions, 4)
        loader = [Tokenizer(tokenizer, 4).encode(caption) for caption in captions]
        assert ids.tolist() == [encoded.tokens.tolist() for encoded in loader]
        assert mask.tolist() == [encoded.mask.tolist() for encoded in loader]


def test_clip_tokens_are_those_of_its_tokenizer() -> None:
    tokenizer = makers.tiny_tokenizer()
    captions = ["ab", "abcdefghijklmnopqrstuvwxyz", ""]
    expected = tokenizer(captions, padding="max_length", truncation=True, max_length=16, return_tensors="pt")
    ids, mask = tokenize(tokenizer, captions, 16)
    assert torch.equal(ids, expected["input_ids"]) and torch.equal(mask, expected["attention_mask"].bool())


@torch.no_grad()
def test_several_encoders_side_by_side() -> None:
    clip, gemma, bert = make("clip_projection"), make("gemma"), make("bert")
    encoders = {"a": clip, "b": gemma, "c": bert}
    options = {
        "a": TextOptions(layer=None, pooling="projection", use_mask=False),
        "b": TextOptions(layer=-2),
        "c": TextOptions(pooling="mean"),
    }
    text = encode_texts(encoders, dict.fromkeys(options, tokens()), dict.fromkeys(options, MASK), options)
    assert [tuple(states.shape) for states in text.states] == [(2, 7, 16), (2, 7, 16)]
    assert all(mask is MASK for mask in text.masks)
    expected = [
        encode_tokens(clip, tokens(), None, -1, "projection")[1],
        encode_tokens(bert, tokens(), MASK, -1, "mean")[1],
    ]
    assert text.pooled is not None and torch.equal(text.pooled, torch.cat([p for p in expected if p is not None], 1))
    assert torch.equal(text.states[0], encode_tokens(gemma, tokens(), MASK, -2, "none")[0])


@torch.no_grad()
def test_an_encoder_without_mask_reads_its_padding() -> None:
    bert = make("bert")
    text = encode_texts({"a": bert}, {"a": tokens()}, {"a": MASK}, {"a": TextOptions(use_mask=False)})
    assert text.masks == [None] and text.pooled is None
    assert torch.equal(text.states[0], bert(tokens()).last_hidden_state)
