"""
Turns text into token files for training.

    python data/prepare.py                            # this Python's own library -> data/stdlib/
    python data/prepare.py texts/                     # your own files -> data/texts/
    python data/prepare.py fineweb-edu --vocab 8192   # FineWeb-Edu -> data/fineweb-edu/

A folder data/<name>/ holds
    train.bin, val.bin   token ids, raw little-endian uint16; every document ends with end-of-text
    vocab.tiktoken       the tokenizer, one "base64-of-the-token rank" per line
    meta.json            counts, settings, digests; written last: without it nothing counts
The same text and settings give the same bytes. Text is streamed, a document or a part of one at a
time, and read once for each purpose: digests of your own files, counting, learning, encoding.

Rules for your own files
    .txt is one document; .jsonl has one a line: "text", or "prompt" / "question", a line end, and
    "completion" / "answer"; both may end in .gz. Of a folder, all such files below it, by name;
    links to other folders are not followed.
    UTF-8 only: other bytes are refused, with the file's name. A byte order mark is dropped, every
    line end becomes \\n, half a surrogate pair in JSON becomes U+FFFD. Empty documents are left
    out and counted. The text <|endoftext|> inside a document stays plain text.
    Held out: the files of --val; else 5 % of the documents (about 20 million characters, if that
    is less), by a hash of a document's first part, so that copies fall on one side; where these
    would be fewer than 10, the last 5 % of all the text. Text without enough repetition for the
    vocabulary, or with nothing for one side, is refused.
"""

import argparse
import base64
import gzip
import hashlib
import heapq
import http.client
import itertools
import json
import os
import platform
import re
import shutil
import sys
import sysconfig
import time
import urllib.error
import urllib.request
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np
import tiktoken
from tqdm import tqdm

# text is cut into words, and pairs never merge across them: letters, up to three digits,
# punctuation (each with at most one space in front), line ends, other white space. Python's `re`
# cuts for learning, tiktoken's engine for encoding. Their Unicode tables differ for a few rare
# letters, which does no harm: every character still falls in one class, so no text is lost.
PATTERN = r" ?[^\W\d_]+| ?\d{1,3}| ?(?:[^\s\w]|_)+|\s*[\r\n]+|\s+(?!\S)|\s+"
EOT_TEXT = "<|endoftext|>"
SEED = 1337
SKIP_FOLDERS = ["__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"]
MIN_FILES, MIN_BYTES = 200, 2_000_000  # a standard library with less is not complete
FILES = ["train.bin", "val.bin", "vocab.tiktoken"]
PART_CHARS = 1 << 16       # a document longer than this is read and encoded in parts
BATCH_CHARS = 1 << 22      # encoded at once, over all cores
MAX_WORD = 256             # characters that a word is cut to for learning
SAMPLE_CHARS = 32_000_000  # of the text, for learning the vocabulary
STDLIB_VAL_SHARE = 0.12    # in Python 3.10-3.13 over 64 files with 192 tokens
VAL_SHARE, VAL_CHARS, MIN_HELD_OUT = 0.05, 20_000_000, 10
LARGE_TEXT = 20_000_000     # characters, from which on 8192 tokens are learned by default
GPT2_EOT = 50256

# FineWeb-Edu as GPT-2 ids, by the llm.c project, licence ODC-By: shard 0 is validation, 1 to 1001
# are for training, of 100 million tokens each but the last
HUB = "https://huggingface.co/datasets/karpathy/fineweb-edu-100B-gpt2-token-shards/resolve/main"
SHARD_TOKENS, SHARD_HEADER, SHARD_MAGIC, LAST_SHARD = 100_000_000, 1024, 20240520, 1001
FINEWEB_VAL_TOKENS = 4_000_000
TRIES = 6  # without a byte of progress, waiting 1, 2, 4 .. s between them


# ----------------------------------------------------------------------------------------------
# the vocabulary


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


