"""A comparison over paired seeds counts what it says, and nothing is lost when it is stopped."""

import gzip
import json
import math
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import train
from data import prepare
from dmtp import interval, t_quantile, verdict
from train import (CHART_WIDTH, COMPARED, chart, difference_table, encode_file, paired,
                   saved_bytes)


@pytest.fixture
def run(monkeypatch, very_small, data, tmp_path):
    """Runs train.main --compare on a very small size and gives (exit status, compare.json)."""
    monkeypatch.setattr(train, "COST_TURNS", 2)

    def main(*flags: str, arms: str = "standard ec", out: str = "out") -> tuple[int, Path]:
        settings = ["--data", str(data), "--out", str(tmp_path / out), "--steps", "4",
                    "--batch", "4", "--compare", *arms.split()]
        return train.main([*settings, *flags]), tmp_path / out / "compare.json"

    return main


def untimed(path: Path) -> dict:
    """compare.json without what depends on the clock."""
    result = json.loads(path.read_text())
    for of_arm in result["cost"].values():
        del of_arm["tokens_per_s"], of_arm["ratio"]
    return result


# ----------------------------------------------------------------------------------------------
# with a pencil


def test_the_interval_of_1_2_and_3_is_2_plus_minus_2_484():
    found = interval([1.0, 2.0, 3.0])
    assert found["mean"] == 2 and found["n"] == 3
    assert found["half_width"] == pytest.approx(4.3027 * 1 / math.sqrt(3), abs=1e-4)  # 2.484
    assert verdict(found) == "not resolved"
    # sd sqrt(0.8), t(0.975, 5) = 2.571: 2 +- 2.571 x 0.894 / sqrt(6) = 2 +- 0.939
    six = interval([1.0, 1.0, 2.0, 2.0, 3.0, 3.0])
    assert six["half_width"] == pytest.approx(0.939, abs=1e-3) and verdict(six) == ""
    assert interval([2.0]) == {"mean": 2.0, "half_width": None, "n": 1}
    assert verdict(interval([2.0])) == "no interval"


