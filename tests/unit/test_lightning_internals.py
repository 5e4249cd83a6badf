"""What the package relies on inside Lightning, whose version the requirements pin, and every private name of a library
that it uses."""

import ast
import importlib
import inspect
import textwrap
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loops.loop import _Loop
from pytorch_lightning.loops.optimization.automatic import _AutomaticOptimization
from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop
from pytorch_lightning.plugins.precision import DeepSpeedPrecision
from pytorch_lightning.strategies import DeepSpeedStrategy, ModelParallelStrategy, Strategy
from pytorch_lightning.strategies.parallel import ParallelStrategy
from pytorch_lightning.trainer.call import _call_callback_hooks, _call_lightning_module_hook, _call_strategy_hook
from pytorch_lightning.trainer.connectors.checkpoint_connector import _CheckpointConnector
from pytorch_lightning.trainer.connectors.signal_connector import _SignalConnector

from sd_training import log
from sd_training.build.run import training_step_arguments
from sd_training.config.schema import OptimizerConfig
from sd_training.optim import Optimization
from sd_training.training import TrainedModule

PACKAGE = Path(log.__file__).parent

PRIVATE = {
    "_signal_connector": "lightning: build/run.py",
    "_broadcast_sigterm_tensor": "lightning: build/run.py",
    "_build_kwargs": "lightning: build/run.py",
    "_setup_distributed": "lightning: parallel/strategies.py",
    "_device_mesh": "lightning: parallel/strategies.py",
    "_init_deepspeed_distributed": "lightning: parallel/deepspeed.py",
    "_desired_dtype": "lightning: parallel/deepspeed.py",
    "_hp_mapping": "deepspeed: parallel/deepspeed.py",
    "_CAN_RECORD_REGISTRY": "transformers: parallel/strategies.py",
    "_can_record_outputs": "transformers: parallel/strategies.py",
    "_execution_device": "diffusers: models/families/mmdit.py",
    "_unpack_latents": "diffusers: export/draw.py",  # a film's last frame: test_drawing.py
    "_unpatchify_latents": "diffusers: export/draw.py",  # the same
    "_cdata": "torch: build/dry_run.py",
    "_devices": "torch: parallel/launch.py",
    "_dynamo": "torch: models/execution.py",
    "_fields": "Python: data/samples/cache.py",  # of a NamedTuple; documented
    "_foreach_lerp_": "torch: callbacks/ema.py",
    "_foreach_mul_": "torch: optim.py",
    "_functorch": "torch: models/execution.py",  # the memory budget: test_execution.py compares with and without
    "_fused_sdp_choice": "torch: models/attention.py",  # which kernel: test_attention.py asks torch in other ways, too
    "_new_shared": "torch: types.py",  # as torch's collate calls it; test_workers.py shares a block
    "_Options": "torch: parallel/launch.py",
    "_pytree": "torch: build/dry_run.py, scripts/replay_step.py",
    "_subclasses": "torch: build/dry_run.py",
    "_threads": "torch: parallel/launch.py",
    "_timeout": "torch: parallel/launch.py",
    "_asdict": "stdlib: a named tuple's, documented",
    "_replace": "stdlib: a named tuple's, documented",
    "_current_frames": "stdlib: sys, documented",
    "_exit": "stdlib: os, documented",
    "_run_exitfuncs": "stdlib: cli.py",  # of atexit: test_cli.py
    "_shutdown": "stdlib: cli.py",  # of threading: test_cli.py
}
"""Private name of a library → where it is used. One of Lightning's also has a test here."""


def make_trainer() -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=Path.cwd())


def in_order(source: str, *steps: str) -> bool:
    """Whether each of them is there once, in this order."""
    return all(source.count(step) == 1 for step in steps) and sorted(steps, key=source.index) == list(steps)


