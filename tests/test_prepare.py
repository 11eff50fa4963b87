"""
Proves that data/prepare.py learns the BPE it says, loses no text, gives the same bytes every time,
never leaves or loads a folder that only looks finished, and refuses ids that do not fit uint16.
"""

import hashlib
import json
import random
import re
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from data import prepare

TRICKY = [
    "", " ", "\n", "a", "_", "__init__(self, *args):\n\treturn 12345\n\n\n", "x\r\ny\r\n\r\n  z",
    "tabs\t\tand  spaces   \n   at the end   ", "<|endoftext|> stays text <|endoftext|>",
    "emoji 🙂🏳️‍🌈 \u0301 naïve Ελλάδα 漢字 ٣٤٥ ² ½ Ⅷ ǅ", "nul \x00 and \x1c \x85 \u2028 \ufeff \u200b",
]


@pytest.fixture
def library(tmp_path, monkeypatch) -> Path:
    """A small tree of source files that stands in for the standard library."""
    root = tmp_path / "lib"
    rng = random.Random(0)
    names = "alpha beta gamma delta self return value index".split()
    for i in range(40):
        words = " ".join(rng.choice(names) for _ in range(200))
        write(root / f"package/module_{i}.py", f"# file {i}\r\n{words}\n".encode())
    write(root / "empty.py", b"")
    write(root / "latin.py", b"caf\xe9 = 1\n")
    write(root / "notes.txt", b"no python")
    for folder in prepare.SKIP_FOLDERS:
        write(root / folder / "hidden.py", b"hidden = 1\n")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    monkeypatch.setattr(prepare, "MIN_FILES", 10)
    monkeypatch.setattr(prepare, "MIN_BYTES", 1000)
    return root


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def join(tokens: list[bytes], left: bytes, right: bytes) -> list[bytes]:
    out = []
    for token in tokens:
        # a token that is joined already is longer than left, so it never matches again
        if out and out[-1] == left and token == right:
            out[-1] += token
        else:
            out.append(token)
    return out


def naive_bpe(words: dict[bytes, int], n_merges: int) -> dict[bytes, int]:
    """The same ranks as train_bpe, every pair counted again before every merge."""
    ranks = {bytes([b]): b for b in range(256)}
    pieces = {word: [bytes([b]) for b in word] for word in words}
    while len(ranks) < 256 + n_merges:
        counts = Counter()
        for word, tokens in pieces.items():
            for pair in zip(tokens, tokens[1:]):
                counts[pair] += words[word]
        left, right = min(counts, key=lambda pair: (-counts[pair], pair))
        ranks.setdefault(left + right, len(ranks))
        pieces = {word: join(tokens, left, right) for word, tokens in pieces.items()}
    return ranks


def naive_encode(text: str, ranks: dict[bytes, int]) -> list[int]:
    """In each word, joins the neighbours of the lowest rank until no pair is a token."""
    ids = []
    for word in re.findall(prepare.PATTERN, text):
        tokens = [bytes([b]) for b in word.encode()]
        while True:
            joins = [(ranks[left + right], i) for i, (left, right)
                     in enumerate(zip(tokens, tokens[1:])) if left + right in ranks]
            if not joins:
                break
            i = min(joins)[1]
            tokens[i:i + 2] = [tokens[i] + tokens[i + 1]]
        ids += [ranks[token] for token in tokens]
    return ids


def test_wikipedia_example():
    ranks = prepare.train_bpe({b"aaabdaaabac": 1}, 3)
    assert {token: i for token, i in ranks.items() if i >= 256} == {
        b"aa": 256, b"ab": 257, b"aaab": 258}
    with pytest.raises(ValueError, match="too small for --vocab 261: use 260 or less"):
        prepare.train_bpe({b"aaabdaaabac": 1}, 4)


def test_merge_pair_example():
    pieces = [[b"x", b"a", b"a", b"a"]]
    _, where = prepare.count_pairs(pieces, [1])
    changes = prepare.merge_pair((b"a", b"a"), pieces, [1], where)
    assert pieces == [[b"x", b"aa", b"a"]]
    assert {pair: change for pair, change in changes.items() if change} == {
        (b"a", b"a"): -2, (b"x", b"a"): -1, (b"x", b"aa"): 1, (b"aa", b"a"): 1}


