"""When the tpu platform runs without a TPU: never by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.plugins import Probe
from isthmus_tpu.probe import probe


def probed(root: Path, versions: dict[str, str], **environ: str) -> Probe:
    return probe(root=root, version=versions.get, environ=environ)


MATCHING = {"torch": "2.9.0+cu128", "torch_xla": "2.9.0"}


def test_the_cpu_is_used_when_asked_for(tmp_path: Path) -> None:
    found = Probe(-1, "XLA:CPU instead of a TPU, for ISTHMUS_TPU_ON_CPU=1; torch_xla 2.9.0", 1)
    assert probed(tmp_path, MATCHING, ISTHMUS_TPU_ON_CPU="1") == found
    assert probed(tmp_path, MATCHING, ISTHMUS_TPU_ON_CPU="1", PJRT_DEVICE="CPU") == found


@pytest.mark.parametrize("value", ["0", "", "true"])
def test_the_cpu_is_not_used_otherwise(tmp_path: Path, value: str) -> None:
    assert probed(tmp_path, MATCHING, ISTHMUS_TPU_ON_CPU=value) == Probe(0, "no TPU chip on the PCI bus")


def test_a_runtime_variable_alone_is_not_asking(tmp_path: Path) -> None:
    assert probed(tmp_path, MATCHING, PJRT_DEVICE="CPU") == Probe(
        0,
        "PJRT_DEVICE='CPU' selects another device; unset it or set it to TPU, or set ISTHMUS_TPU_ON_CPU=1 to run on "
        "XLA:CPU on purpose",
    )


def test_contradictory_variables(tmp_path: Path) -> None:
    assert probed(tmp_path, MATCHING, ISTHMUS_TPU_ON_CPU="1", PJRT_DEVICE="TPU") == Probe(
        0, "ISTHMUS_TPU_ON_CPU=1, but PJRT_DEVICE='TPU'; unset one of them"
    )


def test_torch_of_another_release(tmp_path: Path) -> None:
    """torch_xla would fail to import, with an undefined symbol."""
    versions = {"torch": "2.13.0+cpu", "torch_xla": "2.9.0"}
    reason = "torch_xla 2.9.0 needs torch 2.9, but torch 2.13.0+cpu is installed"
    assert probed(tmp_path, versions, ISTHMUS_TPU_ON_CPU="1") == Probe(0, reason)


def test_no_torch_xla(tmp_path: Path) -> None:
    assert probed(tmp_path, {"torch": "2.13.0"}, ISTHMUS_TPU_ON_CPU="1") == Probe(0, "torch_xla is not installed")
