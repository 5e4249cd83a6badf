"""Every option of a run: keyword-only dataclasses, one docstring with its unit per field.

Pydantic checks types and bounds and reports every problem at once. Keys of the sd-training README keep their names,
meanings and defaults. `docs/config.md` is generated from this file. Rules between fields live in `check.py`.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from sd_training.config.data_schema import DatasetConfig, DatasetParams
from sd_training.config.value_types import (
    SCHEMA,
    BelowOne,
    Count,
    Int,
    NonNegative,
    Positive,
    PositiveInt,
    Probability,
    no_bool,
)

__all__ = ["DatasetConfig", "DatasetParams"]  # the data set's options are read through this module as well


def _yaml_no(value: Any) -> Any:
    """An unquoted `no` is false in YAML, and an empty value is null: both mean the word "no" here."""
    return "no" if value is False or value is None else value


@dataclass(config=SCHEMA, kw_only=True)
class WandbConfig:
    """Weights & Biases. Off unless a key is found (here or in `WANDB_API_KEY`) or `mode` asks for it."""

    api_key: str | None = Field(default=None, repr=False)
    """API key. The normal way in is the environment variable `WANDB_API_KEY`; a key given here is used and never
    written anywhere."""
    entity: str | None = None
    """User or team that owns the project; null is the account's default."""
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """`auto` is online with a key and disabled without; `offline` writes to the run folder for a later `wandb sync`."""


@dataclass(config=SCHEMA, kw_only=True)
class SystemConfig:
    """Batch arithmetic and loader processes."""

    gradient_accumulation: PositiveInt = 1
    """Micro-batches per optimizer step and process [count]."""
    batch_size: PositiveInt = 32
    """Micro-batch: samples per process and forward pass. Global batch = batch_size × gradient_accumulation ×
    processes."""
    workers: Count = 6
    """Loader processes per training process; 0 reads in the training process. SLURM: equal to cpus-per-task."""
    dist_backend: Literal["nccl", "gloo", "mpi"] | None = None
    """As `distributed.dist_backend`; kept for sd-training files, must not contradict it."""
    dist_url: str | None = None
    """As `distributed.dist_url`; kept for sd-training files, must not contradict it."""


@dataclass(config=SCHEMA, kw_only=True)
class DistributedConfig:
    """Process group."""

    strategy: Literal["auto", "single", "ddp"] = "auto"
    """`auto`: one process needs no process group, several use DDP."""
    dist_backend: Literal["nccl", "gloo", "mpi"] = "nccl"
    """Communication library; `nccl` becomes `gloo` on a machine without CUDA, with one line saying so."""
    dist_url: str = "env://"
    """Rendezvous: `env://` reads MASTER_ADDR and MASTER_PORT as torchrun and SLURM set them; `tcp://host:port` sets
    them."""


@dataclass(config=SCHEMA, kw_only=True)
class ExperimentConfig:
    """Where a run lives, how long it is, and what it leaves behind."""

    log_dir: str
    """Folder of all runs; this run lives in `log_dir/name`."""
    name: str = Field(
        pattern=r"^[^/\\]*[^/\\.][^/\\]*$",
        json_schema_extra={"allowed": "a text that can name a folder, without slashes"},
    )
    """Name of the run, its folder and its W&B run."""
    project: str = "sd_training"
    """W&B project."""
    num_examples_to_see: PositiveInt
    """Length of the run [samples over all processes]; optimizer steps = num_examples_to_see // global batch."""
    save_only_most_recent: bool = True
    """True: `current_pipeline/` is replaced at each save. False: every `pipelines/step_N/` is kept and
    `current_pipeline` points at the newest."""
    save_every: PositiveInt = 2000
    """Interval between saves [optimizer steps]."""
    requeue: bool = True
    """The same command again resumes from the newest checkpoint that verifies. False: an existing run folder is an
    error."""
    eval_caption_file: str | None = None
    """CSV with the columns `uid,caption`; at each save one image per row is drawn into `samples/step_N/eval/`. Null:
    no evaluation images."""
    num_eval_images: PositiveInt = 1000
    """At most this many rows of `eval_caption_file` [images over all processes]."""
    eval_tar: bool = False
    """Pack the evaluation images of a save into `samples/step_N/eval.tar` instead of a folder."""
    seed: Int = 0
    """Seed of every random draw of the run: data order, crops, noise, timesteps, initial weights."""


