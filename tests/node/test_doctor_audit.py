"""What the doctor says of fanotify and the kernel's audit."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.node.doctor import audit
from shoal.node.doctor.finding import Finding, Scene
from shoal.node.doctor.probe import PROBES, examine


def finding(id: str, folder: Path) -> Finding:
    (probe,) = (probe for probe in PROBES if probe.id == id)
    return examine(probe, Scene(str(folder), str(folder)))


@pytest.mark.root
def test_fanotify_is_tried(tmp_path: Path) -> None:
    found = finding("audit.fanotify", tmp_path)
    assert found.status == "ok", found


def test_without_root_it_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "FAN_CLOEXEC", 1 << 30)  # the kernel refuses the call, as it does without root
    found = finding("audit.fanotify", tmp_path)
    assert found.status == "absent"
    assert "root" in found.fix


@pytest.mark.root
def test_the_kernel_s_audit_is_asked(tmp_path: Path) -> None:
    found = finding("audit.kernel", tmp_path)
    assert found.detail.startswith({"ok": "on", "absent": "off"}[found.status])
