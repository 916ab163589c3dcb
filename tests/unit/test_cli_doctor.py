"""`roundtable doctor`: findings from what a machine says, and the exit code."""

import json

import pytest

import launcher.commands.doctor as doctor
from launcher.commands.doctor import Finding


def finished(code: str):
    return doctor._start(code)


def test_a_library_that_breaks_is_told_with_its_last_line():
    broken = doctor._library("deepspeed", finished("raise ImportError('no such file: libcuda.so')"))
    assert (broken.verdict, broken.found) == ("fails", "ImportError: no such file: libcuda.so")
    assert doctor._library("pytest", finished("pass")).verdict == "ok"


def test_a_child_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(doctor, "_IMPORT_TIMEOUT_SECONDS", 0.2)
    assert doctor._finish(finished("import time; time.sleep(60)")) == ("", "no answer within 0.2 s")


def torch_says(**changes) -> list[Finding]:
    said = {"version": "2.13.0", "cuda": None, "gloo": True, "nccl": False, "devices": [], **changes}
    return list(doctor._torch(finished(f"print({json.dumps(said)!r})")))


def test_what_torch_says():
    h200 = {"name": "H200", "gib": 139.7, "capability": [9, 0]}
    assert [finding.verdict for finding in torch_says()] == ["ok", "ok", "lacks"]
    assert [finding.verdict for finding in torch_says(cuda="13.0", nccl=True, devices=[h200])] == ["ok", "ok", "ok"]
    assert [finding.verdict for finding in torch_says(cuda="13.0", devices=[h200])] == ["ok", "fails", "ok"]
    assert [finding.verdict for finding in torch_says(gloo=False)] == ["ok", "fails", "lacks"]
    v100 = {"name": "V100", "gib": 16.0, "capability": [7, 0]}
    assert torch_says(cuda="13.0", nccl=True, devices=[v100])[-1].remedy == "no bf16 units: train.precision=fp16"
    (missing,) = doctor._torch(finished("import torch_that_is_not_there"))
    assert missing.verdict == "fails"


@pytest.mark.parametrize(
    ("code", "verdict", "found"),
    [
        ("print('online')", "ok", "found: runs are logged online"),
        ("print('offline')", "lacks", "metrics.wandb.mode=auto means offline here"),
        ("print('disabled')", "lacks", "metrics.wandb.mode=auto means disabled here"),
        ("raise ImportError('wandb')", "lacks", "metrics.wandb.mode=auto means offline here"),
    ],
)
def test_what_wandb_would_do(code, verdict, found):
    finding = doctor._wandb_mode(finished(code))
    assert (finding.verdict, finding.found) == (verdict, found)


@pytest.mark.parametrize(("verdict", "code"), [("ok", 0), ("lacks", 0), ("fails", 1)])
def test_the_exit_code_says_whether_training_can_work(capsys, monkeypatch, verdict, code):
    monkeypatch.setattr(doctor, "examine", lambda: [Finding("python", "3.11"), Finding("torch", "[x]", verdict, "do")])
    assert doctor.print_report(as_json=True) == code
    report = json.loads(capsys.readouterr().out)
    assert report["can_train"] is (code == 0)
    assert report["findings"][1] == {"topic": "torch", "found": "[x]", "verdict": verdict, "remedy": "do"}
    assert doctor.print_report(as_json=False) == code
    assert "[x]" in capsys.readouterr().out


def test_whether_kernels_can_be_compiled(monkeypatch):
    monkeypatch.setenv("CXX", "/bin/sh -e")
    assert Finding("C++ compiler", "/bin/sh -e") in doctor._processor()
    for command, found in (
        ("/opt/bin/g++", "CXX=/opt/bin/g++ is not there"),
        ("g++ 'open", "CXX=g++ 'open is not there"),
        ("", "none"),
    ):
        monkeypatch.setenv("CXX", command)
        monkeypatch.setenv("PATH", "/none")
        (missing,) = (finding for finding in doctor._processor() if finding.topic == "C++ compiler")
        assert (missing.found, missing.verdict) == (found, "lacks") and "install g++" in missing.remedy


def test_the_machine_itself_is_read():
    findings = [
        doctor._python(),
        *doctor._processor(),
        doctor._memory(),
        doctor._shared_memory(),
        doctor._disk(),
        doctor._slurm(),
    ]
    assert all(finding.found for finding in findings)


def test_a_variable_that_slows_each_product_is_told(monkeypatch):
    monkeypatch.delenv(doctor.CUBLAS, raising=False)
    assert list(doctor._variables()) == []
    monkeypatch.setenv(doctor.CUBLAS, ":4096:8")
    (finding,) = doctor._variables()
    assert (finding.verdict, finding.found) == ("lacks", ":4096:8") and "train.deterministic" in finding.remedy
