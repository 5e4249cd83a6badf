"""What attention runs on, and networks that xformers cannot run."""

import logging

import pytest
import torch
from diffusers.models.attention_processor import XFormersAttnProcessor

from sd_training.models.execution import attention_sentence, log, use_fast_attention, xformers_problems
from tests.family_makers import PIPELINES


def denoiser(family: str) -> torch.nn.Module:
    parts = PIPELINES[family]().components
    return parts["unet"] if "unet" in parts else parts["transformer"]


@pytest.mark.parametrize("family", PIPELINES)
def test_a_network_without_the_hook_is_refused(family: str) -> None:
    problems = xformers_problems(denoiser(family))
    if family == "mmdit_rope":
        [problem] = problems
        assert problem.startswith("model.xformers: true, but MMDiTRope has no attention")
        assert problem.endswith("set model.xformers=false")
    else:
        assert problems == []


def test_the_log_says_what_runs(caplog: pytest.LogCaptureFixture) -> None:
    unet = denoiser("stable_diffusion")
    with caplog.at_level(logging.INFO, log.name):
        use_fast_attention(unet, torch.device("cpu"))
        assert caplog.messages == [
            "model.xformers: UNet2DConditionModel runs on PyTorch's fused attention instead (there is no CUDA device)"
        ]
        if not torch.cuda.is_available():  # a device that is not there, as a broken installation of xformers
            use_fast_attention(unet, torch.device("cuda"))
            assert "fused attention instead (" in caplog.messages[1]
            assert "no CUDA device" not in caplog.messages[1]


def test_the_log_counts_the_modules_that_were_switched() -> None:
    unet = denoiser("stable_diffusion")
    names = list(unet.attn_processors)
    unet.set_attn_processor({name: XFormersAttnProcessor() for name in names})
    whole = f"{len(names)} of {len(names)} attention modules of UNet2DConditionModel run on xformers"
    assert attention_sentence(unet, "") == whole

    flux = denoiser("flux")
    flux.transformer_blocks[0].attn.set_attention_backend("xformers")
    switched, _, count = attention_sentence(flux, "").split()[:3]
    assert (int(switched), int(count)) == (1, len(flux.attn_processors))
