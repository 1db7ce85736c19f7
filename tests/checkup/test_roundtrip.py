"""A cluster from `ray up` to `ray down`, in namespaces of its own (tests/roundtrip.py)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = ("unshare", "ip", "mount", "ssh", "ssh-keygen", "rsync", "sshd")
MISSING = [t for t in TOOLS if not shutil.which(t, path=os.environ["PATH"] + ":/usr/sbin:/sbin")]
SCRIPT = Path(__file__).parent / "roundtrip.py"


@pytest.mark.slow
@pytest.mark.skipif(
    "TREEPROP_ROUNDTRIP" not in os.environ,
    reason="takes a minute or two: set TREEPROP_ROUNDTRIP=1",
)
@pytest.mark.skipif(bool(MISSING), reason=f"not on this machine: {', '.join(MISSING)}")
@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces and sshd on port 22 need root")
def test_up_submit_fetch_down_leaves_no_process(tmp_path: Path) -> None:
    words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--net"]
    done = subprocess.run(
        [*words, sys.executable, str(SCRIPT), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    shown = done.stdout
    assert done.returncode == 0 and "exit code" not in shown, shown
    assert "without the token the dashboard answers 401" in shown, shown
    assert re.search(r"Job 'raysubmit_\w+' succeeded", shown), shown
    assert (tmp_path / "fetched" / "first" / "summary.json").is_file()
    assert shown.rstrip().endswith("processes left: none"), shown


def test_it_refuses_to_run_where_others_have_processes(tmp_path: Path) -> None:
    """`ray down` would end their Ray."""
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True)
    assert done.returncode == 1 and "refused" in done.stderr and not list(tmp_path.iterdir())
