"""Every strategy trains, averages, saves, resumes and exports what one process does."""

import json
from pathlib import Path

import pytest

from sd_training.build.dry_run import meta_networks, model_size
from sd_training.config.load import load_config
from tests.family_makers import save_pipeline
from tests.integration.training import losses, options, train, train_in_processes
from tests.strategy_report import ENGINES, Row, report
from tests.tiny_parts import flux

NAMES = [engine.name for engine in ENGINES]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    """Four steps with each; all but one process accumulate two micro-batches."""
    folder = tmp_path_factory.mktemp("strategies")
    return {row.engine: row for row in report(folder / "report", 4, is_quick=True)}


@pytest.mark.parametrize("name", NAMES)
def test_the_result_does_not_depend_on_the_strategy(rows: dict[str, Row], name: str) -> None:
    row = rows[name]
    assert max(row.loss, row.validation, row.weights, row.ema, row.accumulation) <= 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_goes_on_to_the_bit(rows: dict[str, Row], name: str) -> None:
    # DeepSpeed's Adam for CPUs multiplies powers of beta step by step, and takes them anew after a resume.
    assert rows[name].resume <= (1e-6 if "offload" in name else 0)


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_move_between_strategies(rows: dict[str, Row], name: str) -> None:
    assert rows[name].moves <= 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_the_exported_pipeline_is_the_average(rows: dict[str, Row], name: str) -> None:
    assert rows[name].export == 0


def estimated_cut(folder: Path) -> float:
    """Share of the weights that `--dry-run` says the tensor axis deals out."""
    flux().save_pretrained(folder / "pipeline")
    config = load_config(options(folder / "run", folder / "pipeline", folder))
    size = model_size(config, *meta_networks(config), precision="no")
    return size.block_matrices / size.trained


def test_memory_is_cut_as_the_strategy_says(rows: dict[str, Row], tmp_path: Path) -> None:
    weights, optimizer, average = rows["single"].mib
    shares = {
        name: tuple(m / whole for m, whole in zip(rows[name].mib, rows["single"].mib, strict=True)) for name in NAMES
    }
    assert optimizer == pytest.approx(2 * weights, rel=0.01) and average == pytest.approx(weights)
    assert shares["ddp ×2"] == pytest.approx((1, 1, 0.5), rel=0.05)
    for name in ("fsdp ×2", "hsdp 2 × 2"):
        assert shares[name] == pytest.approx((0.5, 0.5, 0.5), rel=0.05)
    # FLUX's blocks of one stream are whole; biases that are cut as well are not in the estimate of matrices.
    assert shares["tensor ×2"] == pytest.approx((1 - estimated_cut(tmp_path) / 2,) * 3, rel=0.02)
    for name in ("deepspeed_1 ×2", "deepspeed_2 ×2"):  # half of the moments, and half of the masters
        assert shares[name] == pytest.approx((1, 0.75, 0.5), rel=0.05)
    assert shares["deepspeed_3 ×2"] == pytest.approx((0.5, 0.75, 0.5), rel=0.05)


@pytest.mark.parametrize(
    ("axes", "families"),
    [
        (["tensor=2"], ["sd3", "pixart", "flux", "mmdit_rope", "stable_diffusion", "sdxl"]),
        # Of diffusers and of this project; FLUX has blocks that are cut and blocks that stay whole.
        (["tensor=2", "compile=aot_eager"], ["flux", "mmdit_rope"]),
        (["fsdp=2"], ["sd3", "pixart", "flux", "mmdit_rope", "sdxl", "sana", "z_image", "qwen_image", "flux2"]),
    ],
    ids=["tensor", "tensor-compiled", "fsdp"],
)
def test_cut_blocks_have_the_gradients_of_whole_ones(tmp_path: Path, axes: list[str], families: list[str]) -> None:
    folders = [str(save_pipeline(name, tmp_path / name)) for name in families]
    printed = train_in_processes([*axes, *folders], 2, "tests.integration.cut_gradients")
    found = {
        line.split()[0]: [float(w) for w in line.split()[1:]]
        for line in printed.splitlines()
        if line.split()[:1] and line.split()[0] in families
    }
    assert set(found) == set(families)
    assert all(max(numbers) < 1e-5 for numbers in found.values()), found


