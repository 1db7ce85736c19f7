"""The text of an error on one line."""

from treeprop_ray.errors import first_line, one_line


def test_the_first_line_of_an_error() -> None:
    assert first_line(ValueError("\n  one\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError()"


def test_what_would_break_the_line_is_written_out() -> None:
    assert one_line(ValueError("a\nb\x1bc ü")) == "a\\nb\\x1bc ü"
