"""Training does what the flags say, each time the same; and nothing is lost when it is stopped."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import dflash
import dmtp
import train
from dmtp import ARMS, LABELS, fingerprint, load_drafter, load_target, pick_device
from kit import random_tokens, small_config, small_drafter, small_models
from mtp import MTPLoss, draft_quality
from train import (KeepFloat32, Recipe, Stage, get_batch, get_lr, make_optimizers, optimizer_step,
                   step_gradients)

ROOT = Path(train.__file__).parent
RECIPE = Recipe(steps=20, batch=4, optimizer="muon", lr=0.01, lr_rest=0.005, weight_decay=0.0,
                warmup=2, seed=1, dtype="float32")


@pytest.fixture
def run(very_small, data, tmp_path):
    """Runs train.main on a very small size and gives (exit status, out folder)."""
    def main(*flags: str, out: str = "out") -> tuple[int, Path]:
        settings = ["--data", str(data), "--out", str(tmp_path / out), "--batch", "4"]
        stage = flags[flags.index("--stage") + 1] if "--stage" in flags else "all"
        settings += ["--steps", "8"] * (stage != "drafter")
        settings += ["--drafter-steps", "8"] * (stage != "target")
        return train.main(settings + list(flags)), tmp_path / out

    return main


def log_lines(out: Path) -> list[dict]:
    """log.jsonl without its timings."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "tokens_per_s"} for line in lines]


def tensors(path: Path, key: str) -> dict:
    return torch.load(path, weights_only=True)[key]


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_both_stages_can_learn_one_batch_by_heart(optimizer):
    cfg = small_config()
    target, mtp = (m.float() for m in small_models(cfg=cfg))
    windows = torch.randint(23, (2, 33), generator=torch.Generator().manual_seed(0))
    changes = {"optimizer": optimizer, "lr": 0.02, "lr_rest": 0.02, "steps": 100}
    recipe = Recipe(**{**vars(RECIPE), **changes})
    for drafter in (None, small_drafter(cfg, "dmtp").float()):
        stage = Stage(target, mtp, MTPLoss("ec"), drafter)
        optimizers = make_optimizers(stage.trained, recipe)
        for step in range(recipe.steps):
            loss, _ = step_gradients(stage, recipe, windows, 0, micro_batch=2, measure=False)
            optimizer_step(optimizers, get_lr(step, recipe), on_cpu=True)
        assert loss.item() < 0.3


@pytest.mark.parametrize("flags", [[], ["--optimizer", "adamw", "--mtp-loss", "kl",
                                        "--drafter", "dflash"]])
def test_a_stopped_and_resumed_run_gives_the_losses_and_weights_of_an_uninterrupted_one(
        run, monkeypatch, capsys, flags):
    status, whole = run(*flags, out="whole")
    assert status == 0
    class StopAfter3(train.CtrlC):
        asked = property(lambda self: sum(lr_calls) >= 3, lambda self, value: None)

    lr_calls = []
    lr = train.get_lr
    monkeypatch.setattr(train, "get_lr",
                        lambda step, recipe: lr_calls.append(1) or lr(step, recipe))
    monkeypatch.setattr(train, "CtrlC", StopAfter3)
    status, parts = run(*flags, out="parts")             # the target stage stops after 3 steps
    assert status == 130
    assert "--resume" in capsys.readouterr().err
    assert run(*flags, out="parts")[0] == 1               # without --resume: refused in one line
    assert "--resume" in capsys.readouterr().err
    lr_calls[:] = [-8]                                    # 5 to the target's end, 6 of the drafter
    assert run(*flags, "--resume", out="parts")[0] == 130
    lr_calls[:] = [-99]
    assert run(*flags, "--resume", out="parts")[0] == 0
    assert log_lines(parts) == log_lines(whole)
    name = "dflash" if "dflash" in flags else "dmtp"
    for file, key in (("target.pt", "target"), ("target.pt", "mtp"), (f"{name}.pt", "drafter")):
        assert same(tensors(parts / file, key), tensors(whole / file, key))