def fraction(text: str, purpose: str) -> float:
    """A number in [0, 1) that follows from the text: decides what is held out, and sampled."""
    digest = hashlib.sha256(f"{SEED}/{purpose}/{text}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2 ** 48


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> dict:
    """{"pattern": str, "ranks": text of vocab.tiktoken, "eot": int, "vocab_size": int}."""
    words = Counter()
    for text in texts:
        # no word needs more than MAX_WORD characters to be learned from: a line of DNA is one word
        words.update(word[:MAX_WORD] for word in re.findall(PATTERN, text))
    ranks = train_bpe({word.encode(): count for word, count in words.items()}, vocab_size - 257)
    return {"pattern": PATTERN, "ranks": ranks_text(ranks), "eot": vocab_size - 1,
            "vocab_size": vocab_size}


def ranks_text(ranks: dict[bytes, int]) -> str:
    return "".join(f"{base64.b64encode(token).decode()} {i}\n" for token, i in ranks.items())


def gpt2_tokenizer() -> dict:
    """GPT-2's vocabulary in the same form; tiktoken downloads it once, or finds it in its cache."""
    try:
        enc = tiktoken.get_encoding("gpt2")
    except Exception as error:  # of the network, by whatever library tiktoken uses
        raise ValueError(f"tiktoken could not download GPT-2's vocabulary "
                         f"({type(error).__name__}): try again, set TIKTOKEN_CACHE_DIR to a folder "
                         "that has it, or learn a vocabulary with --vocab 8192") from error
    return {"pattern": enc._pat_str, "ranks": ranks_text(enc._mergeable_ranks),
            "eot": enc.eot_token, "vocab_size": enc.n_vocab}


def encoding(tokenizer: dict) -> tiktoken.Encoding:
    """The encoder for a tokenizer; its encode_ordinary takes a literal <|endoftext|> for text."""
    lines = tokenizer["ranks"].splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(str.split, lines)}
    return tiktoken.Encoding("bpe", pat_str=tokenizer["pattern"], mergeable_ranks=ranks,
                             special_tokens={EOT_TEXT: tokenizer["eot"]},
                             explicit_n_vocab=tokenizer["vocab_size"])


# ----------------------------------------------------------------------------------------------
# where text comes from: documents, in parts


class Part(NamedTuple):
    text: str   # at most about PART_CHARS characters
    ends: bool  # the document ends with it


@dataclass(frozen=True)
class Source:
    """Text to prepare. `parts` starts from the front at each call."""

    about: str
    parts: Callable[[], Iterator[Part]]
    settings: dict                                     # all else that decides the result
    val_parts: Callable[[], Iterator[Part]] | None = None  # else some of `parts` is held out
    val_share: float = VAL_SHARE


def cut(text: str) -> Iterator[Part]:
    """A document in memory as parts; of an empty one, one empty part."""
    for i in range(0, max(1, len(text)), PART_CHARS):
        yield Part(text[i:i + PART_CHARS], i + PART_CHARS >= len(text))


def list_stdlib(root: Path) -> list[Path]:
    """The .py files under root, sorted; ValueError if it is no complete library."""
    paths = [path for path in root.rglob("*.py")
             if not set(path.relative_to(root).parts) & set(SKIP_FOLDERS)]
    n_bytes = sum(path.stat().st_size for path in paths)
    if len(paths) < MIN_FILES or n_bytes < MIN_BYTES:
        raise ValueError(f"{root} has {len(paths)} .py files of {n_bytes:,} bytes, {MIN_FILES} of "
                         f"{MIN_BYTES:,} are needed: use a Python with its library as plain files")
    return sorted(paths, key=lambda path: path.relative_to(root).as_posix())


def read_library(paths: list[Path]) -> Iterator[Part]:
    """The files with line ends \\n; one that is not UTF-8 counts as empty."""
    for path in paths:
        try:
            yield from cut(path.read_bytes().decode("utf-8").replace("\r\n", "\n"))
        except UnicodeDecodeError:
            yield Part("", True)


def walk(folder: Path) -> Iterator[Path]:
    """All files below a folder; OSError for a part of it that may not be read."""
    def refuse(error: OSError):
        raise error

    for parent, _, names in os.walk(folder, onerror=refuse):
        yield from (Path(parent, name) for name in names)


