"""
Proves that FineWeb-Edu arrives whole from servers that behave in every way, that what cannot be
used is named in one line, and that nothing half-done has a real name. A local server stands in.
"""

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from data import prepare

EOT = prepare.GPT2_EOT
FAKE_GPT2 = {"pattern": prepare.PATTERN, "eot": EOT, "vocab_size": EOT + 1,
             "ranks": prepare.ranks_text({bytes([b]) if b < 256 else f"~{b}~".encode(): b
                                          for b in range(EOT)})}


def shard(documents: list[list[int]]) -> bytes:
    ids = np.concatenate([[EOT, *document] for document in documents])
    header = np.zeros(256, dtype="<i4")
    header[:3] = prepare.SHARD_MAGIC, 1, len(ids)
    return header.tobytes() + ids.astype("<u2").tobytes()


def random_documents(n: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(97, 123, rng.integers(1, 60)).tolist() for _ in range(n)]


DOCUMENTS = {"val_000000": random_documents(40, 0), "train_000001": random_documents(120, 1),
             "train_000002": random_documents(120, 2)}
SHARDS = {f"edu_fineweb_{name}.bin": shard(documents) for name, documents in DOCUMENTS.items()}


class Server(BaseHTTPRequestHandler):
    """Answers with SHARDS, in the way that the next word of `script` says; 206 when it is empty."""

    def do_GET(self):
        state, name = self.server.state, self.path.rsplit("/", 1)[1]
        way = state["script"].pop(0) if state["script"] else "206"
        content = state["files"].get(name)
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
        first, last = int(asked[1]), int(asked[2])
        state["seen"].append((way, name, first, last))
        if way == "302":
            return self.answer(302, b"", Location=f"/elsewhere/{name}")
        if way in ("429", "503", "403"):
            return self.answer(int(way), b"later", **{"Retry-After": "7"} if way == "429" else {})
        if way == "html":
            return self.answer(200, b"<!DOCTYPE html>" * 200, **{"Content-Type": "text/html"})
        if way == "wrong range":
            return self.answer(206, content, **{"Content-Range": "bytes 5-9/100"})
        if content is None:
            return self.answer(404, b"nothing here")
        if way == "200":
            return self.answer(200, content)
        body = content[first:last + 1]
        kept = len(body) // 2 if way == "cut" else len(body)
        span = f"bytes {first}-{first + len(body) - 1}/{len(content)}"
        self.answer(206, body, kept, **{"Content-Range": span})

    def answer(self, code: int, body: bytes, kept: int | None = None, **headers: str):
        self.send_response(code)
        headers = {"Content-Length": str(len(body)), "Content-Type": "application/octet-stream",
                   **headers}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[:kept])
        self.close_connection = True

    def log_message(self, *words):
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The state of a server: what it has, how it answers next, what it was asked."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.state = {"files": dict(SHARDS), "script": [], "seen": [], "waits": []}
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(prepare, "HUB", f"http://127.0.0.1:{server.server_port}/main")
    monkeypatch.setattr(prepare, "SHARD_TOKENS", (len(SHARDS["edu_fineweb_train_000001.bin"])
                                                  - 1024) // 2)
    monkeypatch.setattr(prepare, "__file__", str(tmp_path / "prepare.py"))
    monkeypatch.setattr(prepare, "gpt2_tokenizer", lambda: dict(FAKE_GPT2))
    monkeypatch.setattr(prepare.time, "sleep", server.state["waits"].append)
    yield server.state
    server.shutdown()
    server.server_close()


def flat(*names: str) -> list[int]:
    """The ids of whole shards as train.bin has them, end-of-text behind every document."""
    return [i for name in names for document in DOCUMENTS[name] for i in [*document, EOT]]


def run(*flags: str) -> int:
    return prepare.main(["fineweb-edu", *flags])


def test_whole_shards_are_kept_as_they_are_and_used_again(hub, tmp_path):
    n = prepare.SHARD_TOKENS + (len(SHARDS["edu_fineweb_train_000002.bin"]) - 1024) // 2
    assert run("--tokens", str(n)) == 0
    data = prepare.load(tmp_path / "fineweb-edu")
    assert data.train.tolist() == flat("train_000001", "train_000002")
    assert data.val.tolist() == flat("val_000000") and data.tokenizer["eot"] == EOT
    assert (data.meta["train_documents"], data.meta["val_documents"]) == (240, 40)
    raw = tmp_path / "fineweb-edu-shards"
    assert {path.name: path.read_bytes() for path in raw.iterdir()} == SHARDS
    n_seen = len(hub["seen"])
    assert run("--tokens", str(n)) == 0  # the data is ready
    assert run("--shards", "1") == 0     # other settings, the same shards
    assert len(hub["seen"]) == n_seen
    assert prepare.load(tmp_path / "fineweb-edu").train.tolist() == flat("train_000001")


def test_part_of_a_shard_is_not_named_like_a_whole_one_and_grows(hub, tmp_path):
    raw = tmp_path / "fineweb-edu-shards"
    for n in (100, 700, 300):
        assert run("--tokens", str(n)) == 0
        train = prepare.load(tmp_path / "fineweb-edu").train
        assert train.tolist() == flat("train_000001")[:n - 1] + [EOT]
    name = "edu_fineweb_train_000001.bin"
    assert (raw / f"{name}.part").read_bytes() == SHARDS[name][:1024 + 1400]
    assert not (raw / name).exists()
    asked = [(first, last) for _, file, first, last in hub["seen"] if file == name]
    assert asked == [(0, 1023), (1024, 1223), (1224, 2423)]  # nothing twice
    assert run("--shards", "1") == 0
    assert (raw / name).read_bytes() == SHARDS[name] and not (raw / f"{name}.part").exists()


@pytest.mark.parametrize("script", [
    ["302"] * 3, ["200"] * 9, ["cut"] * 9, ["429", "503", "206", "429"], ["206", "cut", "200"],
    ["cut", "200", "503", "cut", "200", "cut"], ["206", "206", "302", "206", "cut", "302", "200"]])
def test_every_polite_server_gives_the_same_data(hub, tmp_path, script):
    hub["script"] += script
    assert run("--shards", "1") == 0
    data = prepare.load(tmp_path / "fineweb-edu")
    assert (data.train.tolist(), data.val.tolist()) == (flat("train_000001"), flat("val_000000"))
    assert {path.read_bytes() for path in (tmp_path / "fineweb-edu-shards").iterdir()} == {
        SHARDS["edu_fineweb_val_000000.bin"], SHARDS["edu_fineweb_train_000001.bin"]}


def test_waits_grow_without_progress_and_follow_the_server(hub):
    hub["script"] += ["503", "503", "429", "cut"]
    assert run("--tokens", "50") == 0
    assert hub["waits"] == [1, 2, 7, 1]


def test_a_server_that_sends_all_is_left_after_the_bytes_asked_for(hub, tmp_path):
    hub["script"] += ["200"] * 9
    assert run("--tokens", "50") == 0
    kept = [path.stat().st_size for path in (tmp_path / "fineweb-edu-shards").iterdir()]
    assert kept == [1124, 1124]


@pytest.mark.parametrize("script, message", [
    (["html"], "answered with a web page"), (["206", "html"], "answered with a web page"),
    (["403"], "answered 403 Forbidden: has the data set moved?"), (["503"] * 6, "6 tries without"),
    (["wrong range"], "answered with the range 'bytes 5-9/100', not from byte 0 on")])
def test_an_unusable_answer_is_one_line_and_what_came_before_is_kept(hub, tmp_path, capsys, script,
                                                                    message):
    hub["script"] += script
    assert run("--shards", "1") == 1
    error = [line for line in capsys.readouterr().err.splitlines() if "again in" not in line]
    assert len(error) == 1 and error[0].startswith("error: http") and message in error[0]
    assert not (tmp_path / "fineweb-edu").exists()
    assert not list((tmp_path / "fineweb-edu-shards").glob("*.bin"))
    assert run("--shards", "1") == 0
    assert prepare.load(tmp_path / "fineweb-edu").val.tolist() == flat("val_000000")


def changed(content: bytes, index: int, value: int) -> bytes:
    header = np.frombuffer(content[:1024], dtype="<i4").copy()
    header[index] = value
    return header.tobytes() + content[1024:]


GOOD = SHARDS["edu_fineweb_train_000001.bin"]


@pytest.mark.parametrize("content, message", [
    (None, "answered 404"), (b"short", "has 5 bytes, 1024 are needed"),
    (b"<html>" * 400, "is no shard of GPT-2 tokens"), (changed(GOOD, 0, 20240801), "is no shard"),
    (changed(GOOD, 1, 7), "is no shard"), (changed(GOOD, 2, 0), "is no shard"),
    (GOOD[:-200], "are needed: this is no shard"),
    (GOOD[:-2] + b"\x51\xc4", "has id 50257, GPT-2 ends at 50256: delete it")])
def test_a_foreign_file_is_refused_by_name(hub, tmp_path, capsys, content, message):
    hub["files"]["edu_fineweb_train_000001.bin"] = content
    if content is None:
        del hub["files"]["edu_fineweb_train_000001.bin"]
    assert run("--shards", "1") == 1
    error = capsys.readouterr().err
    assert message in error and "train_000001" in error and error.count("\n") == 1
    assert not (tmp_path / "fineweb-edu").exists()


@pytest.mark.parametrize("damage", [lambda old: old[:-2], lambda old: old + b"\x00\x00"])
def test_a_damaged_whole_shard_is_refused_by_name(hub, tmp_path, capsys, damage):
    assert run("--shards", "1") == 0
    path = tmp_path / "fineweb-edu-shards" / "edu_fineweb_train_000001.bin"
    path.write_bytes(damage(path.read_bytes()))
    assert run("--tokens", "90") == 1
    assert f"{path} has" in capsys.readouterr().err


def test_a_cut_in_the_middle_of_a_token_does_not_matter(hub, tmp_path):
    raw = tmp_path / "fineweb-edu-shards"
    raw.mkdir()
    name = "edu_fineweb_train_000001.bin"
    (raw / f"{name}.part").write_bytes(SHARDS[name][:1024 + 401])
    for n in (100, 300):
        assert run("--tokens", str(n)) == 0
        train = prepare.load(tmp_path / "fineweb-edu").train
        assert train.tolist() == flat("train_000001")[:n - 1] + [EOT]


def test_tokens_that_stop_at_the_end_of_a_document_get_no_second_end(hub, tmp_path):
    n = len(DOCUMENTS["train_000001"][0]) + 2  # both ends of the first document
    assert run("--tokens", str(n)) == 0
    data = prepare.load(tmp_path / "fineweb-edu")
    assert data.train.tolist() == flat("train_000001")[:n - 1]
    assert data.meta["train_documents"] == 1


def test_a_file_of_a_few_bytes_under_a_real_name_is_left_alone_and_named(hub, tmp_path, capsys):
    raw = tmp_path / "fineweb-edu-shards"
    raw.mkdir()
    path = raw / "edu_fineweb_val_000000.bin"
    path.write_bytes(b"mine")
    assert run("--shards", "1") == 1
    assert f"{path} is no shard" in capsys.readouterr().err and path.read_bytes() == b"mine"


def test_a_fault_of_the_connection_is_tried_again_and_one_of_the_disk_is_not(hub, tmp_path,
                                                                            monkeypatch, capsys):
    read_some, faults = prepare.read_some, [OSError(113, "No route to host"), None]

    class Answer:
        def __init__(self, answer):
            self.answer = answer

        def read(self, n):
            if faults and (fault := faults.pop(0)):
                raise fault
            return self.answer.read(n)

    monkeypatch.setattr(prepare, "read_some", lambda answer, n: read_some(Answer(answer), n))
    assert run("--tokens", "50") == 0
    assert hub["waits"] == [1] and "No route to host, again in 1 s" in capsys.readouterr().err

    class FullDisk:
        def __enter__(self):
            return self

        def __exit__(self, *exception):
            pass

        def write(self, block):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepare, "open", lambda *a: FullDisk(), raising=False)
    with pytest.raises(OSError, match="No space left"):
        prepare.fetch(f"{prepare.HUB}/edu_fineweb_train_000002.bin", tmp_path / "x", 2000)
    assert hub["waits"] == [1]