def test_same_seed_gives_the_same_run_and_another_seed_another(run):
    seeds = {"a": "1", "b": "1", "c": "2"}
    a, b, c = (run("--stage", "target", "--seed", seeds[out], out=out)[1] for out in seeds)
    assert log_lines(a) == log_lines(b) != log_lines(c)


def test_ec_starts_with_the_losses_of_standard_and_then_goes_its_own_way(run):
    ec, standard = (run("--stage", "target", "--mtp-loss", mode, out=mode)[1]
                    for mode in ("ec", "standard"))
    first, second = (log_lines(out) for out in (ec, standard))
    assert first[0] == second[0]
    assert first[3] != second[3]


def test_drafters_of_one_target_train_on_the_same_text_and_leave_the_target_alone(run, monkeypatch):
    _, out = run()
    before = (out / "target.pt").read_bytes()
    seen = {"dflash": [], "dmtp": []}
    batches = train.get_batch
    for name in seen:
        monkeypatch.setattr(train, "get_batch",
                            lambda *a, name=name: seen[name].append(batches(*a)) or batches(*a))
        assert run("--stage", "drafter", "--drafter", name, "--overwrite")[0] == 0
    assert len(seen["dflash"]) == 8
    assert all(torch.equal(a, b) for a, b in zip(*seen.values()))
    assert (out / "target.pt").read_bytes() == before


def test_finished_stages_are_used_as_they_are_and_other_settings_are_refused(run, capsys):
    _, out = run()
    written = (out / "target.pt").stat().st_mtime_ns, (out / "dmtp.pt").stat().st_mtime_ns
    assert run()[0] == 0
    assert ((out / "target.pt").stat().st_mtime_ns, (out / "dmtp.pt").stat().st_mtime_ns) == written
    capsys.readouterr()
    assert run("--seed", "5")[0] == 1
    error = capsys.readouterr().err
    assert "seed 1337 (there) / 5 (asked)" in error and "--overwrite" in error
    assert error.count("\n") == 1
    assert run("--seed", "5", "--overwrite")[0] == 0
    target, mtp, checkpoint = load_target(out)
    assert checkpoint["fingerprint"] == fingerprint(target, mtp)
    load_drafter(out, "dmtp", target.cfg, checkpoint["fingerprint"])


@pytest.mark.parametrize("mode", ["standard", "ec", "kl", "drafter"])
@pytest.mark.parametrize("micro_batch", [1, 2, 3])
def test_a_step_in_parts_gives_the_loss_measures_and_gradients_of_the_whole(mode, micro_batch):
    cfg = small_config()
    windows = torch.randint(23, (5, cfg.context + 1), generator=torch.Generator().manual_seed(0))
    results = []
    for n in (micro_batch, 5):
        target, mtp = small_models(cfg=cfg)
        drafter = small_drafter(cfg, "dmtp") if mode == "drafter" else None
        stage = Stage(target, mtp, MTPLoss("ec" if drafter else mode), drafter)
        loss, measures = step_gradients(stage, RECIPE, windows, 3, n, measure=True)
        gradients = [p.grad for m in stage.trained for p in m.parameters()]
        results.append(([loss, *gradients], measures))
    for parts, whole in zip(results[0][0], results[1][0], strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-10, atol=1e-12)
    for name, value in results[1][1].items():
        assert results[0][1][name].item() == pytest.approx(value.item(), rel=1e-6)