def list_files(names: list[str]) -> list[Path]:
    """The .txt and .jsonl files, plain or .gz, that names are or hold; ValueError for another."""
    suffixes = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz")
    paths = []
    for word in names:
        name = Path(word)
        if not word:
            raise ValueError("one of the names is empty: give stdlib, fineweb-edu, or files and "
                             "folders")
        if not name.exists():
            raise ValueError(f"there is no {name}: give stdlib, fineweb-edu, or files and folders")
        found = sorted(walk(name)) if name.is_dir() else [name]
        found = [p for p in found if p.name.lower().endswith(suffixes) and p.is_file()]
        if not found:
            raise ValueError(f"{name} {'has no files' if name.is_dir() else 'is no file'} of a "
                             f"known kind: {', '.join(suffixes)}")
        paths += found
    return paths


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """A text to read, plain or .gz, after its byte order mark; ValueError for what goes wrong
    meanwhile, with the file's name."""
    packed = path.name.lower().endswith(".gz")
    try:
        with (gzip.open if packed else open)(path, "rt", encoding="utf-8-sig") as file:
            yield file
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte 0x{error.object[error.start]:02x}): "
                         "convert it, or leave it out") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a whole gzip file ({error}): fetch or pack it "
                         "again") from error
    except ValueError as error:
        raise ValueError(f"{path}, {error}") from error


def is_jsonl(path: Path) -> bool:
    return path.name.lower().removesuffix(".gz").endswith(".jsonl")


def read_files(paths: list[Path]) -> Iterator[Part]:
    """The documents of .txt and .jsonl files."""
    for path in paths:
        with open_text(path) as file:
            yield from (read_jsonl if is_jsonl(path) else read_txt)(file)


def read_txt(file) -> Iterator[Part]:
    """One document, cut after line ends where there are any."""
    text = file.read(PART_CHARS)
    if not text:
        yield Part("", True)
    while text:
        text += file.readline(PART_CHARS)
        following = file.read(PART_CHARS)
        yield Part(text, not following)
        text = following


def read_jsonl(file) -> Iterator[Part]:
    """A document a line; lines of white space are skipped."""
    for number, line in enumerate(file, start=1):
        if line.strip():
            try:
                text = record_text(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"line {number}: {error}") from error
            # subtle: JSON can spell half a surrogate pair, which no UTF-8 can
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            yield from cut(re.sub("\r\n?", "\n", text))


def record_text(record: dict) -> str:
    """The document in one JSON record."""
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__} where an object with a text is expected")

    def first(*names: str) -> str | None:
        return next((record[name] for name in names if isinstance(record.get(name), str)), None)

    question, answer = first("prompt", "question"), first("completion", "answer")
    if (text := first("text")) is not None:
        return text
    if question is not None and answer is not None:
        return f"{question}\n{answer}"
    raise ValueError('neither "text" nor "prompt" and "completion" (or "question" and "answer") '
                     f"as strings, only {', '.join(map(repr, record)) or 'nothing'}")


# ----------------------------------------------------------------------------------------------
# what is held out


class Survey(NamedTuple):
    n_documents: int  # with text
    n_empty: int      # left out: no text, or (of a library) not UTF-8
    n_chars: int


def survey(source: Source) -> Survey:
    """Counts all text; reads it once."""
    n_documents = n_empty = n_chars = 0
    parts = itertools.chain(source.parts(), source.val_parts() if source.val_parts else ())
    for part in tqdm(parts, desc="count", unit="part", leave=False, disable=None):
        n_chars += len(part.text)
        n_empty += not part.text
        n_documents += part.ends and bool(part.text)
    return Survey(n_documents, n_empty, n_chars)


def split(source: Source, found: Survey) -> Iterator[tuple[str, Part]]:
    """("train" or "val", part) for all text, in order; the rule is at the top of this file.

    Two documents "abcdef", "gh" with a val_share of 0.5 are few, so that the last 4 of 8 characters
    are held out: train gets "abcd", val gets "ef" and "gh", three documents in all.
    """
    share = min(source.val_share, VAL_CHARS / max(1, found.n_chars))
    few = found.n_documents * share < MIN_HELD_OUT
    left = found.n_chars - round(found.n_chars * share)  # characters before a held-out tail
    side, first = "train", True
    for part in source.parts():
        if not part.text:
            continue
        if source.val_parts is not None:
            yield "train", part
        elif few:
            head, tail = part.text[:left], part.text[left:]
            left -= len(head)
            if head:
                yield "train", Part(head, part.ends or left == 0)
            if tail:
                yield "val", Part(tail, part.ends)
        else:
            if first:
                side = "val" if fraction(part.text, "held out") < share else "train"
            yield side, part
        first = part.ends
    if source.val_parts is not None:
        yield from (("val", part) for part in source.val_parts() if part.text)