def test_nobody_there_is_one_line(hub, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "HUB", "http://127.0.0.1:9/main")
    assert run("--shards", "1") == 1
    assert "6 tries without a byte (" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("n_tokens", [700, 10 ** 4])
def test_a_vocabulary_of_ones_own_gives_the_same_documents(hub, tmp_path, monkeypatch, n_tokens):
    """Decoded, learned, encoded again: the text is that of the shards, cut at the tokens asked."""
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 10 ** 6)
    assert run("--tokens", str(n_tokens), "--vocab", "300") == 0
    data = prepare.load(tmp_path / "fineweb-edu")
    texts = prepare.encoding(data.tokenizer).decode(data.train.tolist()).split(prepare.EOT_TEXT)
    ids = flat("train_000001")[:n_tokens - 1]
    expected = "".join("|" if i == EOT else chr(i) for i in ids).removesuffix("|").split("|")
    assert texts == [*expected, ""] and data.tokenizer["vocab_size"] == 300


def test_documents_may_cross_the_edges_of_blocks_and_shards(tmp_path, monkeypatch):
    ids = np.array(flat("train_000001"), dtype="<u2")
    shards = []
    for i, piece in enumerate(np.array_split(np.concatenate(([EOT], ids[:-1])), 7)):
        (tmp_path / f"{i}").write_bytes(b"\0" * 1024 + piece.astype("<u2").tobytes())
        shards.append(prepare.Shard(tmp_path / f"{i}", len(piece)))
    enc = prepare.encoding(FAKE_GPT2)
    texts = [part.text for part in prepare.read_shards(shards, enc)]
    assert texts == ["".join(map(chr, document)) for document in DOCUMENTS["train_000001"]]
    counts = prepare.copy_ids(shards, tmp_path / "train.bin")
    assert (tmp_path / "train.bin").read_bytes() == ids.tobytes()
    assert counts == {"train_tokens": len(ids), "train_documents": 120}
