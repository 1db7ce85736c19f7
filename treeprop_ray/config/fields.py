"""What a setting is: a dataclass field with its meaning, its range and its marks. No torch here."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import field
from functools import reduce
from typing import Any

from treeprop_ray.config.names import dotted
from treeprop_ray.errors import UserError

LARGEST = 2**53  # beyond it a float no longer holds every integer


def opt(default: Any, help: str, **rule: Any) -> Any:
    """A field with its meaning and its rule.

    low=, high=, above=: the range of a number. choices=: the values of a text; open=True: or
    package.module:factory; gone=: values that there were once, and what to do without them.
    resumable=True: may differ when a run is taken up again, as it does not change what is computed.
    changeable=True: may differ then if the user says so (resume_with_changes). of_total=True: a
    share of all steps. later=True: the program has gained it later; at its default it is left out
    of the names of runs. A list may hold `low` … `high`; single=True: one number is a list of
    one.
    """
    metadata = {"help": help, **rule}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def group(cls: type, word: str = "") -> Any:
    """A field that holds a group of settings, `<field>.<key>`; the docstring is its title.

    `<field>=x` is short for `<field>.<word>=x`, if there is a `word`.
    """
    return field(default_factory=cls, metadata={"word": word})


def walk(obj: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """All leaf settings as (dotted key, field, value)."""
    for f in dataclasses.fields(obj):
        value = getattr(obj, f.name)
        if dataclasses.is_dataclass(value):
            yield from walk(value, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, f, value


def title_of(settings: Any, key: str) -> str:
    """Title of the group that declares a key: the first line of its docstring."""
    *parents, name = key.split(".")
    holder = type(reduce(getattr, parents, settings))
    declares = next(cls for cls in holder.__mro__ if name in inspect.get_annotations(cls))
    return (declares.__doc__ or "").partition("\n")[0]


def check_field(key: str, f: dataclasses.Field[Any], value: Any) -> None:
    """Raise UserError when `value` breaks the rule of its field."""
    rule = f.metadata
    is_open = rule.get("open", False)
    for each in value if isinstance(value, list) else [value]:
        if "choices" in rule and each not in rule["choices"] and not (is_open and dotted(each)):
            more = ", or package.module:factory" if is_open else ""
            if each in rule.get("gone", {}):
                raise UserError(f"{key}={value}: no longer there ({rule['gone'][each]})")
            some = "some of" if isinstance(value, list) else "one of"
            raise UserError(f"{key}={value}: {some} {', '.join(rule['choices'])}{more}")
    for entry in value if isinstance(value, list) else []:
        check_number(key, rule, entry)
    if isinstance(value, str) and not value.isprintable():
        raise UserError(f"{key}={value}: must not hold control characters")
    check_number(key, rule, value)


def check_number(key: str, rule: Mapping[str, Any], value: Any) -> None:
    """Raise UserError when `value` is a number that breaks a rule."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if not abs(value) <= LARGEST:  # true for NaN as well
        raise UserError(f"{key}={value}: must be a finite number of at most {LARGEST}")
    if "low" in rule and value < rule["low"]:
        raise UserError(f"{key}={value}: must be at least {rule['low']}")
    if "above" in rule and value <= rule["above"]:
        raise UserError(f"{key}={value}: must be greater than {rule['above']}")
    if "high" in rule and value > rule["high"]:
        raise UserError(f"{key}={value}: must be at most {rule['high']}")


def check(settings: Any) -> None:
    """Check every field, then what must fit together: in each group, and across groups."""
    for key, f, value in walk(settings):
        check_field(key, f, value)
    check_groups(settings)


def check_groups(settings: Any) -> None:
    """Each class's own `check`: nested groups, then inherited ones, then the class that has all."""
    for f in dataclasses.fields(settings):
        if dataclasses.is_dataclass(value := getattr(settings, f.name)):
            check_groups(value)
    for cls in reversed(type(settings).__mro__):
        if "check" in vars(cls):
            cls.check(settings)  # type: ignore[attr-defined]