def num_statements(method: str) -> int:
    (function,) = ast.parse(textwrap.dedent(method)).body
    assert isinstance(function, ast.FunctionDef)
    return len(function.body)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(*sources: str) -> set[str]:
    """Private names that sources take from elsewhere: of an object that is not `self`, of a base class, of an import.

    No class of the package uses a private name of another one, so nothing of its own is among them.
    """
    trees = [ast.parse(source) for source in sources]
    own = {name for tree in trees for node in ast.walk(tree) for name in defined(node)}
    return {name for tree in trees for node in ast.walk(tree) for name in taken(node, own) if is_private(name)}


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def defined(node: ast.AST) -> Iterator[str]:
    """Functions, classes, and what is assigned to a name or to an attribute of `self`."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
        yield node.attr


def taken(node: ast.AST, own: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and not (is_self(node.value) and node.attr in own):
        yield node.attr
    elif isinstance(node, ast.Import):
        yield from (part for alias in node.names for part in alias.name.split("."))
    elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] != PACKAGE.name:
        yield from [*(node.module or "").split("."), *(alias.name for alias in node.names)]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
        yield from (str(arg.value) for arg in node.args[1:2] if isinstance(arg, ast.Constant))


def test_private_names_of_libraries_are_used_on_purpose() -> None:
    found = private_names(*(path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))))
    assert found == set(PRIVATE), "a name that is new here needs a line in PRIVATE, and a test of what it promises"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("class A:\n    def f(self):\n        self._x = 1\n        return self._x", set()),
        ("class A:\n    def f(self):\n        return self._x", {"_x"}),  # of a base class
        ("class A:\n    def f(self, b):\n        self._x = b._x", {"_x"}),
        ("a.b._c.d", {"_c"}),
        ("getattr(a, '_b', None)", {"_b"}),
        ("import torch._dynamo", {"_dynamo"}),
        ("from a import _b", {"_b"}),
        ("from sd_training.log import _b", set()),
        ("a.__class__", set()),
    ],
)
def test_a_private_name_is_found(source: str, names: set[str]) -> None:
    assert private_names(source) == names


def test_the_version_that_was_read() -> None:
    assert pl.__version__ == "2.6.6", "read what this file names again, then change this line"


# --- checkpoint/save.py ---


def test_on_fit_start_comes_between_the_setup_of_the_strategy_and_the_loops() -> None:
    source = inspect.getsource(pl.Trainer._run)
    steps = ["self.strategy.setup(self)", '"on_fit_start"', "restore_training_state()", "self._run_stage()"]
    assert sorted(steps, key=source.index) == steps


def test_without_a_path_lightning_restores_nothing() -> None:
    for restore in ("restore_training_state", "restore_model", "restore_datamodule", "restore_callbacks"):
        assert "if not self._loaded_checkpoint:\n            return" in inspect.getsource(
            getattr(_CheckpointConnector, restore)
        )


def test_what_a_checkpoint_holds_is_what_lightning_would_store() -> None:
    """A further entry in a later version would be missing here."""
    source = inspect.getsource(_CheckpointConnector.dump_checkpoint)
    known = ["trainer.current_epoch", "trainer.global_step", "_get_loops_state_dict", "_call_callbacks_state_dict"]
    known += ["lr_scheduler_configs", "prec_plugin_state_dict", "datamodule_state_dict", "on_save_checkpoint"]
    assert all(entry in source for entry in known)
    assert source.count("checkpoint[") == 9


def test_a_loop_continues_from_its_state() -> None:
    loop = _Loop(make_trainer())
    assert not loop.restarting
    loop.load_state_dict(loop.state_dict())
    assert loop.restarting


def test_a_loop_counts_micro_batches_where_a_resume_sets_them() -> None:
    trainer = make_trainer()
    state = trainer.fit_loop.state_dict()
    progress = state["epoch_loop.batch_progress"]
    counts = {"ready", "started", "processed", "completed"}
    assert {name: set(value) for name, value in progress.items() if name != "is_last_batch"} == {
        "total": counts,
        "current": counts,
    }
    assert progress["is_last_batch"] is False
    progress["total"] |= {"ready": 7, "completed": 6}
    progress["current"] |= {"ready": 5}
    trainer.fit_loop.load_state_dict(state)
    loaded = trainer.fit_loop.epoch_loop.batch_progress
    assert (loaded.total.ready, loaded.total.completed, loaded.current.ready) == (7, 6, 5)


def test_a_batch_is_completed_after_the_hook_that_saves() -> None:
    source = inspect.getsource(_TrainingEpochLoop.advance)
    steps = ["batch_progress.increment_processed()", '"on_train_batch_end"', "batch_progress.increment_completed()"]
    assert sorted(steps, key=source.index) == steps


# --- build/run.py ---


def test_signals_are_taken_by_the_method_that_is_replaced() -> None:
    """And by nothing else; where it took none, none is given back at the end."""
    connector = make_trainer()._signal_connector
    assert type(connector) is _SignalConnector
    assert inspect.getsource(pl.Trainer._run).count("self._signal_connector.register_signal_handlers()") == 1
    own: list[Any] = [
        _SignalConnector.register_signal_handlers,
        _SignalConnector._register_signal,
        _SignalConnector.teardown,
    ]
    rest = inspect.getsource(_SignalConnector)
    for method in own:
        assert inspect.getsource(method) in rest
        rest = rest.replace(inspect.getsource(method), "")
    assert "signal.signal(" not in rest and "_register_signal(" not in rest
    assert "for signum, handler in self._original_handlers.items():" in inspect.getsource(_SignalConnector.teardown)
    assert connector._original_handlers == {}


def test_the_flag_of_sigterm_is_sent_by_the_method_that_is_replaced() -> None:
    """And by nothing else of the loop: each such collective makes the host wait for the accelerator."""
    trainer = make_trainer()
    assert type(trainer.fit_loop.epoch_loop) is _TrainingEpochLoop
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(_TrainingEpochLoop.advance)
    method = inspect.getsource(_TrainingEpochLoop._broadcast_sigterm_tensor)
    assert "torch.distributed.broadcast(sigterm_tensor, src=0)" in method and ".item()" in method
    rest = inspect.getsource(inspect.getmodule(_TrainingEpochLoop)).replace(method, "")  # type: ignore[arg-type]
    assert "torch.distributed.broadcast" not in rest and "torch.distributed.barrier" not in rest
    assert list(inspect.signature(_TrainingEpochLoop._broadcast_sigterm_tensor).parameters) == ["self"]


def test_a_training_step_gets_what_lightning_would_give_it() -> None:
    trainer = make_trainer()
    trainer.strategy.connect(TrainedModule.__new__(TrainedModule))
    given = trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), "a batch", 3)
    assert [*given.values()] == [*training_step_arguments(OrderedDict(), "a batch", 3).values()] == ["a batch", 3]
    assert 'call._call_strategy_hook(trainer, "training_step", *kwargs.values())' in inspect.getsource(
        _AutomaticOptimization._training_step
    )


# --- callbacks/base.py ---


def test_a_hook_that_is_none_is_passed_over() -> None:
    assert "fn = getattr(callback, hook_name)\n        if callable(fn):" in inspect.getsource(_call_callback_hooks)


# --- training.py ---


def test_the_name_of_the_hook_is_what_is_set_around_every_call() -> None:
    for call in (_call_callback_hooks, _call_lightning_module_hook, _call_strategy_hook):
        assert inspect.getsource(call).count("pl_module._current_fx_name = ") == 2
    module = TrainedModule(torch.nn.Linear(1, 1), Optimization(OptimizerConfig(), 1.0, lambda step: 1.0))
    module._current_fx_name = "a hook"
    assert module._current_fx_name == "a hook" and [*module._modules] == ["network"]


# --- parallel/strategies.py ---


def test_a_device_mesh_is_set_where_lightning_sets_it() -> None:
    source = inspect.getsource(ModelParallelStrategy.setup_environment)
    steps = ["super().setup_environment()", "self._setup_distributed()", "self._device_mesh = _setup_device_mesh("]
    assert in_order(source, *steps, "self.lightning_module._device_mesh = self._device_mesh")
    # Nothing else happens there but two sizes, which the trainer does not use.
    assert num_statements(source) == 7
    assert list(inspect.signature(ModelParallelStrategy._setup_distributed).parameters) == ["self"]
    assert ModelParallelStrategy.__mro__[1] is ParallelStrategy
    assert "return self._device_mesh" in inspect.getsource(ModelParallelStrategy.device_mesh.fget)  # type: ignore[attr-defined]
    assert pl.LightningModule()._device_mesh is None
    assert "return self._device_mesh" in inspect.getsource(pl.LightningModule.device_mesh.fget)  # type: ignore[attr-defined]


# --- parallel/deepspeed.py ---


def test_deepspeed_starts_by_the_steps_that_are_done_for_cpus() -> None:
    source = inspect.getsource(DeepSpeedStrategy.setup_distributed)
    steps = ["_validate_device_index_selection(", "reset_seed()", "self.set_world_ranks()"]
    assert in_order(source, *steps, "self._init_deepspeed_distributed()")
    assert num_statements(source) == 5
    assert list(inspect.signature(DeepSpeedStrategy._init_deepspeed_distributed).parameters) == ["self"]
    assert "deepspeed.init_distributed(" in inspect.getsource(DeepSpeedStrategy._init_deepspeed_distributed)
    assert issubclass(DeepSpeedStrategy, Strategy)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("32-true", torch.float32), ("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)],
)
def test_the_type_of_a_deepspeed_precision(precision: str, dtype: torch.dtype) -> None:
    assert DeepSpeedPrecision(precision)._desired_dtype == dtype  # type: ignore[arg-type]


# --- log.py ---


def test_the_loggers_that_are_silenced_are_lightnings_modules() -> None:
    names = [name for name in log._ERRORS_ONLY if name.startswith(("pytorch_lightning", "lightning_fabric"))]
    assert len(names) == 4
    for name in names:
        module = importlib.import_module(name)
        assert any(
            word in inspect.getsource(module) for word in ("logging.getLogger(__name__)", "rank_zero_module.log")
        )