# ----------------------------------------------------------------------------------------------
# token files


class Dataset(NamedTuple):
    train: np.memmap  # (n_tokens,) uint16
    val: np.memmap    # (n_tokens,) uint16
    tokenizer: dict   # what `encoding` takes
    meta: dict        # meta.json


def write_ids(file, ids: list[int] | np.ndarray, vocab_size: int) -> None:
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
    source = {"stdlib": "", "fineweb-edu": " fineweb-edu"}.get(folder.name,
                                                               f" FILES --name {folder.name}")
    redo = f"run python data/prepare.py{source}"
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


def file_digest(path: Path) -> str:
    """The sha256 of a file, in hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def digests(folder: Path) -> dict[str, str]:
    return {name: file_digest(folder / name) for name in FILES}


def why_redo(folder: Path, settings: dict) -> str:
    """Why the folder is not what settings would give, or "" if it is."""
    try:
        meta = load(folder).meta
    except ValueError as error:
        return str(error) if (folder / "meta.json").exists() else "not prepared"
    if meta.get("settings") != settings:
        return "made with other settings or by another Python"
    return "" if meta.get("digests") == digests(folder) else "a file does not match its digest"


def encode(source: Source, found: Survey, tokenizer: dict, folder: Path) -> dict:
    """Write train.bin and val.bin, reading the text once more; gives their counts."""
    enc, n_threads = encoding(tokenizer), os.cpu_count() or 1
    counts = {f"{side}_{what}": 0 for side in ("train", "val") for what in ("tokens", "documents")}
    bar = tqdm(total=found.n_chars, desc="encode", unit="char", unit_scale=True, disable=None)
    with open(folder / "train.bin", "wb") as train, open(folder / "val.bin", "wb") as val, bar:
        files = {"train": train, "val": val}
        for batch in batches(split(source, found)):
            texts = [part.text for _, part in batch]
            # tiktoken lets go of Python's lock while it encodes, so threads use all cores
            encoded = enc.encode_ordinary_batch(texts, num_threads=n_threads)
            for (side, part), ids in zip(batch, encoded):
                ids += [enc.eot_token] * part.ends
                write_ids(files[side], ids, enc.n_vocab)
                counts[f"{side}_tokens"] += len(ids)
                counts[f"{side}_documents"] += part.ends
            bar.update(sum(map(len, texts)))
    return counts


def batches(parts: Iterator[tuple[str, Part]]) -> Iterator[list[tuple[str, Part]]]:
    """Lists of BATCH_CHARS characters, or a part more; the last has what is left."""
    batch, n_chars = [], 0
    for side, part in parts:
        batch.append((side, part))
        n_chars += len(part.text)
        if n_chars >= BATCH_CHARS:
            yield batch
            batch, n_chars = [], 0
    yield batch


def learn(source: Source, found: Survey, vocab_size: int) -> dict:
    """A vocabulary from the text to train on, or from a sample of its parts if there is much."""
    share = SAMPLE_CHARS / max(1, found.n_chars)
    parts = tqdm(split(source, found), desc="learn", unit="part", leave=False, disable=None)
    return train_tokenizer((part.text for side, part in parts if side == "train" and
                            (share >= 1 or fraction(part.text, "sample") < share)), vocab_size)


def build(source: Source, vocab: int | str | None, folder: Path) -> dict:
    """Counts and tokenizer for meta.json, after writing the token files to folder."""
    start = time.perf_counter()
    found = survey(source)
    print(f"read      {found.n_documents:,} documents, {found.n_chars / 1e6:.1f}M characters, "
          f"{found.n_empty} empty | {time.perf_counter() - start:.1f} s")
    if vocab is None:
        vocab = 8192 if found.n_chars >= LARGE_TEXT else 2048
        print(f"vocab     {vocab}, the default for so much text")
    start = time.perf_counter()
    try:
        tokenizer = gpt2_tokenizer() if vocab == "gpt2" else learn(source, found, vocab)
    except ValueError as error:
        raise ValueError(f"{source.about}: {error}") from error
    print(f"learn     {tokenizer['vocab_size']} tokens | {time.perf_counter() - start:.1f} s")
    start = time.perf_counter()
    counts = encode(source, found, tokenizer, folder)
    seconds = time.perf_counter() - start
    for side in ("train", "val"):
        if not counts[f"{side}_tokens"]:
            raise ValueError(f"there is no text for {side}.bin in {source.about}: give more text, "
                             "or other files for --val")
    print(f"encode    {counts['train_tokens']:,} train and {counts['val_tokens']:,} val tokens | "
          f"{seconds:.1f} s, {found.n_chars / 1e6 / seconds:.1f}M characters/s")
    return {"tokenizer": tokenizer, "empty_documents": found.n_empty} | counts


def prepare(out: Path, about: str, settings: dict, build_files: Callable[[Path], dict]) -> dict:
    """
    The meta of folder out, made by build_files unless what is there has the same settings.
    It is written beside out, then moved: a run that fails leaves older files alone, and only a
    stop between the moves leaves a folder without meta.json, that is, not prepared.
    """
    out = out.resolve()  # a link may lead to another disk; the moves below stay on one
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: remove it, or choose another --name")
    remove_leftovers(out)
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    reason = why_redo(out, settings)
    if not reason:
        print(f"{out} is ready, nothing to do")
        return load(out).meta
    print(f"make      {out} from {about} | {reason}")
    partial.mkdir(parents=True)
    try:
        meta = {"name": out.name, "source": about, "settings": settings,
                "python": platform.python_version(), "tiktoken": version("tiktoken")}
        meta |= build_files(partial)
        (partial / "vocab.tiktoken").write_bytes(meta["tokenizer"].pop("ranks").encode())
        meta["tokenizer"]["file"] = "vocab.tiktoken"
        meta["digests"] = digests(partial)
        (partial / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        out.mkdir(exist_ok=True)
        (out / "meta.json").unlink(missing_ok=True)
        for name in [*FILES, "meta.json"]:
            (partial / name).replace(out / name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return meta


def remove_leftovers(out: Path) -> None:
    """Delete what a killed run left beside out; ValueError if that run is alive."""
    for left in out.parent.glob(f".{out.name}.partial-*"):
        number = left.name.rpartition("-")[2]
        if number.isdecimal() and is_running(int(number)):
            raise ValueError(f"another prepare.py (process {number}) is making {out}: wait for it, "
                             f"choose another --name, or, if it is none, delete {left}")
        shutil.rmtree(left, ignore_errors=True)


def is_running(process: int) -> bool:
    """Whether a process of that number exists; not known on Windows, where it counts as none."""
    if os.name != "posix" or process == os.getpid():
        return False
    try:
        os.kill(process, 0)
        return True
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True


def prepare_text(out: Path, source: Source, vocab: int | str | None) -> dict:
    """The meta of folder out with the text of a source, read, split and encoded here."""
    settings = {"vocab": vocab, "pattern": PATTERN, "seed": SEED, "val_share": source.val_share}
    return prepare(out, source.about, settings | source.settings,
                   lambda folder: build(source, vocab, folder))


def prepare_stdlib(out: Path, vocab: int | str = 2048) -> dict:
    """The meta of folder out, made from this Python's library."""
    python = platform.python_version()
    paths = list_stdlib(Path(sysconfig.get_paths()["stdlib"]))
    source = Source(f"the .py files of the Python {python} library, without its tests",
                    lambda: read_library(paths), {"python": python, "skipped": SKIP_FOLDERS},
                    val_share=STDLIB_VAL_SHARE)
    return prepare_text(out, source, vocab)


