import re
import subprocess
import sys
from pathlib import Path

import pytest

from sd_training.config.fields import groups, options
from sd_training.config.help import help_text
from sd_training.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]


def test_the_first_page_names_usual_options_and_every_group() -> None:
    page = help_text("usage", [])
    assert page.startswith("usage\n") and "docs/config.md" in page
    shown = re.findall(r"^  (\*?)([a-z_.]+)=(\S*)  *(\S.*)$", page, re.MULTILINE)
    assert len(shown) >= 20 and all(key in options() and meaning for _, key, _, meaning in shown)
    assert {key for mark, key, _, _ in shown if mark} == {key for key, option in options().items() if option.required}
    assert all(re.search(rf"^  {key} +\S", page, re.MULTILINE) for key in groups())
    assert max(map(len, page.splitlines())) < 200


def test_a_group_an_option_and_a_mistake() -> None:
    page = help_text("usage", ["ema", "system.batch_size=4"])
    assert "usage" not in page and "ema.decay=0.9999" in page and "ema.snapshot_every=1000" in page
    assert "system.batch_size=32\n      (a whole number of at least 1) Micro-batch" in page
    with pytest.raises(ConfigError, match=r"--help optimiser: is neither .*; did you mean optimizer\?"):
        help_text("usage", ["optimiser"])
    with pytest.raises(ConfigError, match=r"did you mean optimizer\.params\.learning_rate\?"):
        help_text("usage", ["optimizer.lr"])
    with pytest.raises(ConfigError, match="groups are experiment, dataset, model"):
        help_text("usage", ["zzz"])


def test_help_needs_no_torch() -> None:
    program = "import sys, train; sys.argv[1:] = ['--help', 'model']; train.main(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    *page, modules = done.stdout.splitlines()
    assert "  model.use_ema=false" in page
    assert {"torch", "diffusers", "transformers", "numpy"}.isdisjoint(modules.split())
