"""What a resumed run continues from in Lightning, its callbacks, module and data: collected and restored here alone.

Lightning saves and resumes by `Trainer.save_checkpoint` and `Trainer.fit(ckpt_path=...)`, in a format per strategy and
with hooks for weights and optimizer in the strategies. This trainer uses neither: `save.py` stores the weights, and the
two functions here call the same hooks of callbacks, module, data module, loops, schedulers and precision plugin as
Lightning's `_CheckpointConnector` (2.6), through public names. `tests/unit/checkpoint/test_lightning_state.py` holds
what they rely on: `on_fit_start` comes after the strategy's setup and before the loops, and a loop that loaded its
state continues from there.
"""

from typing import Any

import pytorch_lightning as pl


def training_state(trainer: pl.Trainer) -> dict[str, Any]:
    """Everything but weights and optimizer state. Collective where a callback's `on_save_checkpoint` is."""
    state: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": pl.__version__,
        "loops": {"fit_loop": trainer.fit_loop.state_dict()},
        "callbacks": {c.state_key: own for c in _callbacks(trainer) if (own := c.state_dict())},
        "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
    }
    for name, part in _stateful(trainer).items():
        if own := part.state_dict():
            state[name] = own
    for callback in _callbacks(trainer):
        callback.on_save_checkpoint(trainer, trainer.lightning_module, state)
    trainer.lightning_module.on_save_checkpoint(state)
    return state


def restore_training_state(trainer: pl.Trainer, state: dict[str, Any]) -> None:
    """The inverse; to be called in `on_fit_start`, once weights and optimizer state are loaded."""
    for name, part in _stateful(trainer).items():
        if name in state:
            part.load_state_dict(state[name])
    for callback in _callbacks(trainer):
        callback.on_load_checkpoint(trainer, trainer.lightning_module, state)
        if own := state["callbacks"].get(callback.state_key):
            callback.load_state_dict(own)
    trainer.fit_loop.load_state_dict(_with_micro_batches(state["loops"]["fit_loop"], trainer, state["global_step"]))
    for config, own in zip(trainer.lr_scheduler_configs, state["lr_schedulers"], strict=True):
        config.scheduler.load_state_dict(own)


def restore_precision(trainer: pl.Trainer, state: dict[str, Any]) -> None:
    """The loss scale of fp16 alone."""
    plugin = trainer.precision_plugin
    if type(plugin).__qualname__ in state:
        plugin.load_state_dict(state[type(plugin).__qualname__])


def _callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def _stateful(trainer: pl.Trainer) -> dict[str, Any]:
    """By their keys in the state."""
    parts = (trainer.datamodule, trainer.precision_plugin)  # type: ignore[attr-defined]
    return {type(part).__qualname__: part for part in parts if part is not None}


def _with_micro_batches(loop: dict[str, Any], trainer: pl.Trainer, step: int) -> dict[str, Any]:
    """The loop's micro-batch counters in this run's accumulation. Progress is counted in optimizer steps; Lightning
    also stores micro-batches, which mean something else after a change of `system.gradient_accumulation`."""
    micro_batches = step * trainer.accumulate_grad_batches
    progress = loop["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        counts |= {"ready": micro_batches, "started": micro_batches, "processed": micro_batches}
        # Saved inside on_train_batch_end, where Lightning has not yet counted the batch as completed.
        counts["completed"] = micro_batches - 1
    progress["is_last_batch"] = False
    return loop