def test_a_step_reads_nothing_back_from_the_device():
    """On the meta device every read, item() and copy to the CPU raises; the measures wait there."""
    cfg = small_config()
    windows = torch.zeros(4, cfg.context + 1, dtype=torch.long)
    for name in (None, *ARMS):
        target, mtp = (m.float().to("meta") for m in small_models(cfg=cfg))
        drafter = small_drafter(cfg, name).float().to("meta") if name else None
        stage = Stage(target, mtp, MTPLoss("ec"), drafter)
        for labels in LABELS:
            recipe = Recipe(**{**vars(RECIPE), "labels": labels})
            loss, measures = step_gradients(stage, recipe, windows, 0, 2, measure=True)
            torch.nn.utils.clip_grad_norm_([p for m in stage.trained for p in m.parameters()], 1.0)
            assert loss.is_meta and all(value.is_meta for value in measures.values())
            with pytest.raises((RuntimeError, NotImplementedError)):
                loss.item()  # what the device would refuse


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("name", [None, *ARMS])
def test_a_step_in_bfloat16_has_about_the_loss_and_gradients_of_float32(name, labels):
    windows, results = random_tokens(4, 49), []
    for dtype in ("float32", "bfloat16"):
        target, mtp = (m.float() for m in small_models())
        drafter = small_drafter(target.cfg, name).float() if name else None
        stage = Stage(target, mtp, MTPLoss("ec"), drafter)
        recipe = Recipe(**{**vars(RECIPE), "labels": labels, "dtype": dtype})
        loss, _ = step_gradients(stage, recipe, windows, 0, micro_batch=2, measure=False)
        gradients = [p.grad for m in stage.trained for p in m.parameters()]
        results.append((loss, torch.cat([g.flatten() for g in gradients])))
    (exact, gradient), (rough, rough_gradient) = results
    assert rough != exact and rough.item() == pytest.approx(exact.item(), rel=0.02)
    limit = 0.2 if name and ARMS[name].dflash2 else 0.05  # a walk may have other candidates
    assert (rough_gradient - gradient).norm() < limit * gradient.norm()


def test_labels_of_a_bfloat16_step_are_distributions_in_float32(monkeypatch):
    wanted = []
    monkeypatch.setattr(dmtp, "slot_losses", lambda logits, labels: wanted.append(
        labels) or dflash.slot_losses(logits, labels))
    target, mtp = (m.float() for m in small_models())
    stage = Stage(target, mtp, None, small_drafter(target.cfg, "dmtp").float())
    recipe = Recipe(**{**vars(RECIPE), "labels": "soft", "dtype": "bfloat16"})
    step_gradients(stage, recipe, random_tokens(2, 49), 0, micro_batch=2, measure=False)
    sums = wanted[0].sum(dim=-1)
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=1e-6, atol=1e-6)
    assert wanted[0].dtype == torch.float32


def test_tf32_trains_and_never_judges(monkeypatch):
    asked = []
    monkeypatch.setattr(train, "draft_quality", lambda p, q: asked.append(
        torch.get_float32_matmul_precision()) or draft_quality(p, q))
    stage = Stage(*(m.float() for m in small_models()), MTPLoss("ec"), None)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    train.evaluate(stage, random_tokens(2, 49), Recipe(**{**vars(RECIPE), "dtype": "tf32"}))
    assert asked == ["highest"] and torch.get_float32_matmul_precision() == "high"
    torch.set_float32_matmul_precision(before)


def log_of(out: Path) -> list[dict]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "tokens_per_s"} for line in lines]


def test_fine_tuning_from_dflash_starts_as_two_anchor_dflash_of_its_weights(run):
    """The same first loss and proposals to the bit, and another one later."""
    _, out = run("--drafter", "dflash")
    for name in ("conditioned-2", "dmtp"):
        assert run("--stage", "drafter", "--drafter", name, "--init-from", str(out / "dflash.pt"))[
            0] == 0
    first, last = ([[line for line in log_of(out) if line["stage"] == name][i]
                    for name in ("conditioned-2", "dmtp")] for i in (0, -1))
    assert first[0]["loss"] == first[1]["loss"] and first[0]["agreement"] == first[1]["agreement"]
    assert last[0]["eval"]["loss"] != last[1]["eval"]["loss"]
    target, _, checkpoint = load_target(out)
    tuned = load_drafter(out, "dmtp", target.cfg, checkpoint["fingerprint"])
    assert tuned.arm.injection == "residual" and tuned.fusion.proj.weight.any()


