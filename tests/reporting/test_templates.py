"""Templates: what comes from a run is text, never markup, and nothing is left out in silence."""

from __future__ import annotations

import pytest
from jinja2 import UndefinedError

from treeprop_ray.reporting.page import Table
from treeprop_ray.reporting.templates import ENVIRONMENT, render

VALUES = {
    "name": "<script>", "subtitle": "a & b", "scores": Table(["path"], [["<b>"]]), "probe": None,
    "pictures": [], "command": "train x='<'", "origin": "", "changed": Table([], []),
    "settings": "</pre>",
}  # fmt: skip


def test_markup_in_values_is_shown_as_text() -> None:
    text = render("report.html", **VALUES)
    for shown in ("&lt;script&gt;", "a &amp; b", "<td>&lt;b&gt;</td>", "<pre>&lt;/pre&gt;</pre>"):
        assert shown in text
    assert "<script" not in text


def test_a_missing_value_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="settings"):
        render("report.html", **{k: v for k, v in VALUES.items() if k != "settings"})


def test_every_template_can_be_read() -> None:
    for name in ENVIRONMENT.list_templates():
        ENVIRONMENT.get_template(name)
