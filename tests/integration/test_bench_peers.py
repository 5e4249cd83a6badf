"""The comparison with another program takes turns and tells what goes wrong; the other program is a stand-in here."""

import argparse
from pathlib import Path

import pytest

from scripts import bench_peers
from sd_training.config.load import load_config
from sd_training.errors import ConfigError, DataError
from tests.integration.training import prepare

PEER = """
import sys, torch
weights = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(weights.parameters())
print("started with", sys.argv[1:])
for step in range(int(sys.argv[1])):
    weights(torch.ones(4)).sum().backward()
    optimizer.step()
    if len(sys.argv) > 2:
        open(sys.argv[2], "a").write(f"{sys.argv[3]}{step} ")
raise ValueError("the end")
"""


@pytest.fixture
def peer(tmp_path: Path) -> str:
    (tmp_path / "peer.py").write_text(PEER)
    return str(tmp_path / "peer.py")


def test_programs_take_turns(tmp_path: Path, peer: str) -> None:
    done = tmp_path / "done"
    lines = {name: [peer, "1000", str(done), name] for name in "ab"}
    seconds = bench_peers.compete(lines, tmp_path, steps=2, num_turns=2)
    assert [len(turns) for turns in seconds.values()] == [2, 2]
    assert all(value > 0 for turns in seconds.values() for turn in turns for value in turn)
    # A program waits inside its optimizer step, before it has written the last one of its turn.
    assert done.read_text() == "a0 b0 a1 a2 b1 b2 a3 a4 b3 b4 "


def test_a_program_that_fails_is_shown(tmp_path: Path, peer: str) -> None:
    with pytest.raises(DataError, match=r"a ended with status 1:(.|\n)*ValueError: the end"):
        bench_peers.compete({"a": [peer, "3"]}, tmp_path, steps=2, num_turns=2)


def test_this_trainer_reads_the_pictures(tmp_path: Path) -> None:
    pipeline = bench_peers.save_pipeline(tmp_path / "pipeline", "tiny")
    bench_peers.make_pictures(tmp_path / "pictures", 16, 8)
    arguments = argparse.Namespace(
        **{"resolution": 16, "batch": 4, "workers": 1, "precision": "no"},
        **{"diffusers_script": Path("theirs.py"), "overrides": ["system.workers=0"]},
    )
    lines = bench_peers.command_lines(arguments, pipeline, tmp_path)
    assert load_config(lines["sd_training"][1:]).dataset.type == "Table"
    batch = next(iter(prepare([*lines["sd_training"][1:]]).data.loader(0, lambda: 0)))
    assert batch.pixels.shape == (4, 3, 16, 16)
    assert {"--use_ema", "--center_crop", "--train_batch_size"} < set(lines["diffusers"])


def test_mistakes_are_sentences(tmp_path: Path, peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--diffusers-script: .* is no file"):
        bench_peers.parse_arguments(["--diffusers-script", str(tmp_path / "none.py")])
    with pytest.raises(ConfigError, match="--batch: is 0"):
        bench_peers.parse_arguments(["--diffusers-script", peer, "--batch", "0"])
    monkeypatch.setattr(bench_peers, "_PACKAGES", ("torch", "no_such_package"))
    with pytest.raises(ConfigError, match="packages that are missing; pip install no_such_package"):
        bench_peers.parse_arguments(["--diffusers-script", peer])