def prepare_files(out: Path, names: list[str], val: list[str], vocab: int | str | None) -> dict:
    """The meta of folder out, made from a user's own files."""
    paths, val_paths = list_files(names), list_files(val)
    everything = [*paths, *val_paths]
    twice = [str(p) for p, n in Counter(p.resolve() for p in everything).items() if n > 1]
    if twice:
        raise ValueError(f"{twice[0]} is given twice: name each file once, to train on or for "
                         "--val")
    files = {side: [[path.name, file_digest(path)] for path in of_side]
             for side, of_side in (("train", paths), ("val", val_paths))}
    about = ", ".join(path.name for path in everything[:3])
    if len(everything) > 3:
        about += f" and {len(everything) - 3} more"
    source = Source(about, lambda: read_files(paths), {"files": files},
                    (lambda: read_files(val_paths)) if val else None)
    return prepare_text(out, source, vocab)


# ----------------------------------------------------------------------------------------------
# FineWeb-Edu


def fetch(url: str, path: Path, n_bytes: int) -> None:
    """Make path hold the first n_bytes of url, going on from what it holds.

    Cut connections, time-outs and busy servers (408, 429, 5xx) are tried again; ValueError for
    what will not go away, and after TRIES in a row without a byte. What came is kept.
    """
    idle, have = 0, path.stat().st_size if path.exists() else 0
    while have < n_bytes:
        asked, before = "", have
        try:
            receive(url, path, have, n_bytes)
            reason = "the connection was cut"
        except urllib.error.HTTPError as error:
            reason = f"answered {error.code} {error.reason}"
            if error.code not in (408, 429, 500, 502, 503, 504):
                raise ValueError(f"{url} {reason}: has the data set moved?") from error
            asked = error.headers.get("Retry-After", "")
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError,
                TimeoutError) as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
        have = path.stat().st_size if path.exists() else 0
        idle = 0 if have > before else idle + 1
        if idle == TRIES:
            raise ValueError(f"{url}: {TRIES} tries without a byte ({reason}); what came before is "
                             "kept: check the network, and run the same command again")
        if have < n_bytes:
            wait = min(int(asked), 300) if asked.isdecimal() else 2 ** max(0, idle - 1)
            print(f"{path.name}: {reason}, again in {wait} s", file=sys.stderr)
            time.sleep(wait)


