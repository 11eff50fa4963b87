"""
Turns text into token files for training.

    python data/prepare.py      # this Python's own library -> data/stdlib/

A folder data/<name>/ holds
    train.bin, val.bin   token ids, raw little-endian uint16; every document ends with end-of-text
    vocab.tiktoken       the tokenizer, one "base64-of-the-token rank" per line
    meta.json            counts, settings, digests; written last: without it nothing counts
The same text and settings give the same bytes.
"""

import argparse
import base64
import hashlib
import heapq
import json
import platform
import re
import shutil
import sys
import sysconfig
import time
from collections import Counter, defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tiktoken
from tqdm import tqdm

# text is cut into words, and pairs never merge across them: letters, up to three digits,
# punctuation (each with at most one space in front), line ends, other white space. Python's `re`
# cuts for learning, tiktoken's engine for encoding. Their Unicode tables differ for a few rare
# letters, which does no harm: every character still falls in one class, so no text is lost.
PATTERN = r" ?[^\W\d_]+| ?\d{1,3}| ?(?:[^\s\w]|_)+|\s*[\r\n]+|\s+(?!\S)|\s+"
EOT_TEXT = "<|endoftext|>"
SEED, VAL_PERCENT = 1337, 12  # percent of files: in Python 3.10-3.13 over 64 have 192 tokens
SKIP_FOLDERS = ["__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"]
MIN_FILES, MIN_BYTES = 200, 2_000_000  # a standard library with less is not complete
FILES = ["train.bin", "val.bin", "vocab.tiktoken"]


def count_pairs(pieces: list[list[bytes]], n_times: list[int]) -> tuple[Counter, dict]:
    """Occurrences of each pair of neighbours, and {pair: indices of the words that have it}."""
    counts, where = Counter(), defaultdict(set)
    for i, tokens in enumerate(pieces):
        for pair in zip(tokens, tokens[1:]):
            counts[pair] += n_times[i]
            where[pair].add(i)
    return counts, where


def merge_pair(pair: tuple[bytes, bytes], pieces: list[list[bytes]], n_times: list[int],
               where: dict) -> dict:
    """
    Joins pair in all words, in place, and returns {pair: change of its count}; adds to where.
    [x, a, a, a] with pair (a, a) becomes [x, aa, a]: (a, a) -2, (x, a) -1, (x, aa) +1, (aa, a) +1.
    """
    left, right = pair
    joined, changes = left + right, defaultdict(int)
    for i in where.pop(pair):
        tokens, n, j = pieces[i], n_times[i], 0
        while j < len(tokens) - 1:
            if tokens[j] == left and tokens[j + 1] == right:
                tokens[j:j + 2] = [joined]
                changes[pair] -= n
                if j > 0:
                    changes[tokens[j - 1], left] -= n
                    changes[tokens[j - 1], joined] += n
                    where[tokens[j - 1], joined].add(i)
                if j + 1 < len(tokens):
                    changes[right, tokens[j + 1]] -= n
                    changes[joined, tokens[j + 1]] += n
                    where[joined, tokens[j + 1]].add(i)
            j += 1
    return changes


def train_bpe(words: dict[bytes, int], n_merges: int) -> dict[bytes, int]:
    """
    The ranks {token: id}: 256 bytes, then one token per merge. words maps each to its count.

    A merge joins the most frequent pair; of equals, the smaller pair of byte strings. ValueError
    if no pair occurs twice any more. Example (Wikipedia, "Byte pair encoding"): {aaabdaaabac: 1}
        a a a b d a a a b a c    (a, a) occurs 4 times                           aa   -> 256
        aa a b d aa a b a c      (a, b) and (aa, a) occur twice, (a, b) is less  ab   -> 257
        aa ab d aa ab a c        (aa, ab) occurs twice                           aaab -> 258
        aaab d aaab a c          no pair occurs twice
    """
    ranks = {bytes([b]): b for b in range(256)}
    pieces, n_times = [[bytes([b]) for b in word] for word in words], list(words.values())
    counts, where = count_pairs(pieces, n_times)
    # subtle: entries of a heap cannot be changed, so every change of a count pushes one more, and
    # an entry that disagrees with counts is outdated and skipped
    heap = [(-count, pair) for pair, count in counts.items()]
    heapq.heapify(heap)
    while len(ranks) < 256 + n_merges:
        negative_count, pair = heapq.heappop(heap) if heap else (0, None)
        if negative_count > -2:
            raise ValueError(f"the text is too small for --vocab {n_merges + 257}: use "
                             f"{len(ranks) + 1} or less, or more text")
        if counts[pair] == -negative_count:
            # a + bc is the same token as ab + c: the second way to make it adds no rank
            ranks.setdefault(pair[0] + pair[1], len(ranks))
            for other, change in merge_pair(pair, pieces, n_times, where).items():
                counts[other] += change
                heapq.heappush(heap, (-counts[other], other))
    return ranks


