"""Inputs of the fuzz: valid ones with damage, and ones made from the words of each format. Seeded, so repeatable."""

import io
import json
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from tests.faults.hostile_files import (
    TAR_END,
    canary_pickle,
    pax_records,
    png,
    png_chunk,
    png_text_bomb,
    tar_header,
    tar_member,
)

_KINDS = [getattr(tarfile, name) for name in ("REGTYPE", "LNKTYPE", "SYMTYPE", "CHRTYPE", "FIFOTYPE", "DIRTYPE")]
_KINDS += [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_SPARSE, b"7", b"Z"]
_FILTER_WORDS = [
    "width",
    ">=",
    "512",
    "and",
    "(",
    ")",
    "or",
    "not",
    "in",
    "[",
    "a",
    ",",
    '"b',
    'c"',
    "]",
    "null",
    "is",
    "0.5",
    "..",
    "1e400",
    "--",
    "==",
    "!=",
    "<",
    ">",
    "`x`",
    "'",
    '"',
    "any_of",
    "where",
    "__import__('os').mkdir('{canary}')",
    "1_0",
    "..5",
    "5..",
    ".",
    "true",
    ";",
    "\\",
    "\x00",
    "é",
]
_YAML_WORDS = [
    "experiment:",
    "model:",
    "unet:",
    "params:",
    "dataset:",
    "path:",
    "{{",
    "}}",
    "[",
    "]",
    ",",
    ":",
    "-",
    "&",
    "*",
    "&a",
    "*a",
    "!!python/object/apply:os.mkdir\n",
    "",
    "",
    "",
    "['{canary}']",
    "${{experiment.name}}",
    "${{oc.env:HOME}}",
    "???",
    "null",
    ".inf",
    "1e9",
    "0x10",
    "|",
    ">",
    "<<:",
    '"\'"',
    "'\"'",
    "#",
    "2024-01-01",
    "allow_pipe:\n",
    "",
    "",
    "",
    "true",
    "wandb:",
    "api_key:",
    "optimizer:",
    "name:",
    "lr_scheduler:",
    "\n",
    "\n\n",
    "\t",
    "é",
]
_KEYS = "experiment.name model.unet.params.x dataset.params.path dataset.params.filters.w system.batch_size a..b mix[0]"
_JSON_WORDS = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    '"a"',
    '"$tensor"',
    '"$dict"',
    '"\\ud800"',
    "1",
    "-0",
    "1e999",
    "NaN",
    "9" * 5000,
]
_JSON_WORDS += [
    "null",
    "true",
    '"stride"',
    '"format"',
    '"files"',
    '"../x"',
    '"width"',
    '"weights.safetensors"',
    "[" * 2000,
    "[" * 200_000,
]
_SAVED = ('{"_data_files": [{"filename": ?}], "_split": null}', '{"_data_files": ?}', '{"splits": ["a", ?]}')
Chance = random.Random


def mutated(data: bytes, chance: Chance, words: list[bytes]) -> bytes:
    """One to eight kinds of damage."""
    for _ in range(chance.choice((1, 1, 2, 4, 8))):
        place, other = (chance.randrange(len(data) + 1) for _ in range(2))
        part = data[min(place, other) : max(place, other)]
        match chance.randrange(7):
            case 0 if data:
                place = min(place, len(data) - 1)
                data = data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :]
            case 1:
                data = data[:place]
            case 2:
                data = data[:place] + chance.choice(words) + data[place:]
            case 3:
                data = data[:place] + part[:4096] + data[place:]
            case 4:
                data = data.replace(part[:64], b"", 1)
            case 5:
                data = data[:place] + chance.choice((b"\xff", b"\0")) * chance.choice((1, 4, 512)) + data[place + 4 :]
            case _:
                number = chance.choice((0, -1, 2**31 - 1, 2**32, 2**63, 10**30))
                data = data[:place] + str(number).encode() + data[place + 1 :]
    return data


