"""
Proves that your own files become the documents that the rules in data/prepare.py say, whatever
their encoding and packing, and that a file which cannot be used is named in one line.
"""

import gzip
import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from data import prepare

CACHE = Path(os.environ.get("TIKTOKEN_CACHE_DIR", "")) / "6d1cbeee0f20b3d9449abfede4726ed8212e3aee"


def documents(*paths: Path) -> list[str]:
    out = [""]
    for part in prepare.read_files(list(paths)):
        out[-1] += part.text
        out += [""] * part.ends
    assert out.pop() == ""
    return out


def lines(*records) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


@pytest.mark.parametrize("content, expected", [
    (b"plain\ntext", ["plain\ntext"]), (b"", [""]), (b"\xef\xbb\xbfmark", ["mark"]),
    (b"dos\r\nold\rmac\n", ["dos\nold\nmac\n"]), (b"nul\x00 stays", ["nul\x00 stays"]),
    (b"<|endoftext|> stays text", ["<|endoftext|> stays text"]),
    ("one line \u2028 é".encode(), ["one line \u2028 é"])])
@pytest.mark.parametrize("packed", [False, True])
def test_a_txt_file_is_one_document(tmp_path, content, expected, packed):
    path = tmp_path / ("a.txt.gz" if packed else "a.txt")
    path.write_bytes(gzip.compress(content) if packed else content)
    assert documents(path) == expected


@pytest.mark.parametrize("record, expected", [
    ({"text": "a", "prompt": "b", "completion": "c"}, "a"),
    ({"prompt": "b", "completion": "c"}, "b\nc"), ({"question": "q", "answer": "a"}, "q\na"),
    ({"question": "q", "completion": "c", "id": 1}, "q\nc"),
    ({"text": None, "prompt": None, "question": "q", "answer": "a"}, "q\na"), ({"text": ""}, ""),
    ({"text": "x\r\ny\rz"}, "x\ny\nz"), ({"text": "half \ud83d pair"}, "half \ufffd pair"),
    ({"text": "whole \ud83d\ude42 pair"}, "whole 🙂 pair")])
def test_a_jsonl_line_is_one_document(tmp_path, record, expected):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + lines(record) + b"\n  \r\n" + lines({"text": "end"}))
    assert documents(path) == [expected, "end"]


def test_the_last_suffix_tells_the_kind(tmp_path):
    (tmp_path / "a.jsonl.txt").write_text("plain")
    (tmp_path / "b.txt.JSONL.gz").write_bytes(gzip.compress(lines({"text": "packed"})))
    (tmp_path / "c.TXT").write_text("loud")
    (tmp_path / "d.txt.GZ").write_bytes(gzip.compress(b"both"))
    paths = prepare.list_files([str(tmp_path)])
    assert documents(*paths) == ["plain", "packed", "loud", "both"]


def test_long_documents_come_in_parts_that_join_to_the_same_text(tmp_path, monkeypatch):
    text = "".join(f"line {i} é🙂\n" for i in range(300)) + "x" * 500
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "b.jsonl").write_bytes(lines({"text": text}, {"text": "short"}))
    for n in (1, 7, 64, 10_000):
        monkeypatch.setattr(prepare, "PART_CHARS", n)
        assert documents(tmp_path / "a.txt", tmp_path / "b.jsonl") == [text, text, "short"]
        parts = list(prepare.read_files([tmp_path / "a.txt", tmp_path / "b.jsonl"]))
        assert max(len(part.text) for part in parts) <= 2 * n
    monkeypatch.setattr(prepare, "PART_CHARS", 64)
    *ended, _ = [p.text for p in prepare.read_files([tmp_path / "a.txt"]) if "line" in p.text]
    assert all(text.endswith("\n") for text in ended)