def test_weights_that_do_not_fit_are_refused_by_name(run, capsys):
    _, out = run("--drafter", "dflash")
    _, other = run("--drafter", "dflash", "--seed", "7", out="other")
    path = out / "dflash.pt"
    wide = torch.load(path, weights_only=True)
    wide["draft_config"]["gamma"] = 9.0
    torch.save(wide, out / "wide.pt")
    for start, arm, message in [
            (other / "dflash.pt", "dmtp", "was trained for target"),
            (out / "wide.pt", "dmtp", "another layout: gamma 9.0 (there) / 4.0 (here)"),
            (path, "context", "drafter dflash: its dflash.fc.weight has no place in [T1, mask"),
            (out / "target.pt", "dmtp", "is not a drafter checkpoint"),
            (out / "none.pt", "dmtp", "there is no ")]:
        capsys.readouterr()
        assert run("--stage", "drafter", "--drafter", arm, "--init-from", str(start))[0] == 1
        error = capsys.readouterr().err
        assert message in error and str(start) in error and error.count("\n") == 1
        assert not (out / f"{arm}.pt").exists()


def test_what_is_wrong_with_a_file_to_start_from_is_said_before_the_target_is_trained(run, capsys):
    for start, message in (("typo.pt", "there is no typo.pt"), (None, "has none yet")):
        start = start or str(run("--drafter", "dflash", out="other")[1] / "dflash.pt")
        capsys.readouterr()
        status, out = run("--init-from", start)
        error = capsys.readouterr().err
        assert status == 1 and message in error and error.count("\n") == 1
        assert not (out / "target.pt").exists()


def test_a_target_that_would_be_trained_anew_is_not_that_of_a_file_to_start_from(run, capsys):
    _, out = run("--drafter", "dflash")
    before = (out / "target.pt").read_bytes()
    assert run("--init-from", str(out / "dflash.pt"), "--overwrite")[0] == 1
    error = capsys.readouterr().err
    assert "add --stage drafter" in error and error.count("\n") == 1
    assert (out / "target.pt").read_bytes() == before


def test_a_drafter_for_a_target_that_was_stopped_is_refused_with_what_helps(run, capsys):
    _, out = run("--stage", "target")
    whole = torch.load(out / "target.pt", weights_only=True)
    torch.save(whole | {"training": {"step": 5}}, out / "target.pt")
    for flags in ((), ("--resume",)):
        assert run("--stage", "drafter", *flags)[0] == 1
        assert "by --stage target --resume" in capsys.readouterr().err


def test_starting_from_a_drafter_that_was_stopped_says_so(run, capsys):
    _, out = run("--drafter", "dflash")
    whole = torch.load(out / "dflash.pt", weights_only=True)
    torch.save(whole | {"training": {"step": 5}}, out / "half.pt")
    assert run("--stage", "drafter", "--init-from", str(out / "half.pt"))[0] == 0
    assert "half.pt is not fully trained, it stands at step 5" in capsys.readouterr().err


def test_a_drafter_is_not_started_from_the_file_that_it_would_replace(run, capsys):
    _, out = run("--drafter", "dflash")
    before = (out / "dflash.pt").read_bytes()
    assert run("--stage", "drafter", "--drafter", "dflash", "--overwrite", "--init-from",
               str(out / ".." / out.name / "dflash.pt"))[0] == 1
    error = capsys.readouterr().err
    assert "copy it" in error and error.count("\n") == 1
    assert (out / "dflash.pt").read_bytes() == before


def test_compiling_takes_every_layer_of_target_and_head_and_nothing_else(run, monkeypatch):
    compiled = []
    monkeypatch.setattr(train, "check_compiler", lambda device: None)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compiled.append(module))
    assert run("--compile", "--stage", "target")[0] == 0
    n_layer = train.SIZES["tiny"][0]
    assert [type(module).__name__ for module in compiled] == ["Block"] * (n_layer + 1)


def test_help_has_one_line_for_every_drafter(capsys):
    with pytest.raises(SystemExit):
        train.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    for name, arm in ARMS.items():
        assert f"  {name:14} {arm.about}" in lines


