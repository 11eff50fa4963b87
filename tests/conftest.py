"""What the tests of train.py share: prepared data, and a size small enough to train in a test."""

from pathlib import Path

import pytest

import train
from data import prepare
from model import SIZES

ROOT = Path(train.__file__).parent


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """This project's own sources, prepared with 300 tokens."""
    paths = sorted([*ROOT.glob("*.py"), *ROOT.glob("tests/*.py")])
    folder = tmp_path_factory.mktemp("data") / "own"
    source = prepare.Source("tests", lambda: prepare.read_library(paths), {}, val_share=0.12)
    prepare.prepare_text(folder, source, 300)
    return folder


@pytest.fixture
def very_small(monkeypatch) -> None:
    """--size tiny is smaller still, and judged on 8 windows."""
    monkeypatch.setitem(SIZES, "tiny", (2, 16, 2, 8, 24, 32))
    monkeypatch.setattr(train, "EVAL_WINDOWS", 8)


@pytest.fixture
def train_script(tmp_path) -> Path:
    """The same as a script, for a process of its own."""
    path = tmp_path / "small_train.py"
    path.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\nimport train\n"
                    "train.SIZES['tiny'] = (2, 16, 2, 8, 24, 32)\ntrain.EVAL_WINDOWS = 8\n"
                    "sys.exit(train.main(sys.argv[1:]))\n")
    return path