class Inputs:
    """One input per surface, number and seed.

    Args:
        seed: of all inputs.
        canary: what a payload would make.
    """

    def __init__(self, seed: int, canary: Path) -> None:
        self.seed = seed
        self.payloads = [
            canary_pickle(canary),
            f"!!python/object/apply:os.mkdir ['{canary}']".encode(),
            b"${oc.env:HOME}",
        ]
        self.payloads += [f"__import__('os').mkdir('{canary}')".encode(), b"\x1b[2J\n", b"%pipe%mkdir " + bytes(canary)]
        self.images = [_image(name) for name in ("JPEG", "PNG", "WEBP", "MPO")] + [png(8, 8, png_text_bomb(2))]
        metadata = json.dumps({"width": 40, "tags": ["a", "b"], "score": 0.5, "nested": {"a": [1, None]}}).encode()
        self.metadata = metadata
        parts = [(f"{i}.{kind}", content) for i in range(3) for kind, content in self._sample(i, metadata)]
        self.tar = b"".join(tar_member(name, content) for name, content in parts) + TAR_END
        self.canary = str(canary)

    def chance(self, surface: str, number: int) -> Chance:
        """The random numbers of one input."""
        return random.Random(f"{self.seed} {surface} {number}")

    def _sample(self, number: int, metadata: bytes) -> list[tuple[str, bytes]]:
        return [("jpg", self.images[number % 3]), ("txt", b"a caption"), ("json", metadata)]

    def _words(self, words: list[str], chance: Chance, most: int = 40) -> str:
        return " ".join(chance.choice(words).replace("{canary}", self.canary) for _ in range(chance.randrange(1, most)))

    def make_tar(self, chance: Chance) -> bytes:
        """A shard."""
        if chance.random() < 0.6:
            return mutated(self.tar, chance, self.payloads)
        found = b""
        for i in range(chance.randrange(1, 12)):
            name = chance.choice(
                (f"{i}.jpg", f"{i}.json", f"{i}.txt", f"{i}.cls", f"{i}.pkl", "../x.jpg", "/x.jpg", "a", "")
            )
            kind = chance.choice(_KINDS)
            key = chance.choice(
                ("size", "path", "GNU.sparse.map", "GNU.sparse.major", "GNU.sparse.minor", "mtime", "uid")
            )
            value = chance.choice(("1", "0", "-1", "9" * 30, "1,2", "x", "../y.jpg", "inf"))
            pax = pax_records([(key, value)] * chance.choice((1, 2)))
            content = chance.choice((*self.images, self.metadata, pax, *self.payloads, b""))
            is_promise = chance.random() < 0.1
            found += tar_header(name, chance.randrange(2**40), kind) if is_promise else tar_member(name, content, kind)
        return found + (TAR_END if chance.random() < 0.8 else b"")

    def make_json(self, chance: Chance) -> bytes:
        """A sidecar."""
        if chance.random() < 0.6:
            return mutated(self.metadata, chance, [*self.payloads, *(word.encode() for word in _JSON_WORDS)])
        return "".join(chance.choice(_JSON_WORDS) for _ in range(chance.randrange(1, 60))).encode()

    def make_image(self, chance: Chance) -> bytes:
        """An image file."""
        if chance.random() < 0.8:
            return mutated(chance.choice(self.images), chance, self.payloads)
        width, height = (chance.choice((0, 1, 7, 300, 65_535, 2**31 - 1)) for _ in range(2))
        kinds = (b"zTXt", b"iTXt", b"tEXt", b"iCCP", b"eXIf", b"tRNS", b"PLTE", b"acTL", b"fcTL", b"fdAT")
        extra = b"".join(png_chunk(chance.choice(kinds), chance.randbytes(chance.randrange(40))) for _ in range(4))
        return png(width, height, extra, chance.randbytes(50))

    def make_filter(self, chance: Chance) -> bytes:
        """A filter text."""
        if chance.random() < 0.4:
            text = b'(width >= 512 and not (aesthetic in [1, "x y"] or source == laion)) or 5.5..7 is not null'
            return mutated(text, chance, self.payloads)
        return self._words(_FILTER_WORDS, chance).encode()

    def make_config(self, chance: Chance) -> bytes:
        """A YAML file; behind a line of dashes overrides, one per line."""
        words = [word.replace("{{", "{").replace("}}", "}") for word in _YAML_WORDS]
        text = Path(__file__).parents[2].joinpath("configs", "quickstart_unet.yaml").read_bytes()
        file = (
            mutated(text, chance, self.payloads) if chance.random() < 0.5 else self._words(words, chance, 60).encode()
        )
        keys = _KEYS.split()
        overrides = [f"{chance.choice(keys)}={self._words(words, chance, 6)}" for _ in range(chance.randrange(4))]
        return file + b"\n-----\n" + "\n".join(line.replace("\n", " ") for line in overrides).encode()

    def make_saved_dataset(self, chance: Chance) -> bytes:
        """What describes a saved dataset: the file's name, a line feed, its content."""
        text = chance.choice(_SAVED).replace("?", chance.choice(['"x.arrow"', *_JSON_WORDS])).encode()
        name = b"dataset_dict.json" if b"splits" in text else b"state.json"
        return name + b"\n" + (text if chance.random() < 0.4 else self.damaged_json(text, chance.randrange(2**60)))

    def make_checkpoint(self, chance: Chance) -> bytes:
        """What is done to a checkpoint: `MANIFEST.json` or `state.json`, a line feed, and a seed for the damage."""
        return f"{chance.choice(('MANIFEST.json', 'state.json'))}\n{chance.randrange(2**60)}".encode()

    def damaged_json(self, text: bytes, seed: int) -> bytes:
        """A JSON file with damage."""
        return mutated(text, random.Random(seed), [*self.payloads, *(word.encode() for word in _JSON_WORDS)])

    def makers(self) -> dict[str, Callable[[Chance], bytes]]:
        """By surface."""
        return {
            "tar": self.make_tar,
            "JSON sidecar": self.make_json,
            "image": self.make_image,
            "filter text": self.make_filter,
            "config text": self.make_config,
            "saved dataset": self.make_saved_dataset,
            "checkpoint": self.make_checkpoint,
        }


def _image(name: str) -> bytes:
    stream = io.BytesIO()
    picture = Image.linear_gradient("L").resize((40, 32)).convert("RGB")
    further = {"save_all": True, "append_images": [picture]} if name == "MPO" else {}
    picture.save(stream, name, progressive=True, **further)
    return stream.getvalue()