@pytest.mark.parametrize("df, value", [
    (1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (6, 2.4469), (9, 2.2622),
    (10, 2.2281), (29, 2.0452), (30, 2.0423), (120, 1.9799), (100_001, 1.9600)])
def test_t_quantiles_are_those_of_the_printed_table(df, value):
    assert t_quantile(df) == pytest.approx(value, abs=6e-5)


def test_differences_are_taken_between_runs_of_one_seed_and_one_text():
    def row(arm: str, seed: int, file: str, x: float) -> dict:
        return {"arm": arm, "seed": seed, "file": file, **dict.fromkeys(train.MEASURES, x)}

    # the seeds differ far more than the arms, and stand in another order in each arm
    runs = [row("ec", 8, "val", 61.0), row("ec", 7, "val", 12.0), row("ec", 9, "val", 43.0),
            row("standard", 7, "val", 10.0), row("standard", 9, "val", 40.0),
            row("standard", 8, "val", 60.0), row("ec", 6, "val", 0.0)]
    runs += [row(arm, seed, "b.txt", 5.0) for arm in ("standard", "ec") for seed in (7, 8, 9)]
    found = paired(runs, ["standard", "ec"], range(7, 10))
    assert list(found) == ["val", "b.txt"] and list(found["val"]) == ["ec"]
    assert found["val"]["ec"]["tv"] == interval([2.0, 1.0, 3.0])
    assert found["b.txt"]["ec"]["tv"] == {"mean": 0.0, "half_width": 0.0, "n": 3}
    other = paired(runs, ["ec", "standard"], range(7, 10))
    assert other == found, "standard is the baseline wherever it stands"
    assert list(paired(runs, ["ec"], range(7, 10))["val"]) == []


def test_a_chart_has_its_mean_interval_and_zero_at_their_columns():
    middle = CHART_WIDTH // 2
    line = chart({"mean": 0.5, "half_width": 0.25, "n": 3}, 1.0)
    assert len(line) == CHART_WIDTH and line[middle] == ":"
    assert line[middle + 5:middle + 16] == "-----|-----" and line.count("-") == 10
    assert chart({"mean": -1.0, "half_width": None, "n": 1}, 1.0).rstrip() == \
        "|" + " " * (middle - 1) + ":"
    assert chart({"mean": 0.0, "half_width": 1.0, "n": 2}, 1.0) == "-" * middle + "|" + "-" * middle


def test_a_difference_that_straddles_zero_is_not_resolved_and_an_untrained_head_not_judged():
    sure, unsure = ({"mean": 0.1, "half_width": w, "n": 3} for w in (0.05, 0.2))
    table = difference_table({"ec": dict.fromkeys(train.MEASURES, sure),
                              "kl": dict.fromkeys(train.MEASURES, unsure),
                              "none": dict.fromkeys(train.MEASURES, sure)}, "standard")
    lines = [line for line in table.splitlines() if line.startswith("  ")]
    assert ["not resolved" in line for line in lines if " ec " in line] == [False] * 5
    assert ["not resolved" in line for line in lines if " kl " in line] == [True] * 5
    assert sum(" none " in line for line in lines) == 1
    columns = {line.rindex(":") for line in lines}
    assert columns == {line.rindex("0", 0, 70) for line in table.splitlines()
                       if not line.startswith("  ")}, "zero stands under zero"


def test_saved_bytes_counts_each_storage_once_and_what_was_dropped_not_at_all():
    x = torch.ones(100, requires_grad=True)  # 400 bytes
    assert saved_bytes(lambda: (x * x).sum()) == 400
    assert saved_bytes(lambda: (x.exp() * x[:50].sum()).sum()) == 400 + 4  # exp(x), and a sum

    def with_a_graph_dropped() -> torch.Tensor:
        (x.sin() * x.cos()).sum()
        return (x * x).sum()

    assert saved_bytes(with_a_graph_dropped) == 400


# ----------------------------------------------------------------------------------------------
# whole comparisons


def test_arms_of_a_seed_start_alike_see_the_same_batches_and_are_judged_on_the_same_windows(
        run, monkeypatch):
    seen = {}  # (arm's loss, seed) -> first loss, batches, held-out windows
    step, batches, evaluate = train.train_step, train.get_batch, train.evaluate
    monkeypatch.setattr(train, "COST_TURNS", 0)
    monkeypatch.setattr(train, "measure_costs", lambda args, *a: {})
    monkeypatch.setattr(train, "report_comparison", lambda *a: None)
    order, now = [], []

    def watched_step(stage, recipe, optimizers, tokens, i, micro_batch, measure):
        key = (stage.mtp_loss.mode, stage.mtp_loss.weight, stage.max_logits, recipe.seed)
        if i == 0:
            order.append(key)
        now[:] = [seen.setdefault(key, {"batches": [], "windows": []})]
        result = step(stage, recipe, optimizers, tokens, i, micro_batch, measure)
        if i == 0:
            now[0]["first"] = result[1]["next_loss"]
        return result

    def watched_batch(*a):
        now[0]["batches"].append(batches(*a).tolist())
        return batches(*a)

    def watched_evaluate(stage, windows, recipe):
        now[0]["windows"].append(windows.tolist())
        return evaluate(stage, windows, recipe)

    for name, watched in (("train_step", watched_step), ("get_batch", watched_batch),
                          ("evaluate", watched_evaluate)):
        monkeypatch.setattr(train, name, watched)
    assert run("--seeds", "2", "--seed", "5", arms=" ".join(COMPARED))[0] == 0
    assert [key[3] for key in order] == [5] * 5 + [6] * 5, "arms take turns within a seed"
    assert len(seen) == 2 * len(COMPARED)
    for seed in (5, 6):
        first, *others = [x for key, x in seen.items() if key[3] == seed]
        assert len(first["batches"]) == 4
        for other in others:
            assert other["batches"] == first["batches"] and other["windows"] == first["windows"]
        # bit for bit, where the logits are computed in one piece
        plain = {x["first"] for key, x in seen.items() if key[3] == seed and key[2] > 1}
        assert len(plain) == 1
        chunked = next(x["first"] for key, x in seen.items() if key[3:] == (seed,) and key[2] == 1)
        assert chunked == pytest.approx(plain.pop(), rel=1e-6)
    a, b = (next(x for key, x in seen.items() if key[3] == seed) for seed in (5, 6))
    assert a["first"] != b["first"] and a["batches"] != b["batches"]
    assert a["windows"] == b["windows"]


def test_the_standard_arm_trains_as_mtp_loss_standard_does(run, data, tmp_path):
    _, path = run("--seeds", "1", "--seed", "3")
    assert train.main(["--data", str(data), "--out", str(tmp_path / "alone"), "--steps", "4",
                       "--batch", "4", "--stage", "target", "--mtp-loss", "standard", "--seed",
                       "3"]) == 0
    lines = (tmp_path / "alone" / "log.jsonl").read_text().splitlines()
    final = [json.loads(line)["eval"] for line in lines if "eval" in line][-1]
    row = json.loads(path.read_text())["runs"][0]
    assert row == {"arm": "standard", "seed": 3, "file": "val", **final}


def test_ctrl_c_in_a_runs_last_step_keeps_that_run(run, monkeypatch, capsys):
    steps, lr = [], train.get_lr
    monkeypatch.setattr(train, "get_lr", lambda step, r: steps.append(step) or lr(step, r))

    class StopAtFour(train.CtrlC):  # the last step of the first run
        asked = property(lambda self: len(steps) >= 4, lambda self, value: None)

    monkeypatch.setattr(train, "CtrlC", StopAtFour)
    status, path = run("--seeds", "1")
    assert status == 130 and "Go on with: python train.py" in capsys.readouterr().err
    assert [r["arm"] for r in json.loads(path.read_text())["runs"]] == ["standard"]


def test_a_stopped_and_repeated_comparison_gives_the_file_of_an_uninterrupted_one(
        run, monkeypatch, capsys):
    flags = ["--seeds", "2"]
    status, whole = run(*flags, out="whole")
    assert status == 0
    steps = []
    lr = train.get_lr
    monkeypatch.setattr(train, "get_lr", lambda step, r: steps.append(step) or lr(step, r))

    class StopAfter(train.CtrlC):
        n_steps = 10  # of 4 runs of 4: in the third
        asked = property(lambda self: len(steps) >= self.n_steps, lambda self, value: None)

    monkeypatch.setattr(train, "CtrlC", StopAfter)
    capsys.readouterr()
    status, parts = run(*flags, "--overwrite", out="parts")
    error = capsys.readouterr().err
    assert status == 130 and error.strip().count("\n") == 0
    assert "run of standard, seed 1338" in error and "Go on with: python train.py" in error
    assert "--resume" not in error and "--overwrite" not in error
    assert [r["arm"] for r in json.loads(parts.read_text())["runs"]] == ["standard", "ec"]
    steps[:], StopAfter.n_steps = [], 9  # two runs, and one step of the cost
    assert run(*flags, out="parts")[0] == 130
    assert "all runs are finished" in capsys.readouterr().err
    assert "cost" not in json.loads(parts.read_text())
    steps[:], StopAfter.n_steps = [], 10 ** 9
    assert run(*flags, out="parts")[0] == 0
    assert set(steps) == {0}, "only the cost was left to measure"
    assert untimed(parts) == untimed(whole)
    assert sorted(p.name for p in parts.parent.iterdir()) == ["compare.json"]
    steps[:] = []
    first = capsys.readouterr().out
    assert run(*flags, out="parts")[0] == 0 and not steps
    assert capsys.readouterr().out.split("measures, and arms")[1] == \
        first.split("measures, and arms")[1]


def test_more_seeds_and_arms_are_added_and_other_settings_are_refused(run, monkeypatch, capsys):
    _, path = run("--seeds", "1")
    before = json.loads(path.read_text())["runs"]
    assert run("--seeds", "2", arms="standard ec kl")[0] == 0
    result = json.loads(path.read_text())
    assert result["runs"][:2] == before and len(result["runs"]) == 6
    assert list(result["cost"]) == ["standard", "ec", "kl"]
    assert result["paired"]["val"]["kl"]["tv"]["n"] == 2
    capsys.readouterr()
    assert run("--seeds", "2", "--lr", "0.5")[0] == 1
    error = capsys.readouterr().err
    assert "lr 0.014 (there) / 0.5 (asked)" in error and "--overwrite" in error and "--out" in error
    assert error.count("\n") == 1
    assert json.loads(path.read_text()) == result
    assert run("--seeds", "1", "--lr", "0.5", "--overwrite")[0] == 0
    assert len(json.loads(path.read_text())["runs"]) == 2


def test_tables_and_file_agree_and_further_texts_are_judged_beside_the_datas_own(
        run, tmp_path, capsys):
    text = "".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(60))
    (tmp_path / "a.txt").write_text(text)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as f:
        f.write(json.dumps({"text": text}) + "\n" + json.dumps({"text": text[::-1]}) + "\n")
    status, path = run("--seeds", "2", "--eval", str(tmp_path / "a.txt"),
                       str(tmp_path / "b.jsonl.gz"), arms="standard ec none")
    out = capsys.readouterr().out
    result = json.loads(path.read_text())
    assert status == 0
    assert {(r["arm"], r["seed"], r["file"]) for r in result["runs"]} == {
        (arm, seed, file) for arm in ("standard", "ec", "none") for seed in (1337, 1338)
        for file in ("val", "a.txt", "b.jsonl.gz")}
    for file in ("val", "a.txt", "b.jsonl.gz"):
        mine = [r["tv"] for r in result["runs"] if (r["file"], r["arm"]) == (file, "ec")]
        part = out[out.index(f"\n{file}: 8 windows of 32 tokens"):]
        line = next(x for x in part.splitlines() if x.startswith("ec "))
        assert line.split()[2] == f"{statistics.fmean(mine):.4f}"
        x = result["paired"][file]["ec"]["tv"]
        assert f"{x['mean']:+9.4f} +- {x['half_width']:.4f}" in part
    assert list(result["cost"]) == ["standard", "ec"], "no cost without a head was measured"
    for arm, of_arm in result["cost"].items():
        assert of_arm["tokens_per_s"] > 0 and of_arm["ratio"]["n"] == 2
        assert (of_arm["peak_bytes"] is None) == (not torch.cuda.is_available())
    assert result["cost"]["standard"]["ratio"]["mean"] == 1
    assert max(map(len, out[out.index("measures, and"):].splitlines())) <= 100