def receive(url: str, path: Path, have: int, n_bytes: int) -> None:
    """Append bytes [have, n_bytes) of url to path, or as many of them as come."""
    headers = {"Range": f"bytes={have}-{n_bytes - 1}", "User-Agent": "data/prepare.py"}
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        if answer.headers.get_content_type() == "text/html":
            raise ValueError(f"{url} answered with a web page: open it in a browser to see why")
        total, skip = answer.headers.get("Content-Length", ""), have
        if answer.status == 206:
            content_range = answer.headers.get("Content-Range", "")
            found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", content_range)
            if found is None or int(found[1]) != have:
                raise ValueError(f"{url} answered with the range {content_range!r}, not from byte "
                                 f"{have} on: try again later")
            total, skip = found[2], 0
        if total.isdecimal() and int(total) < n_bytes:
            raise ValueError(f"{url} has {total} bytes, {n_bytes} are needed: this is no shard of "
                             "GPT-2 tokens")
        bar = tqdm(total=n_bytes, initial=have, desc=path.name.split(".")[0], unit="B",
                   unit_scale=True, disable=None)
        with open(path, "ab") as file, bar:
            # a server that knows no ranges begins at the front, and does not stop in time
            while skip and (block := read_some(answer, skip)):
                skip -= len(block)
            while have < n_bytes and (block := read_some(answer, n_bytes - have)):
                file.write(block)
                have += len(block)
                bar.update(len(block))


def read_some(answer, n_bytes: int) -> bytes:
    """Some of the next n_bytes, or none at the end. ConnectionError for any fault on the way: an
    OSError of the disk, to which they are written, must not look like one."""
    try:
        return answer.read(min(n_bytes, 1 << 20))
    except OSError as error:
        raise ConnectionError(str(error) or type(error).__name__) from error


class Shard(NamedTuple):
    path: Path
    n_tokens: int  # of its front; the file may hold more

    def blocks(self) -> Iterator[np.ndarray]:
        """Its ids, uint16, some at a time."""
        ids = np.memmap(self.path, "<u2", "r", offset=SHARD_HEADER, shape=(self.n_tokens,))
        for i in range(0, self.n_tokens, 1 << 20):
            yield np.array(ids[i:i + (1 << 20)])


