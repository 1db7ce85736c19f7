"""The mutants of `make mutants` still change lines that are there."""

from mutants import MUTANTS, ROOT


def test_every_mutant_changes_one_line_and_its_tests_exist() -> None:
    for file, line, change, tests in MUTANTS:
        text = (ROOT / "treeprop_ray" / file).read_text()
        assert text.count(line) == 1 and change != line, (file, line)
        assert all((ROOT / path).exists() for path in tests.replace("|", " ").split())
