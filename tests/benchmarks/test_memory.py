"""How much memory a process and its children hold."""

import os
import subprocess
import sys

from treeprop_ray.benchmarks.gpt import family_of, memory_of


def test_memory_counts_a_process_and_its_children() -> None:
    before = memory_of(os.getpid())
    held = "x = b'1' * 100_000_000; print(len(x), flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", held], **pipes) as child:  # type: ignore[call-overload]
        child.stdout.readline()
        assert child.pid in family_of(os.getpid())
        assert memory_of(os.getpid()) > before + 90_000_000
        child.communicate(b"\n")