@pytest.mark.parametrize("seed", range(20))
def test_incremental_counts_equal_counting_again(seed):
    rng = random.Random(seed)
    # two or three letters and equal counts give many ties, overlaps and tokens made in two ways
    words = {bytes(rng.choices(b"abc"[:2 + seed % 2], k=rng.randint(1, 12))): rng.randint(2, 4)
             for _ in range(30)}
    ranks = prepare.train_bpe(words, 25)
    assert list(ranks.items()) == list(naive_bpe(words, 25).items())


@pytest.mark.parametrize("text", TRICKY)
def test_pattern_covers_every_character(text):
    assert "".join(re.findall(prepare.PATTERN, text)) == text


def test_pattern_covers_all_of_unicode():
    text = "".join(chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000)
    assert "".join(re.findall(prepare.PATTERN, text)) == text


def test_encoding_loses_nothing_and_keeps_special_text_plain():
    tokenizer = prepare.train_tokenizer(TRICKY * 3, 300)
    enc = prepare.encoding(tokenizer)
    for text in TRICKY:
        ids = enc.encode_ordinary(text)
        assert enc.decode_bytes(ids) == text.encode()
        assert tokenizer["eot"] not in ids
    assert enc.n_vocab == 300 and enc.eot_token == tokenizer["eot"] == 299


def test_merges_applied_by_hand_equal_tiktoken():
    text = Path(prepare.__file__).read_text()
    tokenizer = prepare.train_tokenizer([text], 600)
    enc = prepare.encoding(tokenizer)
    ranks = {enc.decode_single_token_bytes(i): i for i in range(599)}
    assert enc.encode_ordinary(text) == naive_encode(text, ranks)


def source(texts: list[str], val: list[str] | None = None, share: float = 0.05) -> prepare.Source:
    """A source of documents in memory."""
    def parts(of: list[str]):
        return lambda: (part for text in of for part in prepare.cut(text))

    return prepare.Source("tests", parts(texts), {}, parts(val) if val else None, share)


def sides(of: prepare.Source) -> dict[str, str]:
    """What split gives to each side, with | after every document."""
    out = {"train": "", "val": ""}
    for side, part in prepare.split(of, prepare.survey(of)):
        out[side] += part.text + "|" * part.ends
    return out


def test_split_of_many_documents_depends_on_each_text_alone():
    texts = [f"text {i}" for i in range(400)]
    before = sides(source(texts, share=0.1))
    assert sorted((before["train"] + before["val"])[:-1].split("|")) == sorted(texts)
    assert 15 < before["val"].count("|") < 70
    edited = [*texts, "more"]
    edited[7:7] = ["another", texts[3]]  # a copy goes where the first one went
    after = sides(source(edited, share=0.1))
    for side in ("train", "val"):
        kept = [text for text in after[side].split("|") if text not in ("another", "more")]
        assert list(dict.fromkeys(kept)) == before[side].split("|")
        assert (f"{texts[3]}|" in before[side]) == (after[side].count(f"{texts[3]}|") == 2)


def test_split_of_few_documents_holds_out_the_tail_as_worked_in_the_docstring():
    assert sides(source(["abcdef", "gh"], share=0.5)) == {"train": "abcd|", "val": "ef|gh|"}


def test_split_of_few_documents_at_every_cut(monkeypatch):
    monkeypatch.setattr(prepare, "PART_CHARS", 3)
    texts = ["abcdefgh", "", "ij", "klmnopq"]
    for n in range(1, 17):
        found = sides(source(texts, share=n / 17))
        train, val = found["train"], found["val"]
        assert (train + val).replace("|", "") == "".join(texts) and len(val.replace("|", "")) == n
        assert train.endswith("|") and val.endswith("|")
        # every end of a document stands, and one more where the cut is inside one
        whole = "|".join(t for t in texts if t) + "|"
        assert train + val == whole or (train[:-1] + val == whole)


def test_named_held_out_text_is_held_out_and_all_else_trained_on():
    found = sides(source([f"a{i}" for i in range(150)] + [""], val=["x", "", "yz"]))
    assert found["val"] == "x|yz|" and found["train"].count("|") == 150


def test_held_out_text_of_a_long_source_is_capped(monkeypatch):
    monkeypatch.setattr(prepare, "VAL_CHARS", 40)
    found = sides(source([f"text {i:04}" for i in range(2000)], share=0.5))
    assert 0 < found["val"].count("|") < 20


