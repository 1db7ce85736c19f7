"""The documentation builds strictly, its pictures come from the code, and its commands are real."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import treeprop_ray
from treeprop_ray.__main__ import COMMANDS, main
from treeprop_ray.config import LOCAL, PUBLISHED, RUNS, Settings, walk

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", "clusters/README.md"]
PAGES += sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
TEXTS = {name: (ROOT / name).read_text() for name in PAGES}
FENCED = re.compile(r"^```(?:bash|console|sh|)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:treeprop |python -m treeprop_ray\.)[^`]+)`")
OURS = re.compile(r"(?:python -m treeprop_ray\.|treeprop )(.+)")
# what a page may tell a user to type besides our own commands and make: not run here
OTHERS = {"ray", "kubectl", "export", "ls", "bash", "for", "sleep"}


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec and spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def typed(text: str) -> Iterator[str]:
    """What the code blocks of a page have a user type."""
    for block in FENCED.findall(text):
        lines = block.splitlines()
        shown = [line[2:] for line in lines if line.startswith("$ ")]
        starts = ("treeprop ", "python -m", "make ", *(f"{name} " for name in OTHERS))
        yield from shown or [line for line in lines if line.startswith(starts)]


def commands() -> Iterator[tuple[str, str]]:
    """(page, our command), from code blocks, from inside other commands and from the text."""
    for page, text in TEXTS.items():
        found = [*typed(text), *(" ".join(inline.split()) for inline in INLINE.findall(text))]
        for line in dict.fromkeys(found):
            if (ours := OURS.search(line)) and not re.search("…|<command>", line):
                yield page, ours[1].rstrip("'")


EVERY = sorted(set(commands()))


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    """A link that leads nowhere, in docs, results or clusters, is a warning; strict: an error."""
    pytest.importorskip("mkdocs")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    api = (tmp_path / "api.html").read_text()
    assert all(
        re.search(rf'id="treeprop_ray\.[\w.]*\.{name}"', api) for name in treeprop_ray.__all__
    )
    assert 'TreeNetwork.from_blocks"' in api
    settings = (tmp_path / "settings.html").read_text()
    keys = [key for key, _, _ in walk(Settings())]
    assert all(f"<code>{key}</code>" in settings for key in keys)
    assert all(f'id="{name}"' in settings for name in COMMANDS)


def test_a_broken_link_is_found() -> None:
    site = module("site")
    assert site.target("own.md", "../examples/own_cell.py") == "examples/own_cell.py"
    assert site.target("own.md", "../examples/none.py") == ""
    assert site.target("results/index.md", "probe.md") == "results/probe.md"


def test_links_of_the_readme_lead_somewhere() -> None:
    for page in ("README.md", "CONTRIBUTING.md"):
        links = re.findall(r"\]\(([^)#]+)", TEXTS[page])
        assert links and [link for link in links if not (ROOT / link).exists()] == []


def test_the_tests_that_reliability_names_exist() -> None:
    """A name with … is the beginning of one; a file beside it has it."""
    text = " ".join(TEXTS["docs/reliability.md"].split())
    files = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    sources = "".join(files.values())
    named = re.findall(r"`(?:(tests/[\w/]+\.py): )?(test_\w+)(…?)[`,]", text)
    assert len(named) > 40
    for file, name, is_part in named:
        where = files[ROOT / file] if file else sources
        assert f"def {name}{'' if is_part else '('}" in where, name
    for file in set(re.findall(r"tests/[\w/]+\.py", text)):
        assert (ROOT / file).is_file(), file
    loose = set(re.findall(r"test_\w+", text)) - {name for _, name, _ in named}
    assert all(any(path.stem == name for path in files) for name in loose), loose


def test_the_tests_that_own_names_exist() -> None:
    text = TEXTS["docs/own.md"]
    files = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}
    for name in set(re.findall(r"(?:tests/[\w/]+/)?test_\w+\.py", text)):
        assert name.rpartition("/")[2] in files and (ROOT / name).is_file() >= ("/" in name), name
    sources = "".join(path.read_text() for path in files.values())
    named = set(re.findall(r"`(test_\w+)(?:\[[\w-]+\])?`", text))
    assert len(named) > 20
    assert [name for name in named if f"def {name}(" not in sources] == []
    rows = [line for line in text.splitlines() if re.match(r"\| (?!wish)\w", line)]
    assert [row for row in rows if not re.search(r"test_\w+|`\[[\w-]+\]`|the same", row)] == []


def test_the_readme_has_two_screens() -> None:
    assert len(TEXTS["README.md"].splitlines()) <= 120


def test_the_picture_of_the_waves_is_the_schedules() -> None:
    waves = module("waves")
    assert (ROOT / "docs" / "waves.svg").read_text() == waves.picture(), "python docs/waves.py"
    work, ticks = waves.tree_ticks()
    assert ticks == 8 and len(work) == 2 * (waves.N - 1)


# -- commands --------------------------------------------------------------------------------------


def test_pages_have_a_user_type_known_programs_and_targets_only() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for page, text in TEXTS.items():
        for line in typed(text):
            words = line.split()
            assert words[0] in {"treeprop", "python", "make", *OTHERS}, (page, line)
            assert words[0] != "make" or words[1] in targets, (page, line)
    assert len(EVERY) > 40


@pytest.mark.parametrize("page", sorted({page for page, _ in EVERY}))
def test_the_commands_of_a_page_are_accepted(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Settings are resolved and printed (--cfg), trials listed (--dry-run); nothing is trained."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("base: digits\nspace: {lr: [0.01]}\n")
    for _, command in (entry for entry in EVERY if entry[0] == page):
        name, *words = shlex.split(command, comments=True)
        words = ["ray.num_cpus=8" if w.startswith("ray.address=") else w for w in words]
        flag = "--dry-run" if name == "tune" else "--cfg"
        code = main([name, *(w for w in words if w not in ("--cfg", "--dry-run")), flag])
        told = capsys.readouterr()
        assert code == 0, (command, told.err)
    assert list(tmp_path.iterdir()) == [tmp_path / "mine.yaml"]


# a size that takes seconds, for the commands that run here; what is not in this table is resolved
# above, by --cfg or --dry-run, and runs in the tests of its own command
SMALL = {
    "train": ["steps=2", "epochs=1", "model.hidden=12", "batch=16"],
    "generate": ["tokens=8"],
    "probe": ["batches=1", "draws=0"],
    "evaluate": [],
    "export": [],
    "report": [],
    "compare": [],
    "plan": [],
}
ELSEWHERE = re.compile(
    r"engine=|/mnt/|own\.module|openai|mnist|cifar|served|wikitext103_d6 nodes|sweep=|wide"
)


def test_commands_of_the_pages_run_and_change_no_tracked_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a clone, in a small size; what they write is where version control does not look."""
    clone = tmp_path / "clone"
    git = ["git", "-c", "advice.detachedHead=false"]
    subprocess.run([*git, "clone", "-q", "--shared", ROOT, clone], check=True)
    monkeypatch.chdir(clone)
    made = ("train name=digits", "train experiment=text_small name=text")
    typed_lines = [*made, *(line for _, line in EVERY)]
    lines = {tuple(shlex.split(line, comments=True)) for line in typed_lines}
    order = {"train": 0, "evaluate": 1}  # the others read what these two write
    ran = Counter[str]()
    for name, *words in sorted(lines, key=lambda line: (order.get(line[0], 2), line)):
        if name not in SMALL or not words or ELSEWHERE.search(" ".join(words)):
            continue
        given = [word for word in words if word.partition("=")[0] not in ("epochs", "batch")]
        assert main([name, *given, *SMALL[name]]) == 0, words
        ran[name] += 1
    assert set(ran) == set(SMALL) and ran.total() >= 14
    assert main(["probe", "mode=list", "run=results/runs/digits"]) == 0
    status = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
    assert status.returncode == 0 and status.stdout == ""
    assert (clone / LOCAL / "compare.md").is_file() and (clone / LOCAL / "plan.html").is_file()


def test_only_record_names_the_published_folder(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["tune", "sweep=alpha_beta"], ["bench", "span"], ["report"], ["probe"]):
        for more, folder in (([], LOCAL), (["--record"], PUBLISHED)):
            assert main([*words, *more, "--cfg"]) == 0
            assert f"out: {folder}\n" in capsys.readouterr().out
        assert main([*words, "--record", "out=x", "--cfg"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "out=x" in line and "--record" in line
    inside = [f"{folder}/x.md" for folder in (LOCAL, RUNS, PUBLISHED)]
    ignored = subprocess.run(["git", "check-ignore", *inside], cwd=ROOT,
                             capture_output=True, text=True)  # fmt: skip
    assert ignored.stdout.split() == inside[:2]