def test_a_text_is_encoded_as_prepared_data_is(data, tmp_path):
    """Two documents, an empty one between them, a foreign line end and a literal end-of-text."""
    tokenizer = prepare.load(data).tokenizer
    enc = prepare.encoding(tokenizer)
    texts = ["a = 1\n", "", "<|endoftext|> b"]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": x.replace("\n", "\r\n")}) + "\n" for x in texts))
    ids = encode_file(path, tokenizer).tolist()
    eot = tokenizer["eot"]
    assert ids == enc.encode_ordinary(texts[0]) + [eot] + enc.encode_ordinary(texts[2]) + [eot]


def test_kl_saves_more_than_standard_and_less_in_chunks(run):
    _, path = run("--seeds", "1", arms=" ".join(COMPARED))
    result = json.loads(path.read_text())
    saved = {arm: x["saved_bytes"] for arm, x in result["cost"].items()}
    state, logits = 4 * 4 * 32 * 16, 4 * 4 * 31 * 300  # bytes of (B, T, C) and (B, T - 1, V)
    assert 0 <= saved["ec"] - saved["standard"] <= state
    assert saved["kl"] - saved["standard"] > 0.9 * logits
    assert saved["kl-chunked"] < saved["standard"] - 1.5 * logits
    rows = {row["arm"]: row for row in result["runs"]}
    assert rows["kl-chunked"]["next_loss"] == pytest.approx(rows["kl"]["next_loss"], rel=1e-4)