def run_processes(n: int, script: Path, *flags: str) -> subprocess.CompletedProcess:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
    return subprocess.run([sys.executable, *(start if n > 1 else []), str(script), *flags],
                          capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("name", [None, "dmtp"])
def test_two_processes_have_the_gradients_of_one(tmp_path, name):
    """Loss, measures and gradients of one step in float64, two windows a process at a time."""
    script = tmp_path / "step.py"
    script.write_text(f"""if True:
        import sys
        sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
        import torch, torch.distributed as dist
        from test_train import one_step
        dist.init_process_group("gloo")
        result = one_step({name!r})
        if dist.get_rank() == 1:
            torch.save(result, {str(tmp_path / "result.pt")!r})
        dist.barrier()
        dist.destroy_process_group()
    """)
    ran = run_processes(2, script)
    assert ran.returncode == 0, ran.stderr
    for a, b in zip(torch.load(tmp_path / "result.pt"), one_step(name), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def one_step(name: str | None) -> list[torch.Tensor]:
    cfg = small_config()
    windows = torch.randint(23, (8, cfg.context + 1), generator=torch.Generator().manual_seed(0))
    target, mtp = small_models(cfg=cfg)
    stage = Stage(target, mtp, MTPLoss("ec"), small_drafter(cfg, name) if name else None)
    loss, measures = step_gradients(stage, RECIPE, windows, 3, micro_batch=2, measure=True)
    gradients = [p.grad for m in stage.trained for p in m.parameters()]
    return [loss, *(value.double() for value in measures.values()), *gradients]


def test_two_processes_give_the_losses_of_one_with_the_whole_batch(data, train_script, tmp_path):
    flags = ["--data", str(data), "--steps", "6", "--drafter-steps", "6", "--batch", "4"]
    logs = []
    for n in (1, 2):
        ran = run_processes(n, train_script, *flags, "--out", str(tmp_path / f"out{n}"))
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.count("try it:") == 1 and ("2 processes" in ran.stdout) == (n == 2)
        logs.append(log_of(tmp_path / f"out{n}"))
    assert len(logs[0]) == len(logs[1]) > 16
    for one, two in zip(*logs):
        assert one.keys() == two.keys() and one["step"] == two["step"]
        for a, b in ((one, two), (one.get("eval", {}), two.get("eval", {}))):
            for key in a.keys() - {"eval", "stage"}:
                # Muon lets rounding grow
                assert a[key] == pytest.approx(b[key], rel=1e-4, abs=0.005), key


def test_a_batch_that_processes_cannot_share_is_one_line(data, train_script, tmp_path):
    ran = run_processes(2, train_script, "--data", str(data), "--batch", "3", "--out",
                        str(tmp_path / "out"))
    assert ran.returncode != 0
    assert ran.stderr.count("error: --batch is 3, shared by 2 processes") == 1


def test_ctrl_c_of_two_processes_saves_after_the_same_step(data, train_script, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
               "2", str(train_script), "--data", str(data), "--steps", "100000", "--batch", "2",
               "--out", str(tmp_path / "out")]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True,
                               stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    for _ in range(1800):
        time.sleep(0.1)
        if (tmp_path / "out" / "log.jsonl").exists():
            break
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does
    _, error = running.communicate(timeout=60)
    again = "Go on with: torchrun --nproc-per-node 2 train.py"
    assert error.count(again) == 1 and "saved in" in error, error
    checkpoint = torch.load(tmp_path / "out" / "target.pt", weights_only=True)
    assert checkpoint["training"]["step"] > 0


def test_ctrl_c_while_processes_ask_each_other_is_heard_the_next_time(monkeypatch):
    ctrl_c = train.CtrlC()

    def others_are_slow(tensors):
        ctrl_c.asked = True  # when this process's answer is already on its way

    monkeypatch.setattr(train, "process", lambda: (0, 2))
    monkeypatch.setattr(train, "average_over_processes", others_are_slow)
    assert not ctrl_c.anywhere()
    assert ctrl_c.anywhere()


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(run, monkeypatch, capsys):
    _, out = run("--stage", "target")
    before = (out / "target.pt").read_bytes()
    nan = torch.tensor(float("nan"), requires_grad=True)
    monkeypatch.setattr(train, "stage_loss", lambda *a: (nan, {"next_loss": nan}))
    assert run("--stage", "target", "--overwrite")[0] == 1
    assert "at step 1:" in capsys.readouterr().err
    assert (out / "target.pt").read_bytes() == before


def test_ctrl_c_finishes_the_step_saves_and_names_the_command_to_go_on(data, tmp_path):
    command = [sys.executable, str(ROOT / "train.py"), "--data", str(data), "--out", str(tmp_path),
               "--steps", "2000", "--batch", "1", "--optimizer", "adamw"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True,
                               stdout=subprocess.DEVNULL)
    for _ in range(1800):
        time.sleep(0.1)
        if (tmp_path / "log.jsonl").exists():
            break
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 130
    assert "Traceback" not in error
    assert error.strip().splitlines()[-1].startswith("stopped after step")
    assert "--resume" in error
    checkpoint = torch.load(tmp_path / "target.pt", weights_only=True)
    assert 0 < checkpoint["training"]["step"] < 2000


@pytest.mark.parametrize("moment", ["evaluate", "save_checkpoint"])
def test_ctrl_c_in_a_stages_last_step_stops_before_the_next_stage(run, monkeypatch, capsys, moment):
    function = getattr(train, moment)

    def interrupted(*settings):
        signal.raise_signal(signal.SIGINT)
        return function(*settings)

    with monkeypatch.context() as patch:
        patch.setattr(train, moment, interrupted)
        status, out = run("--steps", "1")
    assert status == 130 and not (out / "dmtp.pt").exists()
    assert "stopped after step 1 of 1" in capsys.readouterr().err
    assert run("--steps", "1", "--resume")[0] == 0 and (out / "dmtp.pt").exists()
    assert "target.pt is there" in capsys.readouterr().out


@pytest.mark.parametrize("typed, saves, wanted", [
    ("--out .", None, "--out . --resume"), ("--out .", "target.pt", "--out . --resume"),
    ("--out . --resume", None, "--out . --resume"),
    ("--out . --overwrite", None, "--out . --overwrite"),
    ("--out . --overwrite", "target.pt", "--out . --overwrite --resume"),
    ("--out . --overwrite", "dmtp.pt", "--out . --overwrite --resume"),
    ("--out . --compare ec --overwrite", None, "--out . --compare ec --overwrite"),
    ("--out . --compare ec --overwrite", "compare.json", "--out . --compare ec")])
def test_the_command_to_go_on_with_overwrites_again_only_while_nothing_new_was_saved(
        monkeypatch, capsys, tmp_path, typed, saves, wanted):
    """Wherever Ctrl-C comes: in set-up, between the stages, or a second time."""
    for name in ("target.pt", "dmtp.pt", "compare.json"):  # of an earlier run
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (1, 1))

    def stopped(args):
        if saves:
            (tmp_path / saves).write_text("new")
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "run", stopped)
    monkeypatch.chdir(tmp_path)
    assert train.main(typed.split()) == 130
    assert capsys.readouterr().err == f"\nstopped. Go on with: python train.py {wanted}\n"