@dataclass(config=SCHEMA, kw_only=True)
class OptimizerParams:
    """AdamW, eq. 12 of Loshchilov & Hutter 2019 (arXiv:1711.05101)."""

    learning_rate: NonNegative = 1e-4
    """Peak learning rate [1/optimizer step]; not scaled by batch size or processes."""
    beta1: BelowOne = 0.9
    """Decay of the gradient average [per optimizer step]."""
    beta2: BelowOne = 0.98
    """Decay of the squared-gradient average [per optimizer step]."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay [× learning rate per optimizer step]."""
    epsilon: Positive = 1e-8
    """Added to the denominator."""


@dataclass(config=SCHEMA, kw_only=True)
class OptimizerConfig:
    """Which optimizer updates the trained module."""

    name: Literal["adamw"] = "adamw"
    """Optimizer by name."""
    params: OptimizerParams = Field(default_factory=OptimizerParams)
    """Its hyper-parameters."""
    max_grad_norm: Positive | None = None
    """Clip the global L2 norm of the gradient, once per optimizer step; null: no clipping."""


@dataclass(config=SCHEMA, kw_only=True)
class LRScheduleParams:
    """Shape of the learning-rate schedule."""

    learning_rate: NonNegative | None = None
    """Peak learning rate; null takes `optimizer.params.learning_rate`. As in sd-training, the schedule's value wins."""
    warmup_length: Count = 500
    """Linear warm-up [optimizer steps]."""


@dataclass(config=SCHEMA, kw_only=True)
class LRScheduleConfig:
    """Learning rate as a pure function of the optimizer step."""

    scheduler: Literal["ConstantWithWarmup", "CosineWithWarmup"] = "ConstantWithWarmup"
    """Constant, or half a cosine from the end of the warm-up to the end of the run."""
    params: LRScheduleParams = Field(default_factory=LRScheduleParams)
    """Its numbers."""


@dataclass(config=SCHEMA, kw_only=True)
class PartConfig:
    """One part of the pipeline: loaded from `pretrained`, or made by `target` and `params` with random weights."""

    pretrained: str | None = None
    """Local diffusers folder or hub id: the pipeline's root, or the part's own folder."""
    subfolder: str | None = None
    """Folder of the part below `pretrained`; null looks for the part's usual name, then for the part itself."""
    revision: str | None = None
    """Hub branch, tag or commit; null is the hub's main."""
    target: str | None = None
    """Class name from the allow-list in `models/registry.py`, with or without the package in front."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Arguments of that class; for a pretrained noise scheduler they override its stored settings."""


@dataclass(config=SCHEMA, kw_only=True)
class ModelConfig:
    """The pipeline's parts and how the trained one is run."""

    pretrained: str | None = None
    """Pipeline folder or hub id for every part at once; wins over the parts' own settings, as in sd-training."""
    revision: str | None = None
    """Hub branch, tag or commit of `model.pretrained`."""
    train: Literal["unet", "vae"] = "unet"
    """Which part is trained: the UNet (diffusion), or the autoencoder itself."""
    vae: PartConfig = Field(default_factory=PartConfig)
    """Image autoencoder; frozen unless `model.train` is `vae`."""
    text_encoder: PartConfig = Field(default_factory=PartConfig)
    """Frozen text encoder."""
    tokenizer: PartConfig = Field(default_factory=PartConfig)
    """Tokenizer of the text encoder."""
    unet: PartConfig = Field(default_factory=PartConfig)
    """Denoiser."""
    noise_scheduler_training: PartConfig = Field(default_factory=PartConfig)
    """Noise schedule and prediction type of the training objective."""
    noise_scheduler_inference: PartConfig = Field(default_factory=PartConfig)
    """Sampler of previews and of the exported pipeline; its noise schedule and prediction type are set from training.
    """
    use_ema: bool = False
    """Keep an exponential moving average of the trained weights on the CPU; previews and exports use it."""
    mixed_precision: Annotated[Literal["no", "bf16", "fp16"], BeforeValidator(_yaml_no)] = "bf16"
    """Autocast type of the trained module; its weights stay fp32."""
    vae_precision: Literal["fp32", "bf16", "fp16"] | None = None
    """Autocast type of the frozen autoencoder; null: bf16 under bf16, otherwise fp32, because some overflow in fp16."""
    text_encoder_precision: Literal["fp32", "bf16", "fp16"] | None = None
    """Autocast type of the frozen text encoder; null: as `mixed_precision`."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    xformers: bool = False
    """Use xformers attention on CUDA where it works; elsewhere PyTorch's fused attention, with one line saying so."""


