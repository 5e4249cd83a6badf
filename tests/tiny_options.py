"""Options of the tiny runs of all reports; light, for drivers that never import torch."""

from pathlib import Path


def tiny_run_options(parts: Path, home: Path, name: str) -> list[str]:
    """What all reports give the trainer for a run on the CPU; they add steps, batch sizes and what they are about.

    Args:
        parts: holds `pipeline` and `shards`.
        home: gets the run folder.
        name: of the run folder.
    """
    return [
        f"experiment.log_dir={home}",
        f"experiment.name={name}",
        f"model.pretrained={parts / 'pipeline'}",
        "model.mixed_precision=no",
        "model.use_ema=true",
        "optimizer.params.learning_rate=0.001",
        "lr_scheduler.params.warmup_length=3",
        f"dataset.params.path={parts / 'shards'}",
        "system.workers=0",
        "trainer.accelerator=cpu",
        "logging.progress_bar=false",
    ]
