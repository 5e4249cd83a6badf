"""The training data of a run, for all that opens it: training, encoder processes, the dry run, the cache, replays."""

from sd_training.build.plan import Plan
from sd_training.data.datamodule import TrainingData
from sd_training.data.encoded import EncoderProcesses
from sd_training.data.samples.cache import LatentCache
from sd_training.data.samples.sample import DrawSettings
from sd_training.models.family import Family
from sd_training.types import LatentGrid

ANY_GRID = LatentGrid(4, 8)
"""Placeholder where no latents are drawn."""


def make_data(
    plan: Plan,
    family: Family | None,
    grid: LatentGrid,
    cache: LatentCache | None = None,
    encoders: EncoderProcesses | None = None,
) -> TrainingData:
    """The training data for a model with these latents; `family` is None for autoencoder training, and where the data
    is only inspected. Nothing is drawn that the objective does not read."""
    config, seed = plan.config, plan.config.experiment.seed
    if family is None:
        draws = DrawSettings(seed, grid, has_noise=False)
    else:
        objective = family.schedulers.objective.config
        draws = DrawSettings(
            seed,
            grid,
            config.conditioning,
            has_offset_noise=bool(objective.offset_noise),
            has_input_noise=objective.input_perturbation > 0,
            has_mask=objective.masked_loss != "none",
            is_stratified=objective.timestep_density.stratified,
        )
    return TrainingData(
        dataset=config.dataset,
        plan=plan.batch,
        workers=config.system.workers,
        tokenizers=family.tokenizers() if family else {},
        draws=draws,
        captions_needed=config.model.train != "vae",
        run_dir=plan.run_dir,
        validation=config.validation,
        cache=cache,
        encoders=encoders,
    )
