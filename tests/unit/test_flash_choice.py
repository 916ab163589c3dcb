"""train.flash_attention: what is asked of torch, and what is told where a package is not there."""

from pathlib import Path

import pytest
import torch

from launcher.errors import UserError
from launcher.training import flash
from launcher.training.flash import choose_flash_attention
from launcher.training.start import start_checks
from modeling.kernels.attention import fits_rows

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.mark.parametrize("version", [3, 4])
def test_a_package_that_is_not_there_is_refused_in_one_line(version: int) -> None:
    """torch's own registry looks for it: none of these packages is among the project's."""
    with pytest.raises(UserError) as refused:
        choose_flash_attention(version, GPU)
    line = str(refused.value)
    assert "\n" not in line
    assert line.startswith(f"train.flash_attention={version} needs a package") and "ModuleNotFoundError" in line
    assert line.endswith(f"install {flash.PACKAGES[version]}, or set train.flash_attention=2")


@pytest.mark.parametrize("version", [3, 4])
def test_a_start_on_a_gpu_looks_for_the_package_before_it_creates_anything(
    monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    assert "flash attention" in start_checks()
    flash.check_flash_attention(version)  # no GPU here
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(UserError, match=f"^train.flash_attention={version} needs .*no module {flash.MODULES[version]}"):
        flash.check_flash_attention(version)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    flash.check_flash_attention(version)


@pytest.mark.parametrize("error", ["OSError('libcudart.so.12: no such file')", "AttributeError('cute')"])
def test_a_package_that_does_not_import_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: str
) -> None:
    """As one is that was built for another CUDA."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(UserError) as refused:
        flash.check_flash_attention(4)
    (line,) = refused.value.problems
    assert error.partition("(")[0] in line and line.endswith("or set train.flash_attention=2")


def test_torchs_own_and_a_cpu_need_none() -> None:
    choose_flash_attention(2, GPU)
    choose_flash_attention(3, CPU)


def test_the_version_is_put_in_the_place_of_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and then rows of one document go to it as well."""
    asked: list[str] = []
    rows = torch.empty(1, 128, 4, 64)
    assert fits_rows(rows, rows)
    monkeypatch.setattr(flash, "activate_flash_attention_impl", asked.append)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    choose_flash_attention(3, GPU)
    for module in ("launcher.training.flash", "modeling.kernels.attention"):
        monkeypatch.setattr(f"{module}.current_flash_attention_impl", lambda: "FA3")
    choose_flash_attention(3, GPU)
    assert asked == ["FA3"]
    assert not fits_rows(rows, rows)


@pytest.mark.parametrize(("version", "capability"), [(3, (8, 0)), (3, (10, 0)), (4, (8, 9)), (4, (12, 0))])
def test_a_gpu_that_cannot_run_it_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, version: int, capability: tuple[int, int]
) -> None:
    """As torch's own functions say, which ask in each pass (torch.nn.attention._fa3, _fa4)."""
    monkeypatch.setattr(flash, "activate_flash_attention_impl", lambda name: None)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA Elder")
    with pytest.raises(UserError, match=r"needs a GPU of compute capability 9\.x.*, not NVIDIA Elder") as refused:
        choose_flash_attention(version, GPU)
    assert len(refused.value.problems) == 1


def test_a_torch_without_its_backward_pass_is_refused_before_anything_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """2.11 answers "windowed attention not supported" to FlashAttention 4's backward pass as varlen_attn calls it."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(flash, "installed", lambda name: "2.11.0+cu130")
    flash.check_flash_attention(3)
    for refuse in (lambda: flash.check_flash_attention(4), lambda: choose_flash_attention(4, GPU)):
        with pytest.raises(UserError, match=r"needs torch 2\.12 or newer, not 2\.11\.0\+cu130.*attention=2$"):
            refuse()
    monkeypatch.setattr(flash, "installed", lambda name: "2.12.0")
    flash.check_flash_attention(4)
