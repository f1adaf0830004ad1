"""Tests of what `paceline env --self-test` tests of attention."""

import pytest
import torch

from paceline.cli import environment
from paceline.devices import accelerator
from paceline.kernels import BackendChoice
from paceline.kernels.attention import api, self_test
from paceline.kernels.attention.self_test import SelfTest


def _with_gpus(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(accelerator, "accelerator_type", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: number)


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(accelerator, "accelerator_type", lambda: None)
    assert environment._test_attention() == []
    assert "there is no CUDA device to test the Triton attention" in capsys.readouterr().err


def test_one_device_of_each_kind_is_tested(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = ["H100", "H100", "V100", "A100"]
    _with_gpus(monkeypatch, len(kinds))
    monkeypatch.setattr(self_test, "setting_of", lambda device: kinds[device.index])
    monkeypatch.setattr(
        api, "triton_obstacle", lambda device: "too old" if kinds[device.index] == "V100" else None
    )
    monkeypatch.setattr(
        self_test,
        "run_self_test",
        lambda device: SelfTest(setting=f"{kinds[device.index]} of {device}", cases=()),
    )
    tested = [test.setting for test in environment._test_attention()]
    assert tested == ["H100 of cuda:0", "A100 of cuda:3"]
    assert "not tested on cuda:2: too old" in capsys.readouterr().err


def test_the_choice_on_every_device_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_gpus(monkeypatch, 2)
    monkeypatch.setattr(
        "paceline.kernels.explain_backend", lambda name: BackendChoice("sdpa", f"fits {name}")
    )
    expected = "cuda:0: sdpa: fits cuda:0\ncuda:1: sdpa: fits cuda:1"
    assert environment._attention_by_device() == expected