@pytest.mark.parametrize("name, content, message", [
    ("a.txt", b"caf\xe9", r"a.txt is not UTF-8 \(byte 0xe9\)"),
    ("a.txt", "ascii".encode("utf-16"), r"a.txt is not UTF-8 \(byte 0xff\)"),
    ("a.txt.gz", b"not packed", "a.txt.gz is not a whole gzip file"),
    ("a.txt.gz", gzip.compress(b"text" * 9999, mtime=0)[:-20], "a.txt.gz is not a whole gzip file"),
    ("a.txt.gz", gzip.compress(b"a", mtime=0)[:10] + b"\xff" * 30, "a.txt.gz is not a whole gzip"),
    ("a.jsonl", b'{"text": "a"}\n{"text": \n', "a.jsonl, line 2: Expecting value"),
    ("a.jsonl", b'["text"]\n', "a.jsonl, line 1: a list where an object"),
    ("a.jsonl", b'{"turns": ["x"]}\n', "a.jsonl, line 1: neither .* only 'turns'"),
    ("a.jsonl", b'{"text": 3}\n', "a.jsonl, line 1: neither"),
    ("a.jsonl", b"[" * 100_000, "a.jsonl, line 1: "),
    ("a.jsonl", b'{"text": "caf\xe9"}', "a.jsonl is not UTF-8")])
def test_a_file_that_cannot_be_read_is_named_in_one_line(tmp_path, capsys, monkeypatch, name,
                                                         content, message):
    monkeypatch.setattr(prepare, "__file__", str(tmp_path / "data" / "prepare.py"))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        documents(tmp_path / name)
    assert prepare.main([str(tmp_path / name)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert not list((tmp_path / "data").glob("*"))


@pytest.mark.parametrize("content, message", [
    (b"", "no text for train.bin"), (b"abc", "too small for --vocab 2048"), (b"\n", "no text")])
def test_too_little_text_is_one_line(tmp_path, capsys, monkeypatch, content, message):
    monkeypatch.setattr(prepare, "__file__", str(tmp_path / "data" / "prepare.py"))
    (tmp_path / "a.txt").write_bytes(content)
    flags = [] if b"abc" in content else ["--vocab", "257"]
    assert prepare.main([str(tmp_path / "a.txt"), *flags]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_folders_give_all_their_files_by_name_and_others_are_refused(tmp_path):
    for name in ("b.txt", "a.jsonl.gz", "sub/c.txt.gz", "readme.md", "d.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "empty").mkdir()
    names = [path.name for path in prepare.list_files([str(tmp_path)])]
    assert names == ["a.jsonl.gz", "b.txt", "c.txt.gz"]
    for name, message in [("readme.md", "is no file of a known kind: .txt, .jsonl"),
                          ("empty", "has no files of a known kind"), ("none", "there is no")]:
        with pytest.raises(ValueError, match=message):
            prepare.list_files([str(tmp_path / name)])
    for names, val in ([["b.txt", "b.txt"], []], [["."], ["sub/../b.txt"]]):
        with pytest.raises(ValueError, match="is given twice"):
            prepare.prepare_files(tmp_path / "out", [str(tmp_path / n) for n in names],
                                  [str(tmp_path / n) for n in val], 300)


def own_files(folder: Path) -> list[Path]:
    """250 documents in four files of every kind."""
    texts = [f"document {i}: " + " ".join(f"word{i * j % 97}" for j in range(60))
             for i in range(250)]
    contents = {"a.jsonl": lines(*({"text": t} for t in texts[:100])), "b.txt": texts[100].encode(),
                "c.jsonl.gz": gzip.compress(lines(*({"text": t} for t in texts[101:249]))),
                "d.txt.gz": gzip.compress(texts[249].encode())}
    folder.mkdir()
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in contents]


def test_a_folder_that_may_not_be_read_is_not_skipped(tmp_path, monkeypatch):
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "a.txt").write_text("a")
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def refusing(path):
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)  # whoever runs the tests may read anything
    with pytest.raises(PermissionError, match="closed"):
        prepare.list_files([str(tmp_path)])


def test_the_command_on_a_folder_gives_all_its_documents(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "__file__", str(tmp_path / "data" / "prepare.py"))
    paths = own_files(tmp_path / "my texts")
    assert prepare.main([str(tmp_path / "my texts"), "--vocab", "300"]) == 0
    out = capsys.readouterr().out
    assert "train it: python train.py --ec-mtp --data my-texts --out out-my-texts" in out
    data = prepare.load(tmp_path / "data" / "my-texts")
    enc = prepare.encoding(data.tokenizer)
    got = [enc.decode(ids.tolist()).split(prepare.EOT_TEXT) for ids in (data.train, data.val)]
    assert got[0].pop() == got[1].pop() == "" and 0 < len(got[1]) < 40
    assert sorted(got[0] + got[1]) == sorted(documents(*paths))
    assert data.meta["train_documents"] == len(got[0])
    assert prepare.main([str(tmp_path / "my texts"), "--vocab", "300"]) == 0
    assert "is ready, nothing to do" in capsys.readouterr().out
    paths[1].write_text("another text")
    assert prepare.main([str(tmp_path / "my texts"), "--vocab", "300"]) == 0
    assert "made with other settings" in capsys.readouterr().out


def test_val_files_are_held_out_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "__file__", str(tmp_path / "data" / "prepare.py"))
    paths = [str(path) for path in own_files(tmp_path / "texts")]
    assert prepare.main([*paths[:3], "--val", paths[3], "--vocab", "300"]) == 0
    data = prepare.load(tmp_path / "data" / "texts")
    enc = prepare.encoding(data.tokenizer)
    assert enc.decode(data.val.tolist()) == documents(Path(paths[3]))[0] + prepare.EOT_TEXT
    assert data.meta["train_documents"] == 249


