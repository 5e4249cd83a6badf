"""scripts/recaption.py with real, tiny models: a captioner, and a vision-language model with a chat template."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BlipConfig,
    BlipForConditionalGeneration,
    BlipImageProcessorPil,
    BlipProcessor,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from scripts import recaption
from sd_training.config.data_schema import CaptionConfig
from tests import makers
from tests.faults.fork_server import shared_server
from tests.faults.tiny_run import TORCHRUN
from tests.integration.commands import ROOT, fails
from tests.unit.data.making import training_data

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "<image>"]
WORDS = [*SPECIAL, "a", "red", "green", "blue", "picture", "of", "the", "in", "long", "short", "user"]
CHAT = (
    "{% for m in messages %}user {% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<image> {% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    fast = PreTrainedTokenizerFast(tokenizer_object=words, **special, eos_token="[SEP]", bos_token="[CLS]")
    fast.add_special_tokens({"additional_special_tokens": ["<image>"]})
    return fast


def save_blip(folder: Path) -> Path:
    """Without a chat template."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"bos_token_id": 2, "eos_token_id": 3, "sep_token_id": 3, "pad_token_id": 0}
    text = {**sizes, **ends, "vocab_size": len(WORDS), "encoder_hidden_size": 16, "projection_dim": 16}
    config = BlipConfig(text_config=text, vision_config={**sizes, "image_size": 32, "patch_size": 16})
    BlipForConditionalGeneration(config).save_pretrained(folder)
    BlipProcessor(BlipImageProcessorPil(size={"height": 32, "width": 32}), tokenizer()).save_pretrained(folder)
    return folder


def save_llava(folder: Path) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**sizes, image_size=32, patch_size=16),
        text_config=LlamaConfig(**sizes, vocab_size=len(WORDS), eos_token_id=3, pad_token_id=0, bos_token_id=2),
        image_token_index=WORDS.index("<image>"),
        image_seq_length=4,
    )
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    images = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    LlavaProcessor(
        images, tokenizer(), patch_size=16, vision_feature_select_strategy="default", chat_template=CHAT,
        image_token="<image>", num_additional_image_tokens=1,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def rows(out: Path) -> list[dict[str, Any]]:
    return [row for path in sorted(out.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def words(shards: Path, model: Path, out: Path, *more: object) -> list[str]:
    own = ["--model", model, "--out", out, "--device", "cpu", "--dtype", "float32", "--max-tokens", 6]
    return list(map(str, [shards, *own, "--short-max-tokens", 3, "--samples-per-file", 4, "--batch-size", 3, *more]))


@pytest.mark.parametrize("save", [save_blip, save_llava])
def test_captions_are_written_and_trained_on(save: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = makers.caption_shards(tmp_path / "shards", shards=1, per_shard=9)
    broken = {**makers.caption_samples(1, first=20)[0], "jpg": b"no picture"}
    good = {**makers.caption_samples(1, first=21)[0], "json": b'{"uid": 1234567}'}  # elsewhere it is a text
    makers.write_shard(shards / "001.tar", [broken, good])
    recaption.main(words(shards, model := save(tmp_path / "model"), out := tmp_path / "out"))
    assert "10 pictures with captions in" in capsys.readouterr().out
    (skipped,) = [json.loads(line) for line in (out / "skipped.jsonl").read_text().splitlines()]
    assert skipped["sample"].endswith("001.tar/000020")
    found = rows(out)
    assert [row["key"] for row in found] == [*(f"{i:06d}" for i in range(9)), "000021"]
    assert all(1 <= len(row["recaption"].split()) <= 6 for row in found)  # special tokens are left out
    assert all(1 <= len(row["recaption_short"].split()) <= 3 for row in found)
    assert [row["original_width"] for row in found[:3]] == [40.0, 41.0, 42.0] and found[3]["uid"] == "u3"
    assert found[-1]["uid"] == "1234567"
    captions = CaptionConfig(fields={"caption": 1, "recaption": 1, "recaption_short": 1})
    (data,) = training_data(out, kind="Parquet", captions=captions).datasets
    assert len(data.selected) == 10
    assert data.all_captions(0) == [found[0][name] for name in ("caption", "recaption", "recaption_short")]
    if save is save_llava:
        from_each = recaption.Captioner(str(model), "cpu", torch.float32)
        image = [makers.picture(0), makers.picture(5)]
        prompts = ("a long picture", "the picture in short")
        assert from_each.captions(image, prompts[0], 4) != from_each.captions(image, prompts[1], 4)
    with pytest.raises(Exception, match="made with another --max-tokens; choose another folder"):
        recaption.main([*words(shards, model, out), "--max-tokens", "5"])


def test_two_processes_that_are_killed_write_every_caption_once(tmp_path: Path) -> None:
    shards = makers.caption_shards(tmp_path / "shards", shards=3, per_shard=16)
    model = save_blip(tmp_path / "model")
    recaption.main(words(shards, model, tmp_path / "whole"))
    command = ["--standalone", "--nproc_per_node", "2", str(ROOT / "scripts/recaption.py")]
    command += words(shards, model, out := tmp_path / "out")
    log = tmp_path / "log.txt"
    process = shared_server().start(TORCHRUN, command, log, os.environ)
    while not len(list(out.glob("*.parquet"))):
        assert process.poll() is None, log.read_text()
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)
    assert shared_server().start(TORCHRUN, command, log, os.environ).wait(300) == 0, log.read_text()
    assert rows(out) == rows(tmp_path / "whole") and len(rows(out)) == 48
    assert "48 pictures with captions in" in log.read_text()


def test_mistakes_are_sentences(tmp_path: Path) -> None:
    shards = makers.caption_shards(tmp_path / "shards", shards=1, per_shard=2)
    own = words(shards, makers.save_tiny_pipeline(tmp_path / "pipeline") / "unet", tmp_path / "out")
    assert "cannot be loaded as an image-text-to-text model" in fails(recaption.main, *own)
    assert "--batch-size: is 0; give 1 or more" in fails(recaption.main, *own, "--batch-size", "0")
    assert "no such file or folder" in fails(recaption.main, *words(tmp_path / "none", tmp_path, tmp_path / "out"))
