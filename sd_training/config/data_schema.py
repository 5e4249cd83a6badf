"""The options of the training data, and the class prompts that one of them names."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from sd_training.config.value_types import (
    DENOISER,
    Count,
    NonNegative,
    Number,
    OptionGroup,
    Positive,
    PositiveInt,
    Probability,
    ReadWith,
    read_with,
)

SourceType = Literal[
    "WebDataset", "ClassificationWebDataset", "Parquet", "Table", "ImageFolder", "TagFolder", "HuggingFace", "Synthetic"
]
_FILES = ("WebDataset", "ClassificationWebDataset", "Parquet", "Table", "ImageFolder", "TagFolder", "HuggingFace")
_TAR = ("WebDataset", "ClassificationWebDataset")
_TABLES = ("Parquet", "Table", "HuggingFace")
_COLUMNS = read_with("type", *_TABLES)
_CLASSES = read_with("type", "ClassificationWebDataset")
_MIXED = read_with("mix")
_TAGS = read_with("tag_separator")
_LADDER = read_with("mode", "ladder")
_PRIOR = read_with("path")
_Text = Annotated[str, Field(min_length=1)]
_Size = Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]


class CaptionConfig(OptionGroup):
    """Which caption a visit gets. Everything is drawn anew at every visit."""

    fields: Annotated[dict[str, NonNegative] | None, read_with("type", "WebDataset", *_TABLES, "ImageFolder")] = None
    """Where captions come from, with their weights: `caption` is the sample's own (`txt` member, caption column), any
    other name a metadata field; weights count among the fields that a sample has. null: the sample's own."""
    text: str | None = None
    """The caption of every sample, in place of all others, such as `a photo of sks dog`; null: those of the samples."""
    openings: list[_Text] = Field(default=[])
    """Beginnings to take off a caption, in any case, such as `the image shows`: the longest one that fits, with blanks
    and punctuation after it. The rest begins with a capital; a caption of nothing else stays."""
    prefix: str = ""
    """Put before every caption."""
    suffix: str = ""
    """Put after every caption."""
    tag_separator: str | None = None
    """What separates tags, such as `, `; null: captions are sentences, not tags."""
    shuffle_tags_prob: Annotated[Probability, _TAGS] = 0.0
    """Probability that the tags of a visit are shuffled."""
    drop_tag_prob: Annotated[Probability, _TAGS] = 0.0
    """Probability of each tag to be left out of a visit."""
    num_kept_tags: Annotated[Count, _TAGS] = 0
    """First tags that are neither shuffled nor left out [count]."""


class BucketConfig(OptionGroup):
    """Aspect-ratio buckets: all samples of an optimizer step have one height and width."""

    mode: Literal["off", "ladder", "table"] = "off"
    """`off`: squares of `resolution`. `ladder`: sizes are generated. `table`: sizes are given."""
    max_area: Annotated[PositiveInt | None, _LADDER] = None
    """Ladder: largest height × width [pixels]; null: resolution²."""
    step: Annotated[PositiveInt, _LADDER] = 64
    """Ladder: sides are multiples of this [pixels]."""
    min_side: Annotated[PositiveInt | None, _LADDER] = None
    """Ladder: shortest side [pixels]; null: half of `resolution`."""
    max_side: Annotated[PositiveInt | None, _LADDER] = None
    """Ladder: longest side [pixels]; null: twice `resolution`."""
    max_aspect: Annotated[Number, Field(ge=1), _LADDER] = 2.0
    """Ladder: largest ratio of the longer to the shorter side; images beyond it are cropped."""
    sizes: Annotated[list[_Size] | None, read_with("mode", "table")] = Field(
        default=None, json_schema_extra={"allowed": "a list of [height, width] pairs or null"}
    )
    """Table: `[height, width]` pairs [pixels]."""
    upscale: Annotated[bool, _LADDER] = True
    """Ladder: whether images may be enlarged; if not, smaller ones go to smaller sizes."""


class TagConfig(OptionGroup):
    """`TagFolder`: rules for JSON files with tags and a score. Names and meanings are those of LunNova's trainer."""

    consider_every_nth: PositiveInt | None = None
    """Keep files 0, n, 2n, … of the sorted list [count]."""
    score_tags: list[int] = Field(default=[])
    """Thresholds; the highest one that the score reaches is added as a tag `scr<threshold>`."""
    abs_min_score: float = 25
    """Samples whose own score is lower are dropped."""
    min_score: float = 50
    """Samples whose score with bonuses is lower are dropped."""
    tag_bonus_scores: dict[str, float] | None = None
    """Tag → what it adds to the score."""
    blacklist_tags: list[str] | None = None
    """A sample with any of these is dropped."""
    non_caption_tags: list[str] | None = None
    """Tags left out of the caption."""
    non_caption_tag_prefixes: list[_Text] | None = None
    """Tags that start so are left out of the caption."""
    replacements: dict[_Text, str] | None = None
    """Text → replacement, applied in this order before the separators are put in."""
    shuffle_tag_p: Probability | None = None
    """Probability that the tags of a visit are shuffled; otherwise they are sorted."""
    caption_sorter: Literal["alphabetical", "as_written"] = "alphabetical"
    """Order of tags that are not shuffled."""
    tag_separator: str = ", "
    """Between tags."""
    final_tag_separator: bool = False
    """Whether a separator ends the caption."""
    skip_caption: bool = False
    """Train with empty captions."""
    aspect_range: list[float] = Field(default=[0.71, 1.42])
    """Samples whose width / height is outside are dropped."""
    limit_images: PositiveInt | None = None
    """A fixed random choice of so many samples [count]."""