def fetch_shard(number: int, n_tokens: int, folder: Path) -> Shard:
    """The first n_tokens of a shard, or all. A file that is not whole has the name .part.

    Layout (llm.c): 256 int32 (magic, version 1, number of tokens, zeros), then uint16 ids.
    """
    name = f"edu_fineweb_{'train' if number else 'val'}_{number:06d}.bin"
    url, whole = f"{HUB}/{name}", folder / name
    path = whole if whole.exists() else folder / f"{name}.part"
    if path != whole:
        fetch(url, path, SHARD_HEADER)
    header = np.fromfile(path, dtype="<i4", count=3).tolist()
    if header[:2] != [SHARD_MAGIC, 1] or header[2] <= 0:
        if path != whole:
            path.unlink()
        raise ValueError(f"{url if path != whole else path} is no shard of GPT-2 tokens: it begins "
                         f"with {header}, not with [{SHARD_MAGIC}, 1, a count]")
    n_tokens, n_bytes = min(n_tokens, header[2]), SHARD_HEADER + 2 * header[2]
    if path != whole:
        fetch(url, path, SHARD_HEADER + 2 * n_tokens)
    size = path.stat().st_size
    if size > n_bytes or (path == whole and size < n_bytes):
        raise ValueError(f"{path} has {size} bytes, by its header {n_bytes}: delete it")
    shard = Shard(path.replace(whole) if size == n_bytes else path, n_tokens)
    highest = max(int(block.max()) for block in shard.blocks())
    if highest > GPT2_EOT:
        raise ValueError(f"{shard.path} has id {highest}, GPT-2 ends at {GPT2_EOT}: delete it")
    return shard


def read_shards(shards: list[Shard], enc: tiktoken.Encoding) -> Iterator[Part]:
    """The documents of consecutive shards, decoded; each begins with end-of-text."""
    ids = np.empty(0, dtype=np.uint16)
    for shard in shards:
        for block in shard.blocks():
            head, *documents = np.split(block, np.flatnonzero(block == GPT2_EOT))
            ids = np.concatenate((ids, head))
            for document in documents:
                if len(ids):
                    yield from cut(enc.decode(ids.tolist()))
                ids = document[1:]
    if len(ids):
        yield from cut(enc.decode(ids.tolist()))


def copy_ids(shards: list[Shard], path: Path) -> dict:
    """Write the ids of consecutive shards as they are, the first end-of-text moved to the end."""
    n_tokens = n_documents = 0
    with open(path, "wb") as file:
        for shard in shards:
            for block in shard.blocks():
                if n_tokens == 0 and block[0] == GPT2_EOT:
                    block = block[1:]
                write_ids(file, block, GPT2_EOT + 1)
                n_tokens += len(block)
                n_documents += int((block == GPT2_EOT).sum())
        if len(block) == 0 or block[-1] != GPT2_EOT:
            write_ids(file, [GPT2_EOT], GPT2_EOT + 1)
            n_tokens, n_documents = n_tokens + 1, n_documents + 1
    return {f"{path.stem}_tokens": n_tokens, f"{path.stem}_documents": n_documents}


def prepare_fineweb(out: Path, n_tokens: int, vocab: int | str) -> dict:
    """The meta of folder out with n_tokens GPT-2 tokens of FineWeb-Edu, kept, or learned anew."""
    if n_tokens > SHARD_TOKENS * LAST_SHARD:
        raise ValueError(f"{n_tokens:,} tokens are asked for, {LAST_SHARD} shards of "
                         f"{SHARD_TOKENS:,} are there")
    about = f"FineWeb-Edu, {n_tokens / 1e6:g}M GPT-2 tokens"
    raw = out.with_name(f"{out.name}-shards")

    def build_files(folder: Path) -> dict:
        tokenizer = gpt2_tokenizer()
        raw.mkdir(exist_ok=True)
        sizes = [min(SHARD_TOKENS, n_tokens - i) for i in range(0, n_tokens, SHARD_TOKENS)]
        val = [fetch_shard(0, min(FINEWEB_VAL_TOKENS, n_tokens), raw)]
        train = [fetch_shard(number, n, raw) for number, n in enumerate(sizes, start=1)]
        print(f"fetched   to {raw}, kept for other settings: delete it if you need the space")
        if vocab == "gpt2":
            counts = copy_ids(train, folder / "train.bin") | copy_ids(val, folder / "val.bin")
            return {"tokenizer": tokenizer} | counts
        enc = encoding(tokenizer)
        source = Source(about, lambda: read_shards(train, enc), {}, lambda: read_shards(val, enc))
        return build(source, vocab, folder)

    settings = {"address": HUB, "tokens": n_tokens, "vocab": vocab, "pattern": PATTERN,
                "seed": SEED}
    return prepare(out, about, settings, build_files)