def test_folder_holds_the_documents_and_their_counts(library, tmp_path):
    meta = prepare.prepare_stdlib(tmp_path / "out", 300)
    dataset = prepare.load(tmp_path / "out")
    assert dataset.meta == meta and dataset.train.dtype == np.uint16
    assert (meta["train_tokens"], meta["val_tokens"]) == (len(dataset.train), len(dataset.val))
    assert meta["train_documents"] + meta["val_documents"] == 41 and meta["empty_documents"] == 2
    assert meta["digests"]["val.bin"] == hashlib.sha256(dataset.val.tobytes()).hexdigest()
    enc = prepare.encoding(json.loads(json.dumps(dataset.tokenizer)))
    texts = enc.decode([*dataset.train, *dataset.val]).split(prepare.EOT_TEXT)
    # 40 are few: one is cut where the held-out tail begins
    assert texts.pop() == "" and len(texts) == 41
    files = [path.read_text() for path in sorted(library.glob("package/*.py"))]
    assert "".join(texts) == "".join(files)  # read_text turns \r\n into \n too


def test_two_runs_give_the_same_bytes(library, tmp_path):
    for parent in ("one", "two"):
        prepare.prepare_stdlib(tmp_path / parent / "out", 300)
    assert contents(tmp_path / "one/out") == contents(tmp_path / "two/out")
    assert sorted(contents(tmp_path / "one/out")) == sorted([*prepare.FILES, "meta.json"])


def test_second_run_does_nothing(library, tmp_path, capsys):
    out = tmp_path / "out"
    meta = prepare.prepare_stdlib(out, 300)
    times = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    capsys.readouterr()
    assert prepare.prepare_stdlib(out, 300) == meta
    assert capsys.readouterr().out == f"{out} is ready, nothing to do\n"
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == times


@pytest.mark.parametrize("name", ["train.bin", "vocab.tiktoken", "meta.json"])
def test_damaged_folder_is_made_again(library, tmp_path, capsys, name):
    out = tmp_path / "out"
    prepare.prepare_stdlib(out, 300)
    good = contents(out)
    flipped = bytearray(good[name])
    flipped[0] ^= 1
    (out / name).write_bytes(flipped)
    capsys.readouterr()
    prepare.prepare_stdlib(out, 300)
    assert ("damaged" if name == "meta.json" else "digest") in capsys.readouterr().out
    assert contents(out) == good


def test_other_settings_make_the_folder_again(library, tmp_path):
    prepare.prepare_stdlib(tmp_path / "out", 300)
    assert prepare.prepare_stdlib(tmp_path / "out", 280)["tokenizer"]["vocab_size"] == 280
    assert prepare.load(tmp_path / "out").train.max() == 279


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_stopped_run_leaves_no_folder_and_keeps_an_older_one(library, tmp_path, monkeypatch, error):
    old = tmp_path / "old"
    prepare.prepare_stdlib(old, 300)
    before = contents(old)
    write_ids, calls = prepare.write_ids, []

    def stop_midway(file, ids, vocab_size):
        calls.append(ids)
        if len(calls) % 5 == 0:
            raise error
        write_ids(file, ids, vocab_size)

    monkeypatch.setattr(prepare, "write_ids", stop_midway)
    for out in (old, tmp_path / "fresh"):
        with pytest.raises((KeyboardInterrupt, OSError)):
            prepare.prepare_stdlib(out, 280)
    assert contents(old) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lib", "old"]


def test_leftovers_of_a_killed_run_go(library, tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for _ in range(2):
        write(tmp_path / f".out.partial-{ended.pid}/train.bin", b"half")
        prepare.prepare_stdlib(tmp_path / "out", 300)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["lib", "out"]


def test_a_folder_that_a_run_did_not_make_is_never_removed(library, tmp_path):
    for name in ("out.partial", ".out.partial", "out-partial-1"):
        write(tmp_path / name / "mine.txt", b"mine")
    prepare.prepare_stdlib(tmp_path / "out", 300)
    assert len(list(tmp_path.rglob("mine.txt"))) == 3


def test_a_run_beside_another_of_the_same_name_is_refused(library, tmp_path):
    running = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    write(tmp_path / f".out.partial-{running.pid}/train.bin", b"half")
    with pytest.raises(ValueError, match=f"process {running.pid}. is making"):
        prepare.prepare_stdlib(tmp_path / "out", 300)
    assert (tmp_path / f".out.partial-{running.pid}/train.bin").exists()
    running.communicate(b"\n")


def test_a_link_to_a_folder_is_followed_and_a_file_in_the_way_is_named(library, tmp_path):
    (tmp_path / "elsewhere" / "real").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere" / "real")
    prepare.prepare_stdlib(tmp_path / "out", 300)
    assert (tmp_path / "elsewhere" / "real" / "meta.json").exists()
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == ["real"]
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match="file is a file: remove it"):
        prepare.prepare_stdlib(tmp_path / "file", 300)