class SyntheticConfig(OptionGroup):
    """`Synthetic`: what is made up. Pictures depend on nothing but seed and number of the sample."""

    num_samples: PositiveInt = 10_000
    """How many samples there are [count]."""
    sizes: Annotated[list[_Size], Field(min_length=1)] = Field(
        default=[[512, 512]], json_schema_extra={"allowed": "a list of [height, width] pairs"}
    )
    """`[height, width]` pairs [pixels] that the samples have in turn."""
    seed: Count = 0
    """Decides the pictures."""


class RemoteConfig(OptionGroup):
    """How `s3://`, `gs://` and `http(s)://` files are read. Keys and endpoints come from the environment."""

    cache_dir: str | None = None
    """Folder of whole shards that the processes of a machine share; null: `$XDG_CACHE_HOME/sd_training/shards` or
    `~/.cache/sd_training/shards`."""
    cache_gib: Positive = 100.0
    """Most that the cache holds [GiB]; what was not used for longest goes first."""
    num_retries: Count = 8
    """Attempts after the first before a run stops [count]; waits grow exponentially."""
    timeout_s: Positive = 60.0
    """Longest wait for an answer [s]."""


class SourceParams(OptionGroup):
    """Which samples there are."""

    path: Annotated[str | list[str], ReadWith("type", _FILES, is_refused=False)] = ""
    """Shards: a file, a folder, a glob, a brace pattern, a URL, or a list of these. Required, except for Synthetic."""
    filters: dict[str, Any] | None = None
    """Metadata filters such as `{original_width: ">=512", pwatermark: "<=0.5"}`; all must hold, and a sample without
    the field is dropped."""
    captions: Annotated[CaptionConfig, read_with("type", *_TAR, *_TABLES, "ImageFolder", "Synthetic"), DENOISER] = (
        CaptionConfig()
    )
    """Choice of captions."""
    max_samples: PositiveInt | None = None
    """Of the samples that pass the filters, a fixed random choice of at most so many; a smaller choice is part of a
    larger one [count]."""
    image_column: Annotated[str | None, _COLUMNS] = None
    """Parquet, Table, HuggingFace: column of the image file's bytes or path; null looks for usual names."""
    caption_column: Annotated[str | None, _COLUMNS] = None
    """Parquet, Table, HuggingFace: column of the caption; null looks for usual names."""
    tags: Annotated[TagConfig, read_with("type", "TagFolder")] = TagConfig()
    """TagFolder."""
    synthetic: Annotated[SyntheticConfig, read_with("type", "Synthetic")] = SyntheticConfig()
    """Synthetic."""
    idx_to_prompt: Annotated[dict[str | int, str | list[str]] | str | None, _CLASSES] = Field(
        default=None, json_schema_extra={"allowed": "a text, a mapping of classes to texts or lists of texts, or null"}
    )
    """ClassificationWebDataset: class index → prompt or list of prompts (one drawn per visit), inline or as a JSON
    file."""
    allow_pipe: Annotated[bool, read_with("type", *_TAR)] = Field(default=False, exclude=True)
    """Run `pipe:` entries of `path` as shell commands. Only for commands you trust, and only on the command line: a
    configuration file cannot set it to true."""


class DatasetParams(SourceParams):
    """Which samples, and how they become pixels and captions."""

    resolution: PositiveInt = 512
    """Height and width of a training image [pixels]; a multiple of the autoencoder's downscale factor."""
    buckets: BucketConfig = BucketConfig()
    """Aspect-ratio buckets."""
    crop: Literal["center", "random"] = "center"
    """Where the image is cut after it was resized to cover its target."""
    flip_prob: Probability = 0.0
    """Probability of a horizontal mirror image, decided per visit."""
    resampled: bool = False
    """Draw samples with replacement; there may then be fewer of them than an optimizer step takes. Otherwise every
    sample comes once per epoch."""
    lanes: PositiveInt | None = None
    """Virtual readers that share the shards; null: the largest power of two up to 64 that divides the global batch."""
    window: PositiveInt | None = None
    """Shards whose samples are shuffled with each other; null: as many as hold 262,144 samples."""
    allow_change: bool = False
    """Let a resumed run go on although its data, filters or batch have changed."""
    remote: RemoteConfig = RemoteConfig()
    """Remote files."""
    max_image_pixels: PositiveInt = 178_956_970
    """Larger images are skipped before they are decoded [pixels]."""
    max_bad_fraction: Probability = 0.001
    """The run stops when more than this share of the last 100,000 samples could not be used; each counts once."""
    index_dir: str | None = None
    """Where the index of the shards is kept; null: `$XDG_CACHE_HOME/sd_training/index` or
    `~/.cache/sd_training/index`."""