# ----------------------------------------------------------------------------------------------
# mistakes


@pytest.mark.parametrize("flags, words", [
    (["--eval", "no-such.txt"], ["--eval", "no-such.txt"]),
    (["--eval", "{tmp}/short.txt"], ["short.txt has", "a window needs 33"]),
    (["--eval", "{tmp}/short.txt", "{tmp}/more/short.txt"], ["have one name", "rename"]),
    (["--eval", "{tmp}/x.pdf"], ["x.pdf", ".jsonl"]),
    (["--eval", "{tmp}/bytes.txt"], ["bytes.txt is not UTF-8"]),
    (["--dtype", "tf32", "--device", "cpu"], ["tf32 is for GPUs"])])
def test_mistakes_end_in_one_line_before_anything_is_trained(run, tmp_path, capsys, flags, words):
    (tmp_path / "more").mkdir()
    for name in ("short.txt", "more/short.txt", "x.pdf"):
        (tmp_path / name).write_text("too short")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xff" * 100)
    status, path = run(*[flag.replace("{tmp}", str(tmp_path)) for flag in flags])
    error = capsys.readouterr().err
    assert status == 1 and error.count("\n") == 1 and all(word in error for word in words)
    assert not path.exists()


@pytest.mark.parametrize("flags, words", [
    (["--compare", "standard", "best"], ["invalid choice: 'best'", "kl-chunked"]),
    (["--compare"], ["--compare"]),
    (["--compare", "ec", "kl", "ec"], ["--compare has ec twice"]),
    (["--compare", "ec", "--seeds", "0"], ["--seeds is 0"]),
    (["--compare", "ec", "--seed", str(2 ** 63 - 1), "--seeds", "2"], ["--seed"]),
    (["--seeds", "3"], ["--seeds: only with --compare"]),
    (["--eval", "x.txt", "--seeds", "2"], ["--seeds, --eval: only with --compare"]),
    (["--stage", "target", "--labels", "hard"], ["--labels: not used in --stage target"]),
    (["--stage", "target", "--drafter", "dflash", "--drafter-steps", "9"],
     ["--drafter, --drafter-steps: not used in --stage target"]),
    (["--stage", "drafter", "--steps", "9"], ["--steps: not used", "--drafter-steps"]),
    (["--stage", "drafter", "--ec-mtp"], ["--ec-mtp: not used in --stage drafter"]),
    (["--compare", "ec", "--stage", "target", "--resume"], ["leave out --stage, --resume"]),
    (["--compare", "ec", "--drafter", "dflash"], ["leave out --drafter"]),
    (["--compare", "ec", "--ec-mtp"], ["leave out --ec-mtp"])])