def test_accumulation_under_ddp_communicates_once_per_optimizer_step(
    pipeline_dir: Path, shards_dir: Path, tmp_path: Path
) -> None:
    reductions = {}
    for accumulation in (1, 4):
        argv = options(
            tmp_path / f"ddp_{accumulation}",
            pipeline_dir,
            shards_dir,
            distributed__strategy="ddp",
            system__batch_size=4 // accumulation,
            system__gradient_accumulation=accumulation,
            experiment__save_every=100,
            logging__every=100,
        )
        printed = train_in_processes(argv, 2, "tests.integration.count_collectives")
        told = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
        reductions[accumulation] = told["counts"]["gloo:all_reduce"]
        assert told["steps"] == 8
        # Those of the strategy, of the saves (two) and of the notes of signals; two workers of a group race in torch.
        assert told["workers"] == [1, 1, 1, 1]
    # One for the gradients and one for the notes of signals, per step; a few at the start, fewer with accumulation.
    assert 16 <= reductions[4] <= reductions[1] <= 24, reductions


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        # Blocks that stay whole after drawing hold the average, not the weights.
        (
            "stable_diffusion",
            {
                "distributed__reshard_after_forward": False,
                "sampling__every": 2,
                "sampling__prompts": "[a red picture]",
                "sampling__num_inference_steps": 2,
            },
        ),
        # transformers tells by the class what a text encoder returns, and FSDP2 changes the class.
        ("sdxl", {"model__train_text_encoder": True}),
    ],
    ids=["previews", "text"],
)
def test_fsdp_with_other_parts_of_a_run(
    shards_dir: Path, tmp_path: Path, family: str, changes: dict[str, object]
) -> None:
    changes |= {"experiment__num_examples_to_see": 32, "system__batch_size": 4, "distributed__strategy": "fsdp"}
    pipeline = save_pipeline(family, tmp_path / "pipeline")
    train_in_processes(options(tmp_path / "fsdp", pipeline, shards_dir, **changes), 2)
    changes |= {"distributed__strategy": "auto", "system__batch_size": 8, "distributed__reshard_after_forward": True}
    train(options(tmp_path / "single", pipeline, shards_dir, **changes))
    assert losses(tmp_path / "fsdp") == pytest.approx(losses(tmp_path / "single"), rel=1e-5)


def test_what_the_other_tests_leave_out_of_cut_weights(pipeline_dir: Path, shards_dir: Path, tmp_path: Path) -> None:
    """bf16, weights on the CPU, tracks of averages and an optimizer of another library, together."""
    more = ["distributed.strategy=fsdp", "distributed.offload_parameters=true", "model.mixed_precision=bf16"]
    more += ["ema.sigma_rels=[0.05,0.1]", "optimizer.name=lion", "trainer.accelerator=cpu"]
    changes = {"experiment__num_examples_to_see": 32, "system__batch_size": 4}
    train_in_processes([*options(tmp_path / "run", pipeline_dir, shards_dir, **changes), *more], 2)
    assert len(losses(tmp_path / "run")) == 4 and all(0 < loss < 10 for loss in losses(tmp_path / "run"))


@pytest.mark.parametrize(
    "engine",
    [
        ["sdxl", "distributed.mesh.tensor=2", "system.batch_size=8"],
        ["sd3", "distributed.strategy=deepspeed_2", "system.batch_size=4"],
    ],
    ids=["tensor", "deepspeed"],
)
def test_bf16_of_other_engines(engine: list[str], shards_dir: Path, tmp_path: Path) -> None:
    """Against bf16 of one process; rounding differs where partial sums are added up."""
    family, *engine = engine
    pipeline = save_pipeline(family, tmp_path / "pipeline")
    changes = {"experiment__num_examples_to_see": 48, "model__mixed_precision": "bf16", "trainer__accelerator": "cpu"}
    train_in_processes([*options(tmp_path / "cut", pipeline, shards_dir, **changes), *engine], 2)
    train(options(tmp_path / "single", pipeline, shards_dir, **changes))
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "single"), rel=0.02)