def test_a_drafter_is_trained_on_the_data_of_its_target(run, monkeypatch, capsys):
    run("--stage", "target")
    asked = []
    monkeypatch.setattr(train, "ready_data", lambda name: asked.append(name) or name)
    _, out = run("--stage", "drafter")
    command = ["--stage", "drafter", "--drafter", "dflash", "--drafter-steps", "2", "--batch", "2"]
    assert train.main([*command, "--out", str(out)]) == 0
    assert len(set(asked)) == 1 and (out / "dflash.pt").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_missing_gpu_is_one_line(run, capsys):
    assert run("--device", "cuda")[0] == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_labels_and_size_are_settings_that_a_checkpoint_keeps(run, capsys):
    _, out = run("--size", "tiny", "--labels", "hard")
    assert "--labels" not in capsys.readouterr().err
    assert run("--size", "tiny", "--labels", "soft")[0] == 1
    assert "labels hard (there) / soft (asked)" in capsys.readouterr().err
    assert torch.load(out / "target.pt", weights_only=True)["settings"]["size"] == "tiny"


def test_overwrite_and_resume_together_go_on_with_an_interrupted_overwriting(run, monkeypatch):
    run()
    lr, steps = train.get_lr, []
    monkeypatch.setattr(train, "get_lr", lambda step, r: steps.append(step) or lr(step, r))

    class StopAfter3(train.CtrlC):
        asked = property(lambda self: len(steps) == 3, lambda self, value: None)

    monkeypatch.setattr(train, "CtrlC", StopAfter3)
    assert run("--seed", "5", "--overwrite")[0] == 130
    assert run("--seed", "5", "--overwrite", "--resume")[0] == 0
    assert steps == list(range(8)) * 2  # the target in two parts, and its drafter