def train_tokenizer(texts: list[str], vocab_size: int) -> dict:
    """{"pattern": str, "ranks": text of vocab.tiktoken, "eot": int, "vocab_size": int}."""
    words = Counter()
    for text in texts:
        words.update(re.findall(PATTERN, text))
    ranks = train_bpe({word.encode(): count for word, count in words.items()}, vocab_size - 257)
    ranks = "".join(f"{base64.b64encode(token).decode()} {i}\n" for token, i in ranks.items())
    return {"pattern": PATTERN, "ranks": ranks, "eot": vocab_size - 1, "vocab_size": vocab_size}


def encoding(tokenizer: dict) -> tiktoken.Encoding:
    """The encoder for a tokenizer; its encode_ordinary takes a literal <|endoftext|> for text."""
    lines = tokenizer["ranks"].splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(str.split, lines)}
    return tiktoken.Encoding("bpe", pat_str=tokenizer["pattern"], mergeable_ranks=ranks,
                             special_tokens={EOT_TEXT: tokenizer["eot"]},
                             explicit_n_vocab=tokenizer["vocab_size"])


def list_stdlib(root: Path) -> list[str]:
    """The .py files under root as sorted posix paths; ValueError if it is no complete library."""
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    paths = sorted(path.as_posix() for path in paths if not set(path.parts) & set(SKIP_FOLDERS))
    n_bytes = sum((root / path).stat().st_size for path in paths)
    if len(paths) < MIN_FILES or n_bytes < MIN_BYTES:
        raise ValueError(f"{root} has {len(paths)} .py files of {n_bytes:,} bytes, {MIN_FILES} of "
                         f"{MIN_BYTES:,} are needed: use a Python with its library as plain files")
    return paths


def read_documents(root: Path, paths: list[str]) -> dict[str, str]:
    """{path: text} with line ends \\n, without the files that are empty or not UTF-8."""
    documents = {}
    for path in paths:
        try:
            text = (root / path).read_bytes().decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        if text:
            documents[path] = text
    return documents


def split(documents: dict[str, str]) -> tuple[list[str], list[str]]:
    """The train texts, shuffled, and the val texts, in order of path."""
    # a hash of the path decides, so editing or adding files moves no other file
    hashes = {path: int(hashlib.sha256(f"{SEED}/{path}".encode()).hexdigest(), 16)
              for path in documents}
    train = [documents[path] for path in sorted(documents, key=hashes.get)
             if hashes[path] % 100 >= VAL_PERCENT]
    val = [documents[path] for path in sorted(documents) if hashes[path] % 100 < VAL_PERCENT]
    return train, val


class Dataset(NamedTuple):
    train: np.memmap  # (n_tokens,) uint16
    val: np.memmap    # (n_tokens,) uint16
    tokenizer: dict   # what `encoding` takes
    meta: dict        # meta.json


def write_ids(file, ids: list[int], vocab_size: int) -> None:
    """Appends ids to a binary file as uint16; ValueError for an id that does not fit."""
    ids = np.asarray(ids, dtype=np.int64)
    limit = min(vocab_size, 65536)  # subtle: astype wraps silently, 65536 would become 0
    if len(ids) and (ids.min() < 0 or ids.max() >= limit):
        raise ValueError(f"ids go from {ids.min()} to {ids.max()}, allowed is 0..{limit - 1}")
    file.write(ids.astype("<u2").tobytes())


def read_ids(path: Path, n_tokens: int, vocab_size: int) -> np.memmap:
    """The (n_tokens,) uint16 ids in path, left on disk; ValueError if it holds something else."""
    n_bytes = path.stat().st_size
    if n_bytes == 0 or n_bytes != 2 * n_tokens:
        raise ValueError(f"{path.name} has {n_bytes} bytes, not 2 for each of {n_tokens} tokens")
    ids = np.memmap(path, dtype="<u2", mode="r")
    if ids.max() >= vocab_size:
        raise ValueError(f"{path.name} has id {ids.max()}, the vocabulary ends at {vocab_size - 1}")
    return ids


def load(name_or_folder: str | Path) -> Dataset:
    """The Dataset in a folder; a plain str such as "stdlib" is a folder beside this file."""
    folder = Path(name_or_folder)
    if name_or_folder == folder.name:
        folder = Path(__file__).parent / folder
    redo = f"run python data/prepare.py --name {folder.name}"
    if not (folder / "meta.json").exists():
        raise ValueError(f"{folder} is not prepared: {redo}")
    try:
        meta = json.loads((folder / "meta.json").read_text())
        tokenizer = dict(meta["tokenizer"])
        vocab_size = tokenizer["vocab_size"]
        tokenizer["ranks"] = (folder / tokenizer.pop("file")).read_text()
        if tokenizer["ranks"].count("\n") != vocab_size - 1:
            raise ValueError(f"vocab.tiktoken has not the {vocab_size - 1} lines it needs")
        train = read_ids(folder / "train.bin", meta["train_tokens"], vocab_size)
        val = read_ids(folder / "val.bin", meta["val_tokens"], vocab_size)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ValueError(f"{folder} is damaged ({error}): {redo}") from error
    return Dataset(train, val, tokenizer, meta)