def test_parts_and_batches_change_no_document(tmp_path, monkeypatch):
    """Cut at line ends or anywhere, encoded together or apart: the text and its ends stay."""
    own_files(tmp_path / "texts")
    texts = []
    for chars in (1 << 16, 50):
        monkeypatch.setattr(prepare, "PART_CHARS", chars)
        monkeypatch.setattr(prepare, "BATCH_CHARS", 4 * chars)
        prepare.prepare_files(tmp_path / f"out{chars}", [str(tmp_path / "texts")], [], 300)
        data = prepare.load(tmp_path / f"out{chars}")
        texts.append(prepare.encoding(data.tokenizer).decode([*data.train, *data.val]))
    documents_of = [sorted(text.split(prepare.EOT_TEXT)) for text in texts]
    assert documents_of[0] == documents_of[1]


def test_memory_does_not_grow_with_the_text(tmp_path, monkeypatch):
    """Highest allocations of Python, for a text and for eight times as much; threads add noise."""
    monkeypatch.setattr(prepare, "BATCH_CHARS", 1 << 14)
    monkeypatch.setattr(prepare, "PART_CHARS", 1 << 10)
    monkeypatch.setattr(prepare, "SAMPLE_CHARS", 1 << 14)
    highest = []
    for n in (1, 8):
        text = "".join(f"word{i % 89} and {i % 31}\n" for i in range(12_000 * n))
        (tmp_path / "a.txt").write_text(text)
        (tmp_path / "b.jsonl").write_bytes(lines(*({"text": text[i:i + 500]}
                                                   for i in range(0, len(text), 500))))
        del text
        tracemalloc.start()
        prepare.prepare_files(tmp_path / "out", [str(tmp_path / "a.txt"),
                                                 str(tmp_path / "b.jsonl")], [], 300)
        highest.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert highest[1] < 3 * highest[0], highest


@pytest.mark.skipif(not CACHE.is_file(), reason="needs TIKTOKEN_CACHE_DIR with GPT-2's vocabulary")
def test_the_vocabulary_of_gpt2_is_kept_with_the_data(tmp_path):
    own_files(tmp_path / "texts")
    prepare.prepare_files(tmp_path / "out", [str(tmp_path / "texts")], [], "gpt2")
    data = prepare.load(tmp_path / "out")
    assert data.tokenizer["vocab_size"] == 50257 and data.tokenizer["eot"] == 50256
    ours, public = prepare.encoding(data.tokenizer), prepare.tiktoken.get_encoding("gpt2")
    text = "".join(chr(i) for i in range(1, 3000)) + " It's the <|endoftext|> 12345   end\n\n"
    assert ours.encode_ordinary(text) == public.encode_ordinary(text)
    assert np.array_equal(np.unique(data.train[data.train == 50256]), [50256])


def test_no_vocabulary_of_gpt2_is_one_line(tmp_path, monkeypatch, capsys):
    def fail(name):
        raise ConnectionError("no network")

    monkeypatch.setattr(prepare, "__file__", str(tmp_path / "data" / "prepare.py"))
    monkeypatch.setattr(prepare.tiktoken, "get_encoding", fail)
    (tmp_path / "a.txt").write_text("some text")
    assert prepare.main([str(tmp_path / "a.txt"), "--vocab", "gpt2"]) == 1
    error = capsys.readouterr().err
    assert "TIKTOKEN_CACHE_DIR" in error and error.count("\n") == 1
    assert not list((tmp_path / "data").glob("*"))