def test_ctrl_c_is_one_line_and_exit_code_130(monkeypatch, capsys):
    def interrupt(out, vocab_size):
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "prepare_stdlib", interrupt)
    assert prepare.main([]) == 130
    assert capsys.readouterr().err.strip() == "interrupted: run the same command again"


def test_missing_library_is_one_line(library, tmp_path, monkeypatch, capsys):
    (tmp_path / "zip").mkdir()
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "zip")})
    monkeypatch.setattr(prepare, "__file__", str(tmp_path / "prepare.py"))
    assert prepare.main([]) == 1
    error = capsys.readouterr().err
    assert "0 .py files" in error and "10 of 1,000" in error and error.count("\n") == 1
    assert not (tmp_path / "stdlib").exists()


def test_too_small_a_text_is_named_and_leaves_nothing(library, tmp_path):
    with pytest.raises(ValueError, match="too small for --vocab 5000: use [0-9]+ or less"):
        prepare.prepare_stdlib(tmp_path / "out", 5000)
    assert not list(tmp_path.glob("out*"))


def test_ids_that_fit_are_written_and_others_refused(tmp_path):
    with open(tmp_path / "ids", "wb") as file:
        prepare.write_ids(file, [0, 65535], 65536)
        for ids, vocab_size in [([65536], 65536), ([70000], 100_000), ([-1], 300), ([300], 300)]:
            with pytest.raises(ValueError, match="allowed is 0.."):
                prepare.write_ids(file, [1, *ids], vocab_size)
    assert (tmp_path / "ids").read_bytes() == b"\x00\x00\xff\xff"


@pytest.mark.parametrize("name, damage, message", [
    ("val.bin", lambda old: old[:-1], "val.bin has [0-9]+ bytes"),
    ("val.bin", lambda old: old[:-2], "val.bin has [0-9]+ bytes"),
    ("val.bin", lambda old: b"", "val.bin has 0 bytes"),
    ("val.bin", lambda old: old[:-2] + b"\x2c\x01", "id 300, the vocabulary ends at 299"),
    ("val.bin", None, "No such file"),
    ("vocab.tiktoken", lambda old: old[:len(old) // 2], "299 lines"),
    ("meta.json", lambda old: old[:len(old) // 2], "damaged"),
    ("meta.json", lambda old: b"{}", "damaged .'tokenizer'"),
    ("meta.json", None, "is not prepared")])
def test_damaged_folder_is_refused_in_one_line(library, tmp_path, name, damage, message):
    prepare.prepare_stdlib(tmp_path / "out", 300)
    path = tmp_path / "out" / name
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=message) as caught:
        prepare.load(tmp_path / "out")
    assert "run python data/prepare.py FILES --name out" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_name_says_what_to_run():
    with pytest.raises(ValueError, match="not prepared: run .* FILES --name nowhere"):
        prepare.load("nowhere")


@pytest.mark.parametrize("arguments, message", [
    (["--vocab", "256"], "256 is given, allowed: gpt2, or 257 to 65536"),
    (["--vocab", "65537"], "65537 is given"), (["--vocab", "many"], "many is given"),
    (["--name", "../x"], "--name is '../x'"), (["fineweb"], "there is no fineweb"),
    (["fineweb-edu", "--shards", "0"], "0 is given, allowed: 1, 2, 3"),
    (["fineweb-edu", "--shards", "1", "--tokens", "5"], "not allowed with argument"),
    (["fineweb-edu", "--shards", "1002"], "1001 shards of 100,000,000 are there"),
    (["--tokens", "5"], "--shards and --tokens are for fineweb-edu"),
    (["--val", "x.txt"], "--val is for your own files"),
    (["stdlib", "x.txt"], "stdlib and fineweb-edu stand alone"),
    (["x.txt", "--name", "stdlib"], "--name stdlib is for that source"),
    (["fineweb-edu", "--name", "stdlib"], "--name stdlib is for that source"),
    (["stdlib", "--name", "fineweb-edu"], "--name fineweb-edu is for that source"),
    ([""], "one of the names is empty")])
def test_command_line_mistakes_are_named_without_a_traceback(arguments, message):
    ran = subprocess.run([sys.executable, prepare.__file__, *arguments], capture_output=True,
                         text=True)
    assert ran.returncode in (1, 2) and message in ran.stderr
    assert "Traceback" not in ran.stderr
