"""The files can be read in order: none needs a later one, or a package beyond the five. And what
the README says to type exists."""

import ast
import re
import shlex
import sys
from pathlib import Path

import pytest

import speculate
import train
from data import prepare

ROOT = Path(__file__).parents[1]
ORDER = ["data/prepare.py", "model.py", "mtp.py", "dflash.py", "dmtp.py", "train.py",
         "speculate.py"]
PACKAGES = {"torch", "numpy", "tiktoken", "tqdm"}


def imports(path: Path) -> set[str]:
    """Names of imported modules; `from data import prepare` counts as data.prepare."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            inside = {f"data.{a.name}" for a in node.names}
            found |= inside if node.module == "data" else {node.module}
    return found


@pytest.mark.parametrize("name", ORDER)
def test_imports_point_only_upward_in_the_reading_order(name):
    own = {p.removesuffix(".py").replace("/", "."): p for p in ORDER}
    for module in imports(ROOT / name):
        if module in own:
            assert ORDER.index(own[module]) < ORDER.index(name), f"{name} imports {module}"
            assert not (name == "speculate.py" and module == "train"), "the two scripts are apart"
        else:
            top = module.split(".")[0]
            assert top in PACKAGES or top in sys.stdlib_module_names, f"{name} imports {module}"


@pytest.mark.parametrize("path", sorted(ROOT.glob("*.py")) + sorted(ROOT.glob("*/*.py")),
                         ids=lambda p: p.name)
def test_lines_have_at_most_one_hundred_columns(path):
    long = [i for i, line in enumerate(path.read_text("utf-8").splitlines(), 1) if len(line) > 100]
    assert not long


README = (ROOT / "README.md").read_text("utf-8")
COMMANDS = sorted(set(re.findall(r"python ([\w/]+\.py [^`&\n]+)", README)))
PLACEHOLDERS = {"NAME": "dflash", "N": "1", "LOSS": "kl", "DIR": "out", "FILES": "a.txt",
                "TEXT": "x"}


@pytest.mark.parametrize("command", [c for c in COMMANDS if "--help" not in c])
def test_every_command_of_the_readme_is_taken_by_its_program(command):
    script, *words = shlex.split(command)
    module = {"train.py": train, "speculate.py": speculate, "data/prepare.py": prepare}[script]
    try:
        module.parse_args([PLACEHOLDERS.get(word, word) for word in words])
        refused = False
    except SystemExit:
        refused = True
    assert not refused


@pytest.mark.parametrize("module", [train, speculate, prepare])
def test_a_command_that_is_refused_ends_in_two_lines_how_to_call_it_and_what_was_wrong(module,
                                                                                       capsys):
    with pytest.raises(SystemExit):
        module.parse_args(["--no-such-flag"])
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: python ") and "error: " in error


def test_every_flag_that_the_readme_names_exists(capsys):
    texts = ""
    for module in (train, speculate, prepare):
        with pytest.raises(SystemExit):
            module.parse_args(["--help"])
        texts += capsys.readouterr().out
    outside = {"--nproc-per-node"}  # torchrun's
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", README)) - outside
    assert len(named) > 30
    missing = [flag for flag in sorted(named) if not re.search(rf"{flag}(?![\w-])", texts)]
    assert not missing


def test_every_file_that_the_readme_names_exists():
    named = re.findall(r"`((?:tests|data)/[\w.]+\.py|\w+\.py|\w+\.txt)`", README)
    assert len(named) > 6 and all((ROOT / name).exists() for name in named)
