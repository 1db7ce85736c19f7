"""`ray up`, `ray job submit`, `ray down` of clusters/onprem.yaml against an sshd on loopback.

    unshare --mount --pid --fork --kill-child --mount-proc --net python tests/roundtrip.py FOLDER

`ray down` ends every Ray process it can see, so this runs as process 1 of a process namespace of
its own, and refuses to run otherwise. The network is a loopback of its own; the user's home (as
told by /etc/passwd) and /tmp/ray are folders of FOLDER. Prints a transcript; its last line names
the processes that survived.
"""

from __future__ import annotations

import getpass
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent
FORWARD = 8266  # the cluster's own dashboard has 8265 of the same loopback


def quietly(*words: object) -> None:
    subprocess.run([str(w) for w in words], check=True, stdout=subprocess.DEVNULL)


def prepare(folder: Path) -> Path:
    """Loopback, private home and Ray folder, sshd, and the cluster file for 127.0.0.1."""
    home, session, keys = folder / "home", folder / "ray", folder / "keys"
    for each in (
        home / ".ssh",
        home / "shared",
        session,
        keys,
        Path("/tmp/ray"),
        Path("/run/sshd"),
    ):
        each.mkdir(parents=True, exist_ok=True)
    quietly("ip", "link", "set", "lo", "up")
    me, accounts = getpass.getuser(), folder / "passwd"
    rows = [row.split(":") for row in Path("/etc/passwd").read_text().splitlines()]
    told = [[*row[:5], str(home), "/bin/bash"] if row[0] == me else row for row in rows]
    accounts.write_text("".join(":".join(row) + "\n" for row in told))
    quietly("mount", "--bind", accounts, "/etc/passwd")
    os.environ["HOME"] = str(home)
    quietly("mount", "--bind", session, "/tmp/ray")
    for name in ("host", "user"):
        quietly("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / name)
    shutil.copy(keys / "user.pub", home / ".ssh" / "authorized_keys")
    (home / ".bashrc").write_text(
        f"export PATH={BIN}:$PATH PYTHONPATH=~/treeprop OMP_NUM_THREADS=1\n"
    )
    options = {
        "ListenAddress": "127.0.0.1:22", "HostKey": keys / "host", "PasswordAuthentication": "no",
        "UsePAM": "no", "StrictModes": "no", "PidFile": "none",
    }  # fmt: skip
    (keys / "sshd_config").write_text("".join(f"{k} {v}\n" for k, v in options.items()))
    quietly(
        shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin"), "-f", keys / "sshd_config"
    )
    config = yaml.safe_load((ROOT / "clusters" / "onprem.yaml").read_text())
    config["provider"].update(head_ip="127.0.0.1", worker_ips=[])
    config["auth"] = {"ssh_user": me, "ssh_private_key": str(keys / "user")}
    config["initialization_commands"] = ["test -w ~/shared"]
    config["setup_commands"] = ["python -c 'import ray, torch'"]  # installed already
    target = folder / "onprem.yaml"
    target.write_text(yaml.safe_dump(config))
    return target


def run(folder: Path, *words: str, show: bool = True) -> None:
    """Run a command and show it as in a terminal."""
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if show:
        print(clean(f"$ {shlex.join(words)}\n{done.stdout}", folder), flush=True)
    if done.returncode:
        print(f"exit code {done.returncode}", flush=True)


def clean(text: str, folder: Path) -> str:
    """Without colours, time stamps, this machine's folder, and what Ray says only to itself."""
    kept = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).replace(str(folder), "FOLDER").splitlines():
        stamp = re.match(r"[-\d]+ [:,\d]+\t(\w+) (\w+)\.py:\d+ -- ?", line)
        verbose = stamp and (stamp[1] in ("VINFO", "VVINFO", "VWARN", "WARN"))
        internal = stamp and stamp[2] in ("node_provider", "command_runner", "cli_output_helpers")
        mount = line.startswith(" To ensure this mount")
        if not (verbose or internal or mount):
            kept.append(line[stamp.end() :] if stamp else line)
    return "\n".join(kept).rstrip()


def without_token() -> int:
    """What the dashboard answers to somebody who has no token."""
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{FORWARD}/api/jobs/", timeout=10)
    except urllib.error.HTTPError as e:
        return e.code
    return 200


def survivors() -> list[str]:
    """Command lines of all other processes of this namespace; sshd is ours."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name not in ("1", str(os.getpid())):
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError:
                continue
            found += [line] if line and "sshd" not in line else []
    return found


def round_trip(folder: Path) -> None:
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["PATH"] = f"{BIN}:{os.environ['PATH']}"
    os.environ.pop("RAY_ADDRESS", None)
    file = str(prepare(folder))
    os.chdir(ROOT)
    print("$ export RAY_AUTH_MODE=token\n$ ray get-auth-token --generate > /dev/null")
    run(folder, "ray", "get-auth-token", "--generate", show=False)
    run(folder, "ray", "up", "--yes", "--no-config-cache", "--disable-usage-stats", file)
    forward = subprocess.Popen(
        ["ray", "dashboard", "--port", str(FORWARD), file],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    print(f"$ ray dashboard --port {FORWARD} FOLDER/onprem.yaml &")
    answer = 0
    for _ in range(100):
        try:
            answer = without_token()
            break
        except OSError:
            time.sleep(0.3)
    print(f"(without the token the dashboard answers {answer})")
    os.environ["RAY_API_SERVER_ADDRESS"] = f"http://127.0.0.1:{FORWARD}"
    print(f"$ export RAY_API_SERVER_ADDRESS=http://127.0.0.1:{FORWARD}")
    train = (
        "python -m treeprop_ray.train engine=ray placement=packed hosts=2 cpus_per_actor=0.5 "
        "steps=100 name=first out=shared/runs"
    )
    run(folder, "ray", "job", "submit", "--", "bash", "-c", f"cd ~ && {train}")
    run(folder, "ray", "rsync-down", file, "~/shared/runs/", f"{folder}/fetched/")
    run(folder, "ls", f"{folder}/fetched/first")
    os.killpg(forward.pid, 15)
    forward.wait()
    run(folder, "ray", "down", "--yes", file)
    deadline = time.monotonic() + 20
    while (left := survivors()) and time.monotonic() < deadline:
        time.sleep(0.2)
    print(f"processes left: {left or 'none'}")


def main() -> None:
    if os.getpid() != 1:
        sys.exit("refused: not in a process namespace of its own, `ray down` would end others' Ray")
    child = os.fork()
    if child == 0:
        round_trip(Path(sys.argv[1]).resolve())
        return
    while True:  # process 1 must reap orphans, else `ray stop` waits for them
        ended, status = os.wait()
        if ended == child:
            sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