def digests(folder: Path) -> dict[str, str]:
    """The sha256 of each token and tokenizer file, in hex."""
    return {name: hashlib.sha256(np.memmap(folder / name, mode="r")).hexdigest() for name in FILES}


def why_redo(folder: Path, settings: dict) -> str:
    """Why the folder is not what settings would give, or "" if it is."""
    try:
        meta = load(folder).meta
    except ValueError as error:
        return str(error) if (folder / "meta.json").exists() else "not prepared"
    if meta.get("settings") != settings:
        return "made with other settings or by another Python"
    return "" if meta.get("digests") == digests(folder) else "a file does not match its digest"


def build(root: Path, paths: list[str], folder: Path, vocab_size: int) -> dict:
    """The counts and the tokenizer for meta.json, after writing the other files to folder."""
    start = time.perf_counter()
    documents = read_documents(root, paths)
    train, val = split(documents)
    print(f"read {len(documents)} files | {time.perf_counter() - start:.1f} s")
    start = time.perf_counter()
    tokenizer = train_tokenizer(train, vocab_size)
    print(f"learn {vocab_size} tokens | {time.perf_counter() - start:.1f} s")
    enc = encoding(tokenizer)
    (folder / "vocab.tiktoken").write_bytes(tokenizer.pop("ranks").encode())
    meta = {"tokenizer": tokenizer | {"file": "vocab.tiktoken"},
            "skipped_files": len(paths) - len(documents)}
    start = time.perf_counter()
    for name, texts in (("train", train), ("val", val)):
        path = folder / f"{name}.bin"
        with open(path, "wb") as file:
            for text in tqdm(texts, desc=f"encode {name}", unit="file", leave=False, disable=None):
                write_ids(file, enc.encode_ordinary(text) + [enc.eot_token], vocab_size)
        meta |= {f"{name}_tokens": path.stat().st_size // 2, f"{name}_documents": len(texts)}
    print(f"encode {meta['train_tokens']:,} train and {meta['val_tokens']:,} val tokens | "
          f"{time.perf_counter() - start:.1f} s")
    return meta


def prepare(root: Path, paths: list[str], out: Path, settings: dict) -> dict:
    """
    The meta of folder out, made from the files root/path; settings is all that decides the result.
    It is written beside out, then moved: a run that fails leaves older files alone, and only a
    stop between the moves leaves a folder without meta.json, that is, not prepared.
    """
    partial = out.with_name(f"{out.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    try:
        meta = {"name": out.name, "source": settings["source"], "settings": settings,
                "python": platform.python_version(), "tiktoken": version("tiktoken")}
        meta |= build(root, paths, partial, settings["vocab_size"])
        meta["digests"] = digests(partial)
        (partial / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        out.mkdir(exist_ok=True)
        (out / "meta.json").unlink(missing_ok=True)
        for name in [*FILES, "meta.json"]:
            (partial / name).replace(out / name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return meta


def prepare_stdlib(out: Path, vocab_size: int = 2048) -> dict:
    """The meta of folder out, made from this Python's library unless it is there and right."""
    if not 257 <= vocab_size <= 65536:
        raise ValueError(f"--vocab is {vocab_size}, allowed is 257..65536, as ids are uint16")
    python = platform.python_version()
    settings = {"source": f"the .py files of the Python {python} library, without its tests",
                "vocab_size": vocab_size, "pattern": PATTERN, "seed": SEED,
                "val_percent": VAL_PERCENT, "skip_folders": SKIP_FOLDERS}
    # a run that was killed leaves this behind
    shutil.rmtree(out.with_name(f"{out.name}.partial"), ignore_errors=True)
    reason = why_redo(out, settings)
    if not reason:
        print(f"{out} is ready, nothing to do")
        return load(out).meta
    print(f"make {out} | vocabulary {vocab_size} | {reason}")
    root = Path(sysconfig.get_paths()["stdlib"])
    return prepare(root, list_stdlib(root), out, settings)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Turn text into token files for training.")
    parser.add_argument("source", nargs="?", default="stdlib", choices=["stdlib"],
                        help="the text: stdlib, this Python's own library (default stdlib)")
    parser.add_argument("--name", help="name of the folder in data/ (default: as the source)")
    parser.add_argument("--vocab", type=int, default=2048, help="tokens, 257..65536 (default 2048)")
    args = parser.parse_args(argv)
    name = args.source if args.name is None else args.name
    try:
        if not re.fullmatch(r"\w[\w-]*", name):
            raise ValueError(f"--name is {name!r}, use letters, digits, _ and -")
        prepare_stdlib(Path(__file__).parent / name, args.vocab)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted: run the same command again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