def test_flags_that_do_not_go_together_are_refused_in_the_last_line(capsys, flags, words):
    with pytest.raises(SystemExit) as stop:
        train.main(flags)
    assert stop.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert all(word in last for word in words), last


@pytest.mark.parametrize("content", ['{"settings": {}, "runs": [{"arm', "[]", '{"runs": [1]}',
                                     '{"settings": {}, "runs": [{"arm": "ec"}]}'])
def test_a_damaged_file_is_named_in_one_line_and_left_alone(run, tmp_path, capsys, content):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "compare.json").write_text(content)
    status, path = run("--seeds", "1")
    error = capsys.readouterr().err
    assert status == 1 and error.count("\n") == 1 and "compare.json" in error
    assert "--overwrite" in error and path.read_text() == content


def test_a_loss_that_is_not_finite_names_its_run_and_keeps_those_before(run, monkeypatch, capsys):
    evaluate, calls = train.evaluate, []

    def broken(*a):
        calls.append(1)
        return evaluate(*a) | ({"kl": float("nan")} if len(calls) == 2 else {})

    monkeypatch.setattr(train, "evaluate", broken)
    status, path = run("--seeds", "1")
    error = capsys.readouterr().err
    assert status == 1 and "ec, seed 1337, val: kl is nan" in error and error.count("\n") == 1
    assert [row["arm"] for row in json.loads(path.read_text())["runs"]] == ["standard"]


def test_overwrite_keeps_the_older_file_until_a_new_run_is_there(run, monkeypatch, capsys):
    _, path = run("--seeds", "1")
    before = path.read_text()
    monkeypatch.setattr(train, "evaluate", lambda *a: {"kl": float("nan")})
    assert run("--seeds", "1", "--overwrite")[0] == 1 and path.read_text() == before
    monkeypatch.setattr(train.CtrlC, "anywhere", lambda self: True)
    capsys.readouterr()
    assert run("--seeds", "1", "--overwrite")[0] == 130 and path.read_text() == before
    assert capsys.readouterr().err.strip().endswith("--overwrite")  # which is still to be done


def test_an_arm_without_a_head_has_no_cost_also_where_it_is_the_base(run, capsys):
    _, path = run("--seeds", "1", arms="none ec")
    result = json.loads(path.read_text())
    assert result["baseline"] == "none" and list(result["cost"]) == ["ec"]
    capsys.readouterr()
    assert run("--seeds", "1", arms="none", out="alone")[0] == 0
    assert "cost of training" not in capsys.readouterr().out


def test_ctrl_c_ends_in_one_line_that_says_how_to_go_on(data, train_script, tmp_path):
    flags = ["--data", str(data), "--out", str(tmp_path / "out"), "--steps", "100000", "--compare",
             "ec", "standard"]
    process = subprocess.Popen([sys.executable, str(train_script), *flags], stderr=subprocess.PIPE,
                               stdout=subprocess.DEVNULL, text=True)
    for _ in range(600):
        time.sleep(0.1)
        if (tmp_path / "out" / "compare.json").exists():
            break
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=60)[1].strip().splitlines()
    assert process.returncode == 130
    assert len(error) == 1 and error[0].startswith("stopped in the run of ec, seed 1337;"), error
    assert error[0].endswith("python train.py " + " ".join(flags))
