"""Tracks of a real run, and an average rebuilt from their snapshots."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from scripts import posthoc_ema
from tests.integration.training import checkpoint_tensors, options, train


def test_an_average_of_another_width_is_rebuilt(pipeline_dir: Path, shards_dir: Path, tmp_path: Path) -> None:
    changes = {"experiment__num_examples_to_see": 160, "system__batch_size": 4, "experiment__save_every": 20}
    tracks = options(
        tmp_path / "tracks",
        pipeline_dir,
        shards_dir,
        **changes,
        ema__sigma_rels="[0.05,0.10]",
        ema__snapshot_every=1,
        logging__every=20,
    )
    train(tracks)
    direct = options(
        tmp_path / "direct", pipeline_dir, shards_dir, **changes, ema__sigma_rels="[0.075]", logging__every=20
    )
    train(direct)
    posthoc_ema.main([str(tmp_path / "tracks"), "--sigma-rel", "0.075", "--out", str(tmp_path / "out")])
    rebuilt = load_file(tmp_path / "out" / "unet" / "diffusion_pytorch_model.safetensors")
    prefix = "ema-sigma_rel=0.075:network."
    kept = {n.removeprefix(prefix): t for n, t in checkpoint_tensors(tmp_path / "direct", 40).items() if prefix in n}
    assert kept.keys() == rebuilt.keys()
    off = torch.stack([(rebuilt[name] - kept[name]).square().sum() for name in kept]).sum().sqrt()
    size = torch.stack([tensor.square().sum() for tensor in kept.values()]).sum().sqrt()
    assert off / size < 1e-3
    raw = {n.removeprefix("weights:network."): t for n, t in checkpoint_tensors(tmp_path / "direct", 40).items()}
    moved = torch.stack([(raw[name] - kept[name]).square().sum() for name in kept]).sum().sqrt()
    assert off < 0.02 * moved  # the average itself is farther from the weights than the two are from each other
