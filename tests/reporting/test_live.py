"""A run seen while it goes: only what was appended is read, and nothing that is there breaks it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from conftest import Result, StopAt, Stopped

from treeprop_ray import config, methods
from treeprop_ray.reporting.live import POINTS, Live, Tail, thinned
from treeprop_ray.reporting.serving import Server, is_loopback
from treeprop_ray.reporting.timeline import last_step
from treeprop_ray.run.trainer import Trainer

DAMAGED = b"kind,step,loss\nstep,1,nan\n\0\xff,,,\nstep,x,3\nstep,2,0.5\nstep,3,oh\nstep,4\n"
Command = Callable[..., Result]
WORDS = [
    "model.hidden=8",
    "model.blocks=3",
    "batch=128",
    "epochs=2",
    "log_every=3",
    "loggers=[csv]",
]


def trainer(out: Path, *callbacks: Any, words: tuple[str, ...] = ()) -> Trainer:
    settings = methods.checked(config.load([*WORDS, f"out={out}", "name=r", *words]))
    return Trainer.of(settings, callbacks=callbacks)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped in its second epoch and then taken up to its end."""
    out = tmp_path_factory.mktemp("runs")
    with pytest.raises(Stopped):
        trainer(out, StopAt(15)).train()
    trainer(out).train()
    return out / "r"


class Peeking(StopAt):
    """Looks at its own run as a reader would, after every step."""

    def __init__(self, folder: Path) -> None:
        super().__init__(10**9)
        self.folder, self.seen = folder, []  # type: ignore[var-annotated]
        self.live: Live | None = None

    def on_step(self, run: Trainer, done: int) -> None:
        self.live = self.live or Live(str(self.folder))
        known = self.seen[-1] if self.seen else {"place": "", "known": 0}
        self.seen.append(self.live.now(known["place"], known["known"]))
        if done == 5:
            run.callbacks.on_notice(run, "lost node-1 (killed); back to step 0, replaying 5 steps")


def test_a_reader_sees_every_row_of_a_running_job_once(tmp_path: Path) -> None:
    peeking = Peeking(tmp_path / "r")
    run = trainer(tmp_path, peeking)
    run.train()
    assert all(now["state"] == "running" for now in peeking.seen)
    assert peeking.live is not None
    last = peeking.seen[-1]
    end = peeking.live.now(last["place"], last["known"])
    curve: list[Any] = []
    for now in (*peeking.seen, end):  # as the page does
        curve = [*([] if now["anew"] else curve), *now["curve"]]
    assert [p[0] for p in curve] == [r["step"] for r in run.log.rows if r["kind"] == "step"]
    assert not any(now["anew"] for now in peeking.seen[4:])  # nothing is read twice
    assert end["state"] == "finished" and end["recoveries"] == 1
    assert [e["kind"] for e in end["notices"]] == ["notice", "end"]
    assert set(end["last"]["places"]) == {"1", "2", "3"}
    assert end["facts"]["nodes"] == [[1, 0, 2, 2], [2, 0, 4, 1], [3, 2, 4, 2]]
    assert list(last["scores"][-1][1]) == ["spine-1", "spine-2", "full"]


def test_stopped_and_taken_up_again(run_folder: Path) -> None:
    now = Live(str(run_folder)).now()
    assert [e["kind"] for e in now["notices"]] == ["stop", "start", "end"]
    assert now["notices"][1]["step"] == 10  # the last checkpoint
    assert now["state"] == "finished" and now["best"]["epoch"] in (1, 2)
    assert now["last"]["step"] == now["facts"]["steps"] and now["pace"]["left"] == 0