def test_a_damaged_log_is_named_in_one_line(run, capsys):
    _, out = run("--stage", "target")
    with open(out / "log.jsonl", "a") as f:
        f.write('{"stage": "tar')
    assert run("--stage", "target", "--overwrite")[0] == 1
    error = capsys.readouterr().err
    assert "log.jsonl" in error and error.count("\n") == 1


@pytest.mark.parametrize("flags, word", [
    (["--device", "tpu"], "cpu, cuda"), (["--device", "cpu:x"], "cpu, cuda"),
    (["--data", "no-such"], "prepare.py"), (["--dtype", "tf32"], "tf32 is for GPUs"),

    (["--stage", "drafter"], "train.py")])
def test_mistakes_end_in_one_line_that_says_what_to_do(run, capsys, flags, word):
    assert run(*flags, out="empty")[0] == 1
    error = capsys.readouterr().err
    assert word in error and error.count("\n") == 1


@pytest.mark.parametrize("error, words", [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has .."),
     "CUDA out of memory. Tried to allocate 2.00 GiB)"),
    (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be .."),
     "(CUDA error: out of memory)"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
     "CUBLAS_STATUS_ALLOC_FAILED"),
    (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "CUDNN_STATUS_ALLOC_FAILED"),
    (MemoryError("Unable to allocate 3.00 GiB"), "Unable to allocate 3.00 GiB"), (None, "bytes")])
def test_a_full_memory_is_one_line_that_says_what_to_do(run, capsys, monkeypatch, error, words):
    def fail(*settings):
        if error:
            raise error
        torch.empty(1 << 50)  # the system's own refusal

    monkeypatch.setattr(train, "step_gradients", fail)
    assert run("--stage", "target")[0] == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: out of memory") and words in last and "--micro-batch" in last


def test_a_drafter_of_another_size_than_its_target_is_refused(run, capsys):
    run("--stage", "target")
    assert run("--stage", "drafter", "--size", "59m")[0] == 1
    assert "is of size tiny, --size is 59m" in capsys.readouterr().err