@dataclass(config=SCHEMA, kw_only=True)
class EmaConfig:
    """Average of the trained weights, kept in fp32 on the CPU of the first process."""

    decay: BelowOne = 0.9999
    """Decay per optimizer step. Half-life = ln 2 / -ln(decay) optimizer steps."""
    update_every: PositiveInt = 1
    """Average every so many optimizer steps, with decay^update_every, so that the half-life stays [optimizer steps]."""
    warmup: bool = True
    """Ramp min(decay, (1 + n) / (10 + n)) over optimizer steps n, so that early averages forget the initial weights."""
    path: str | None = None
    """Start the average from these weights: a pipeline folder, or the part's own folder."""


@dataclass(config=SCHEMA, kw_only=True)
class ObjectiveConfig:
    """What the denoiser is asked to predict, and how errors are weighted."""

    prediction_type: Literal["epsilon", "v_prediction"] | None = None
    """Target of the denoiser; null takes the training noise scheduler's. It is written into the exported scheduler."""
    rescale_betas_zero_snr: bool | None = None
    """Zero terminal SNR (Lin et al. 2023, arXiv:2305.08891, algorithm 1); null takes the training noise scheduler's."""
    snr_gamma: Positive | None = None
    """γ of min-SNR weighting (Hang et al. 2023, arXiv:2303.09556); null: every timestep weighs 1."""
    kl_weight: NonNegative = 1e-6
    """Autoencoder training: weight of the KL term beside the L1 term, both averaged per pixel value."""


@dataclass(config=SCHEMA, kw_only=True)
class ConditioningConfig:
    """Text conditioning during training."""

    dropout_prob: Probability = 0.1
    """Share of samples trained with the empty caption, so that guidance works; decided per sample."""


@dataclass(config=SCHEMA, kw_only=True)
class CheckpointConfig:
    """Resumable state beside the exported pipeline."""

    keep: Annotated[int, BeforeValidator(no_bool), Field(ge=2)] = 2
    """Newest checkpoints kept; at least two, so that a damaged newest one never loses the run [count]."""


@dataclass(config=SCHEMA, kw_only=True)
class SamplingConfig:
    """Preview pictures from fixed prompts and seeds, and the settings of evaluation images."""

    every: Count = 0
    """Draw previews every so many optimizer steps; 0: none."""
    prompts: list[str] = Field(default_factory=list)
    """One preview image per prompt."""
    num_inference_steps: PositiveInt = 50
    """Denoiser evaluations per image [count]."""
    guidance_scale: Annotated[float, BeforeValidator(no_bool), Field(ge=1)] = 7.5
    """Classifier-free guidance; 1 is off."""
    seed: Count = 0
    """Image i is drawn from seed + i."""
    batch_size: PositiveInt = 8
    """Images drawn at once per process."""


@dataclass(config=SCHEMA, kw_only=True)
class LoggingConfig:
    """Metrics."""

    every: PositiveInt = 10
    """Write averaged metrics every so many optimizer steps; the only moment when the host waits for the device."""
    progress_bar: bool = True
    """Show images seen, images/s, time left and loss on the terminal."""


@dataclass(config=SCHEMA, kw_only=True)
class TrainerConfig:
    """Which devices train. torchrun and SLURM decide the number of processes themselves."""

    accelerator: Literal["auto", "cpu", "cuda", "gpu", "mps"] = "auto"
    """Device kind; ROCm devices are `cuda`."""
    devices: Literal["auto"] | PositiveInt = "auto"
    """Processes on this machine when started with plain `python`; `auto`: every GPU, or one CPU process."""
    num_nodes: PositiveInt | None = None
    """Machines; null takes it from torchrun or SLURM."""


@dataclass(config=SCHEMA, kw_only=True)
class Config:
    """A whole run."""

    experiment: ExperimentConfig
    """Where the run lives and how long it is."""
    dataset: DatasetConfig
    """Training data."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    """Parts of the pipeline."""
    wandb: WandbConfig = Field(default_factory=WandbConfig)
    """Weights & Biases."""
    system: SystemConfig = Field(default_factory=SystemConfig)
    """Batch arithmetic and loader processes."""
    distributed: DistributedConfig = Field(default_factory=DistributedConfig)
    """Process group."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """Optimizer."""
    lr_scheduler: LRScheduleConfig = Field(default_factory=LRScheduleConfig)
    """Learning-rate schedule."""
    ema: EmaConfig = Field(default_factory=EmaConfig)
    """Moving average of the weights, used when `model.use_ema` is true."""
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    """Training objective."""
    conditioning: ConditioningConfig = Field(default_factory=ConditioningConfig)
    """Text conditioning."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Resumable state."""
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    """Preview pictures."""
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    """Metrics."""
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    """Devices."""