def test_a_torn_line_waits_for_its_rest(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    tail = Tail(path)
    assert tail.lines() == (False, [])
    path.write_text("a,b\n1,2\n3,")
    assert tail.lines() == (True, ["a,b", "1,2"])
    with path.open("a") as file:
        file.write("4\n")
    assert tail.lines() == (False, ["3,4"]) and tail.lines() == (False, [])
    path.write_text("a,b\n")  # shrunk: taken up from an earlier checkpoint
    assert tail.lines() == (True, ["a,b"])


def test_damaged_files_are_read_as_far_as_they_go(run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((run_folder / "config.yaml").read_text())
    live = Live(str(tmp_path))
    assert live.now()["state"] == "waiting"  # Ray may still be starting
    (tmp_path / "metrics.csv").write_bytes(DAMAGED)
    (tmp_path / "events.jsonl").write_text('{"kind": 1}\n[]\nnot json\n{"kind": "start", "ti')
    (tmp_path / "timeline.json").write_text('{"traceEvents": [{"ph": "X"}]}')
    now = live.now()
    assert (
        now["curve"] == [[1, None, None], [2, 0.5, None], [3, None, None]] and now["waves"] is None
    )
    json.dumps(now, allow_nan=False)


def test_a_long_curve_is_thinned_and_keeps_its_end() -> None:
    rows = [{"step": k} for k in range(5 * POINTS + 3)]
    kept = thinned(rows)
    assert len(kept) <= POINTS and kept[-1] == rows[-1] and thinned(rows[:7]) == rows[:7]


def test_the_waves_are_of_a_step_that_every_actor_has_finished() -> None:
    def call(tid: int, step: int, ts: float) -> dict[str, Any]:
        return {"ph": "X", "tid": tid, "cat": "forward", "name": "forward level 2", "ts": ts,
                "dur": 2000.0, "args": {"step": step, "piece": 0}}  # fmt: skip

    names = [{"ph": "M", "tid": t, "args": {"name": f"run/node-{t}"}} for t in (0, 1)]
    calls = [call(0, 7, 1000.0), call(1, 7, 5000.0), call(0, 8, 9000.0)]
    waves = last_step({"traceEvents": [*names, *calls]})
    assert waves["step"] == 7
    assert waves["actors"] == [
        {"name": "node-0", "calls": [["forward", "2", 0.0, 2.0]]},
        {"name": "node-1", "calls": [["forward", "2", 4.0, 2.0]]},
    ]


@pytest.fixture
def served(run_folder: Path) -> Iterator[Callable[..., Server]]:
    servers = []

    def serve(host: str = "127.0.0.1") -> Server:
        servers.append(Server(Live(str(run_folder)), host, 0))
        Thread(target=servers[-1].serve_forever, kwargs={"poll_interval": 0.01}).start()
        return servers[-1]

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def get(url: str, **headers: str) -> tuple[int, str, Any]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode(), e.headers


def test_the_page_and_the_data_are_all_that_is_served(served: Callable[..., Server]) -> None:
    base = served().url
    status, page, headers = get(base)
    assert status == 200 and "default-src 'none'" in headers["Content-Security-Policy"]
    assert "src=" not in page.replace("{src=", "") and "http" not in page.replace(
        "http://www.w3.org/2000/svg", ""
    ).replace("https?:", "")
    status, data, _ = get(f"{base}data?known=x&place=..%2F..")
    assert status == 200 and json.loads(data)["state"] == "finished"
    for path in ("config.yaml", "..%2Fr%2Fconfig.yaml", "../../etc/passwd", "data/", "%2e%2e/"):
        assert get(base + path)[0] == 404
    assert get(base, Host="evil.example")[0] == 403  # another name for this address
    assert get(base, Host="localhost:1")[0] == 200 and get(base, Host="[::1")[0] == 403


def test_where_others_reach_it_a_token_is_asked_for(served: Callable[..., Server]) -> None:
    server = served("0.0.0.0")
    assert f"?token={server.token}" in server.url and len(server.token) >= 20
    base = f"http://127.0.0.1:{server.server_address[1]}/"
    for word in ("", "?token=", "?token=wrong", "data?token=wrong"):
        status, text, _ = get(base + word)
        assert status == 403 and "token" in text and server.token not in text
    assert get(f"{base}?token={server.token}")[0] == 200
    assert get(f"{base}data?token={server.token}")[0] == 200


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.3.2.1", True), ("::1", True), ("localhost", True),
     ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("localhost.example", False)],
)  # fmt: skip
def test_what_counts_as_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback


def test_wrong_words_are_one_line(
    command: Command, run_folder: Path, tmp_path: Path, served: Callable[..., Server]
) -> None:
    taken = served().server_address[1]
    cases = ["run=", "run=nowhere", f"run={tmp_path}", f"run={run_folder} port=70000",
             f"run={run_folder} host=no.such.host.invalid", f"run={run_folder} port={taken}",
             f"run={run_folder} speed=2"]  # fmt: skip
    for words in cases:
        result = command("watch", *words.split())
        assert result.code == 2 and len(result.error_lines) == 1, words
        assert words.split()[-1].partition("=")[0] in result.err