@pytest.mark.parametrize("wanted, index", [(None, 0), ("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_gpu_always_has_the_number_that_torch_wants_of_the_current_device(monkeypatch, wanted,
                                                                           index):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device(wanted) == torch.device("cuda", index)
    with pytest.raises(ValueError, match="torch sees 2"):
        pick_device("cuda:2")


@pytest.mark.parametrize("wanted", ["tpu", "cuda:x", "cuda:", "cpu:0", "meta", "cuda:99999",
                                    "cuda:00", "cuda:200"])
def test_a_device_that_is_none_of_ours_is_named_with_what_is_allowed(wanted):
    with pytest.raises(ValueError, match="allowed: cpu, cuda, cuda:N"):
        pick_device(wanted)


def test_a_fault_that_is_not_a_full_memory_is_not_hidden(run, monkeypatch):
    def fail(*settings):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(train, "step_gradients", fail)
    with pytest.raises(RuntimeError, match="illegal"):
        run("--stage", "target")


@pytest.mark.parametrize("flags", [["--steps", "0"], ["--lr", "-1"], ["--seed", "-1"],
                                   ["--lr", "nan"], ["--lr", "inf"],
                                   ["--drafter", "x"],
                                   ["--mtp-loss", "x"], ["--ec-mtp", "--mtp-loss", "kl"]])
def test_bad_flags_are_refused_before_anything_runs(flags, capsys):
    with pytest.raises(SystemExit) as stop:
        train.main(flags)
    assert stop.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_learning_rate_rises_over_the_warm_up_and_falls_to_zero_by_hand():
    recipe = Recipe(**{**vars(RECIPE), "steps": 10, "warmup": 2})
    rates = [get_lr(step, recipe) for step in range(10)]
    assert rates == [0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]


def test_batches_follow_from_seed_and_step_alone():
    tokens = torch.arange(1000).numpy().astype("uint16")
    a, b, c = (get_batch(tokens, 8, 4, 1, step) for step in (5, 5, 6))
    assert a.shape == (4, 9) and a.dtype == torch.int64
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert torch.equal(a[:, 1:], a[:, :-1] + 1)
    last = get_batch(tokens[:9], 8, 4, 1, 0)
    assert torch.equal(last, torch.arange(9).expand(4, 9))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_each_parameter_has_one_optimizer_and_only_hidden_matrices_decay(optimizer):
    target, mtp = small_models()
    recipe = Recipe(**{**vars(RECIPE), "optimizer": optimizer, "weight_decay": 0.1})
    both = torch.nn.ModuleList([target, mtp])
    groups = [g for o in make_optimizers(both, recipe) for g in o.param_groups]
    ids = [id(p) for g in groups for p in g["params"]]
    assert sorted(ids) == sorted(id(p) for m in (target, mtp) for p in m.parameters())
    decayed = {id(p) for g in groups if g["weight_decay"] for p in g["params"]}
    hidden = {id(p) for m in (target, mtp) for n, p in m.named_parameters()
              if p.dim() == 2 and "embed_tokens" not in n and "lm_head" not in n}
    assert decayed == hidden


def test_muon_on_a_cpu_takes_the_step_of_newton_schulz_in_float32():
    torch.manual_seed(0)
    p, g = torch.nn.Parameter(torch.randn(6, 10)), torch.randn(6, 10)
    before = p.detach().clone()
    muon = torch.optim.Muon([p], lr=0.1, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    p.grad = g.clone()
    with KeepFloat32():
        muon.step()
    buffer = 0.05 * g
    x = 0.05 * g + 0.95 * buffer
    x = x / x.norm()
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    step = before - 0.1 * 0.2 * 10 ** 0.5 * x
    assert p.dtype == torch.float32
    torch.testing.assert_close(p.detach(), step, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"),
                    reason="not glibc")
def test_a_large_tensor_made_again_costs_no_new_pages_once_memory_is_kept():
    script = """
import resource, torch
from train import keep_freed_memory

def new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(64 << 20, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

given_back = [new_pages() for _ in range(3)]
keep_freed_memory()
kept = [new_pages() for _ in range(3)]
print(given_back[-1], kept[-1])
"""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True,
                         check=True, env=clean | {"THP_MEM_ALLOC_ENABLE": "0"})
    given_back, kept = map(int, ran.stdout.split())
    pages = (64 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert kept < pages / 100
    assert given_back > kept  # all of them, or fewer where the system lends huge pages


def test_the_log_holds_one_json_object_a_line_with_losses_and_measures(run):
    _, out = run()
    lines = log_lines(out)
    assert {line["stage"] for line in lines} == {"target", "dmtp"}
    assert all(0 <= line["agreement"] <= 1 for line in lines if "agreement" in line)
    final = [line["eval"] for line in lines if "eval" in line and line["stage"] == "target"][-1]
    assert final["accept_sampled"] + final["tv"] == pytest.approx(1, abs=1e-6)
    assert os.listdir(out).count("log.jsonl.tmp") == 0