class MixEntry(OptionGroup):
    """One more data set beside the first. Image processing is the first one's."""

    type: SourceType = "WebDataset"
    """As `dataset.type`."""
    params: SourceParams
    """Which samples there are."""
    weight: Positive = 1.0
    """Share of the optimizer steps that draw from it, against the weights of the others."""
    start_step: Count = 0
    """First optimizer step that draws from it."""
    end_step: PositiveInt | None = None
    """First optimizer step that draws from it no more; null: none."""


class PriorConfig(OptionGroup):
    """DreamBooth: images of the subject's class that every second sample is, so that the class is not forgotten."""

    path: str | None = None
    """Folder of class images. Before training, the model that the run begins with draws those that are missing; null:
    no prior."""
    prompt: Annotated[str | list[str] | None, _PRIOR] = None
    """Their caption, such as `a photo of a dog`; or several, which they have in turn."""
    num_images: Annotated[PositiveInt, _PRIOR] = 200
    """How many there are at least [count]."""
    weight: Annotated[Positive, _PRIOR] = 1.0
    """λ: the loss is the mean over the subject's images plus λ times the mean over the class images."""

    @property
    def prompts(self) -> list[str]:
        """All of `prompt`."""
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt or []


class CacheConfig(OptionGroup):
    """Pictures and captions that were encoded before training."""

    path: str | None = None
    """Folder that `scripts/cache_latents.py` wrote for this model and data; null: images are decoded and encoded at
    every visit."""


class DatasetConfig(OptionGroup):
    """Training data."""

    type: SourceType = "WebDataset"
    """`WebDataset`: tar shards with image + `txt` (+ `json`). `ClassificationWebDataset`: image + `cls`, with
    `idx_to_prompt`. `Parquet`: image bytes or paths. `Table`: CSV, TSV or JSON lines with paths. `ImageFolder`:
    images with `.txt` captions. `TagFolder`: images described by JSON files. `HuggingFace`: `save_to_disk` folders.
    `Synthetic`: made-up samples without files, for benchmarks."""
    reuse_batch: bool = False
    """For benchmarks only, because nothing is learnt: every step trains on the first micro-batch of the run, so that
    the step is measured without reading data."""
    params: DatasetParams
    """Source and processing."""
    weight: Annotated[Positive, _MIXED] = 1.0
    """Share of the optimizer steps that draw from this data set when `mix` names others."""
    start_step: Annotated[Count, _MIXED] = 0
    """First optimizer step that draws from this data set."""
    end_step: Annotated[PositiveInt | None, _MIXED] = None
    """First optimizer step that draws from this data set no more; null: none."""
    mix: list[MixEntry] = Field(default=[])
    """More data sets, each with `params.path`, and `type`, `weight`, `start_step`, `end_step`; each optimizer step
    draws from one of them."""
    prior: Annotated[PriorConfig, DENOISER] = PriorConfig()
    """DreamBooth's class images."""
    cache: Annotated[CacheConfig, DENOISER] = CacheConfig()
    """Pictures and captions that were encoded before training."""


def class_name(value: object) -> str:
    """One spelling per class id: `7`, `"7"` and `"07"` are the same class."""
    text = str(value).strip()
    return (text.lstrip("0") or "0") if text.isascii() and text.isdigit() else text


_CLASS_PROMPTS = TypeAdapter(dict[str, str | Annotated[list[str], Field(min_length=1)]])


def read_class_prompts(params: SourceParams) -> tuple[dict[str, list[str]], list[str]]:
    """The prompts of every class, of `idx_to_prompt`.

    Returns:
        Class → at least one prompt, and one sentence per problem. `7`, `"7"` and `"07"` are the class `7`.
    """
    option, written = "dataset.params.idx_to_prompt", params.idx_to_prompt
    try:
        if isinstance(written, str):
            classes = _CLASS_PROMPTS.validate_json(Path(written).expanduser().read_bytes())
        else:
            classes = _CLASS_PROMPTS.validate_python({str(key): value for key, value in (written or {}).items()})
    except ValidationError as error:
        first, where = error.errors()[0], f" in {written!r}" if isinstance(written, str) else ""
        place = ".".join([option, *map(str, first["loc"][:1])])
        wanted = "must be a mapping (a file: JSON) of class to prompt or list of at least one prompt"
        return {}, [f"{place}: {wanted}{where}: {first['msg']}"]
    except (OSError, RuntimeError) as error:  # RuntimeError: `~nobody`
        return {}, [f"{option}: cannot read {written!r}: {getattr(error, 'strerror', None) or error}"]
    if not classes:
        return {}, [f"{option}: is required with dataset.type=ClassificationWebDataset, with at least one class"]
    prompts: dict[str, list[str]] = {}
    for name, found in classes.items():
        if class_name(name) in prompts:
            return {}, [f"{option}.{name}: this class is listed twice"]
        prompts[class_name(name)] = [found] if isinstance(found, str) else found
    return prompts, []