# ----------------------------------------------------------------------------------------------
# the command


def vocabulary(word: str) -> int | str:
    if word != "gpt2" and not (word.isdecimal() and 257 <= int(word) <= 65536):
        raise argparse.ArgumentTypeError(f"{word} is given, allowed: gpt2, or 257 to 65536 (ids "
                                         "are uint16)")
    return word if word == "gpt2" else int(word)


def positive(word: str) -> int:
    if not word.isdecimal() or int(word) == 0:
        raise argparse.ArgumentTypeError(f"{word} is given, allowed: 1, 2, 3, ..")
    return int(word)


def default_name(names: list[str]) -> str:
    """data/<name> for own files: the name of the one file or folder, or of the files' folder."""
    path = Path(os.path.abspath(names[0]))
    path = path if len(names) == 1 else path.parent
    return re.sub(r"[^\w-]+", "-", path.name.split(".")[0]).strip("-") or "text"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="python data/prepare.py [SOURCE ..] [options; --help lists them]",
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("source", nargs="*", default=["stdlib"], metavar="SOURCE",
        help="stdlib (the default), fineweb-edu, or files and folders")
    add("--name", help="the folder in data/ (default: as the source, or as the file or folder)")
    add("--vocab", type=vocabulary, metavar="N|gpt2",
        help="learn N tokens, or take GPT-2's (default: stdlib 2048, fineweb-edu gpt2; own files "
             "8192 from 20M characters on, else 2048)")
    add("--val", nargs="+", default=[], metavar="FILE", help="own files to hold out")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--shards", type=positive, metavar="N",
                        help="of FineWeb-Edu, 100M tokens and 200 MB each (default 2)")
    amount.add_argument("--tokens", type=positive, metavar="N", help="of FineWeb-Edu, instead")
    args = parser.parse_args(argv)
    args.own = args.source not in (["stdlib"], ["fineweb-edu"])
    if args.own and {"stdlib", "fineweb-edu"} & set(args.source):
        parser.error("stdlib and fineweb-edu stand alone: prepare other files apart")
    if args.val and not args.own:
        parser.error("--val is for your own files, and stands behind them: FILES --val FILES")
    if (args.shards or args.tokens) and args.source != ["fineweb-edu"]:
        parser.error("--shards and --tokens are for fineweb-edu")
    if args.name is None:
        args.name = default_name(args.source) if args.own else args.source[0]
    if not re.fullmatch(r"\w[\w-]*", args.name):
        parser.error(f"--name is {args.name!r}, allowed: letters, digits, _ and -")
    if args.name in ("stdlib", "fineweb-edu", "fineweb-edu-shards") and [args.name] != args.source:
        parser.error(f"--name {args.name} is for that source: choose another --name")
    return args


def never_fail_to_print() -> None:
    """A name or a text that the terminal cannot show must not stop the rest."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def main(argv: list[str] | None = None) -> int:
    never_fail_to_print()
    args = parse_args(argv)
    out = Path(__file__).parent / args.name
    try:
        if args.source == ["fineweb-edu"]:
            n_tokens = args.tokens or SHARD_TOKENS * (args.shards or 2)
            prepare_fineweb(out, n_tokens, args.vocab or "gpt2")
        elif args.own:
            prepare_files(out, args.source, args.val, args.vocab)
        else:
            prepare_stdlib(out, args.vocab or 2048)
        if args.own:
            print(f"train it: python train.py --ec-mtp --data {args.name} --out out-{args.name}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted: run the same command again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
