import os
import subprocess
import sys
from pathlib import Path

from tests import makers
from tests.integration.training import ROOT


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "index_dataset.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_paths_and_a_page(tmp_path: Path) -> None:
    makers.caption_shards(tmp_path / "data", shards=2, per_shard=20)
    done = run(tmp_path / "data" / "000.tar", tmp_path / "data" / "001.tar", "--html", tmp_path / "report.html")
    assert done.returncode == 0, done.stderr
    assert "data: 40 samples in 2 shards" in done.stdout
    assert "1,000,000 images = 31,250 steps" in done.stdout
    assert "<svg" in (tmp_path / "report.html").read_text()


def test_the_data_of_a_config(tmp_path: Path) -> None:
    makers.caption_shards(tmp_path / "data")
    config = f"config={ROOT / 'configs' / 'finetune_config.yaml'}"
    options = [f"dataset.params.path={tmp_path / 'data'}", "experiment.num_examples_to_see=64"]
    done = run(config, *options, "dataset.params.filters.pwatermark=<0.5")
    assert done.returncode == 0, done.stderr
    assert "filter pwatermark < 0.5:" in done.stdout


def test_mistakes_are_sentences(tmp_path: Path) -> None:
    for arguments in ([tmp_path / "none.tar"], ["--type", "Tar", tmp_path], ["a.tar", "dataset.params.path=b"]):
        done = run(*arguments)
        assert done.returncode == 2
        assert "error:" in done.stderr and "Traceback" not in done.stderr
