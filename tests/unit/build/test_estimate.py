"""Parameters by what becomes of them."""

from pathlib import Path

from sd_training.build.estimate import meta_networks, model_size
from sd_training.config.load import load_config
from tests.family_makers import save_pipeline


def test_counts_of_a_model(tmp_path: Path) -> None:
    config = load_config(
        [
            "experiment.log_dir=runs",
            "experiment.name=x",
            "experiment.num_examples_to_see=100_000",
            "dataset.type=WebDataset",
            "dataset.params.path=nowhere",
            "dataset.params.resolution=16",
            f"model.pretrained={save_pipeline('stable_diffusion', tmp_path / 'pipeline')}",
            "model.bf16_weights=true",
            "optimizer.stochastic_rounding=true",
        ]
    )
    networks, family = meta_networks(config)
    assert family is not None
    size = model_size(config, networks, family, "bf16")
    blocks = [list(block.parameters()) for block in family.blocks()]
    assert (size.weight_bytes, size.compute_bytes, size.state_bytes, size.has_ema) == (2, 2, 8, False)
    assert model_size(config, networks, family, "no").compute_bytes == 4
    assert size.trained == sum(p.numel() for p in networks["unet"].parameters())
    assert size.frozen == sum(p.numel() for part in ("vae", "text_encoder") for p in networks[part].parameters())
    assert size.in_blocks == sum(p.numel() for block in blocks for p in block) < size.trained
    assert size.largest_block == max(sum(p.numel() for p in block) for block in blocks)
    assert size.block_matrices == 0  # UNets have no plan for the tensor axis
