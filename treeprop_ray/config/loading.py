"""Reading settings: defaults < experiments/<name>.yaml < `key=value` on the command line.

`experiment=mnist_d3+literal` lays the second file over the first.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from treeprop_ray.config.fields import check, title_of, walk
from treeprop_ray.config.settings import CHANGEABLE, RESUMABLE, Settings
from treeprop_ray.errors import UserError, first_line, hidden

LENGTH = ("epochs", "steps", "patience")  # may change when a run is taken up, but name it
SIGNS = {"low": "≥", "above": ">", "high": "≤"}
EXPERIMENTS = Path(__file__).parent / "experiments"


def read_yaml(path: Path, what: str) -> DictConfig:
    """A YAML mapping from a file; a mistake names the file."""
    try:
        loaded = OmegaConf.load(path)
    except FileNotFoundError as e:
        raise UserError(f"{what}: no such file") from e
    except Exception as e:  # yaml and omegaconf raise many kinds; all are the file's fault
        raise UserError(f"{what}: not readable as YAML: {first_line(e)}") from e
    if not isinstance(loaded, DictConfig):
        raise UserError(f"{what}: must hold key: value lines")
    if found := _interpolation(OmegaConf.to_container(loaded, resolve=False)):
        raise UserError(f"{what}: {found}: ${{…}} is not resolved in files; write the value")
    return loaded


def _interpolation(value: Any) -> str:
    """The first text that would be replaced, by an environment variable for one; empty if none."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list):
        return next((found for each in value if (found := _interpolation(each))), "")
    return value if isinstance(value, str) and "${" in value else ""


def experiment_file(name: str) -> Path:
    """The YAML of an experiment: a shipped name or a path."""
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    path = EXPERIMENTS / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in EXPERIMENTS.glob("*.yaml")))
        raise UserError(f"experiment={name}: one of {known}, or a path that ends in .yaml")
    return path


def experiment_files(name: str) -> list[Path]:
    """The YAMLs of an experiment, later ones on top of earlier ones."""
    if name.endswith((".yaml", ".yml")) and Path(name).is_file():
        return [Path(name)]  # a + in the name of a file is one
    return [experiment_file(part) for part in name.split("+")]


def experiment_title(name: str) -> str:
    """An experiment without the folders and endings of its files."""
    return "+".join(Path(part).stem for part in name.split("+"))


def experiment_layer(name: str) -> DictConfig:
    """What the files of an experiment say, as one."""
    files = [read_yaml(path, f"experiment={name}") for path in experiment_files(name)]
    return cast(DictConfig, OmegaConf.merge(*files))


def parse_overrides(args: Sequence[str]) -> DictConfig:
    """`key=value` words to a config; the value is read as YAML."""
    for word in args:
        key, eq, _ = word.partition("=")
        if not eq or not key.strip():
            raise UserError(f"{word!r}: expected key=value")
    try:
        return OmegaConf.from_dotlist(list(args))
    except Exception as e:
        raise UserError(f"{' '.join(args)}: not readable as key=value: {first_line(e)}") from e


def _spelled_out(schema: type, layer: DictConfig) -> DictConfig:
    """`loss=mse` as `loss.name=mse`."""
    spelled: dict[str, Any] = {str(key): layer._get_node(key) for key in layer}
    for f in dataclasses.fields(schema):
        if (word := f.metadata.get("word")) and isinstance(layer.get(f.name), str):
            spelled[f.name] = {word: layer[f.name]}
    return OmegaConf.create(spelled)


def _check_groups(schema: type, source: str, layer: DictConfig) -> None:
    """`model=3` is a mistake that omegaconf reports without naming the key."""
    for f in dataclasses.fields(schema):
        if isinstance(f.default_factory, type) and f.name in layer:
            value = OmegaConf.to_container(layer)[f.name]
            if not isinstance(value, dict):
                raise UserError(
                    f"{source}{f.name}={value}: is a group of settings; use {f.name}.<key>=…"
                )


def _check_flags(schema: type, source: str, layer: DictConfig) -> None:
    """omegaconf takes every number but 0 for true."""
    for key, _, default in walk(schema()):
        if isinstance(default, bool):
            value = OmegaConf.select(layer, key, throw_on_resolution_failure=False)
            if isinstance(value, int | float) and value not in (0, 1):
                raise UserError(f"{source}{key}={value}: true or false")


def _check_lists(schema: type, source: str, layer: DictConfig) -> None:
    """omegaconf speaks of its own types; where the field says so a number is a list of one."""
    for key, f, default in walk(schema()):
        if isinstance(default, list):
            value = OmegaConf.select(layer, key, throw_on_resolution_failure=False)
            if type(value) is int and f.metadata.get("single"):
                OmegaConf.update(layer, key, [value])
            elif value is not None and not OmegaConf.is_list(value):
                raise UserError(f"{source}{key}={value}: a list such as [{value}]")


@functools.cache
def _defaults(schema: type) -> Any:
    """The schema as a config; `OmegaConf.merge` copies it."""
    return OmegaConf.structured(schema)


def merge(schema: type, *layers: tuple[str, DictConfig]) -> Any:
    """Lay configs over the defaults of the dataclass `schema` and check the result."""
    base = _defaults(schema)
    known = [key for key, _, _ in walk(schema())]
    for source, layer in layers:
        layer = _spelled_out(schema, layer)
        _check_groups(schema, source, layer)
        _check_flags(schema, source, layer)
        _check_lists(schema, source, layer)
        try:
            base = OmegaConf.merge(base, layer)
        except ConfigKeyError as e:
            key = e.full_key or str(e.key)
            near = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {near[0]}?" if near else "; --help lists all keys"
            raise UserError(f"{source}unknown key {key}{hint}") from e
        except OmegaConfBaseException as e:
            key = e.full_key or ""
            raise UserError(f"{source}{key + ': ' if key else ''}{first_line(e)}") from e
        except Exception as e:
            raise UserError(f"{source}{first_line(e)}") from e
    try:
        settings = OmegaConf.to_object(base)
    except Exception as e:
        raise UserError(first_line(e)) from e
    check(settings)
    return settings


def load(args: Sequence[str], schema: type[Settings] = Settings) -> Settings:
    """Settings from command-line words: defaults < experiment < words.

    A command with settings of its own gives a subclass as `schema`.
    """
    words = parse_overrides(args)
    name = words.get("experiment", Settings().experiment)
    if not isinstance(name, str):
        raise UserError(f"experiment={name}: must be a name or a path")
    files = [
        (f"{path.name}: ", read_yaml(path, f"experiment={name}")) for path in experiment_files(name)
    ]
    return cast(Settings, merge(schema, *files, ("", words)))


def load_file(path: Path) -> Settings:
    """Settings that an earlier run wrote to its config.yaml."""
    return cast(Settings, merge(Settings, (f"{path}: ", read_yaml(path, str(path)))))


def to_yaml(settings: Any) -> str:
    """The resolved settings as YAML, without the credentials of URLs."""
    shown = OmegaConf.structured(settings)
    for key, _, value in walk(settings):
        if hidden(value) != value:
            OmegaConf.update(shown, key, hidden(value))
    return OmegaConf.to_yaml(shown)


@dataclasses.dataclass(frozen=True)
class Change:
    """A setting with another value than before."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.old} -> {self.new}"

    @property
    def allowed(self) -> bool:
        """Whether a run may be taken up with it if the user says so."""
        return self.key in CHANGEABLE | {"epochs", "steps"}


def differences(old: Settings, new: Settings) -> list[str]:
    """Settings that differ and change what is computed, as `key: old -> new`."""
    return [str(change) for change in changes(old, new)]


def changes(old: Settings, new: Settings) -> list[Change]:
    """Settings that differ and change what is computed."""
    a = {k: hidden(v) for k, _, v in walk(old)}
    b = {k: hidden(v) for k, _, v in walk(new)}
    moving = set(RESUMABLE) - {"storage"}  # elsewhere the checkpoints would not be found
    if old.schedule != "constant" or any(shares_of_total(old)):
        moving -= {"epochs", "steps"}  # learning rate and stage of step t depend on the total
    if old.pieces == new.pieces and old.reduce == new.reduce == "exact":
        moving |= {"microbatches", "replicas"}  # the batch is cut the same way
    return [Change(k, a[k], b[k]) for k in a if a[k] != b[k] and k not in moving]


def shares_of_total(settings: Settings) -> list[float]:
    """Shares of all steps that are in use; a group with a method's name is for that method."""
    in_use = ("", settings.method)
    leaves = [leaf for leaf in walk(settings) if leaf[0].rpartition(".")[0] in in_use]
    return [value for _, f, value in leaves if f.metadata.get("of_total")]


def run_name(settings: Settings) -> str:
    """The given name, or one that is the same for the same command."""
    if settings.name:
        return settings.name
    short = _digest(_science(settings, LENGTH))[:6]
    return f"{experiment_title(settings.experiment)}-{settings.method}-s{settings.seed}-{short}"


def computed(settings: Settings) -> dict[str, Any]:
    """The settings that say what a run computes: those that must not differ on resume."""
    fixed = settings.schedule == "constant" and not any(shares_of_total(settings))
    return _science(settings, () if fixed else ("epochs", "steps"))


def digest(settings: Settings) -> str:
    """Names what a run computes."""
    return _digest(computed(settings))[:16]


def _science(settings: Settings, besides: Sequence[str]) -> dict[str, Any]:
    """Settings that are not resumable, and some besides; later ones only if not at default."""
    default = {k: v for k, _, v in walk(Settings())}
    return {
        k: hidden(v)
        for k, f, v in walk(settings)
        if (k not in RESUMABLE or k in besides)
        and not (f.metadata.get("later") and v == default[k])
    }


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def range_text(rule: Mapping[str, Any]) -> str:
    """Which numbers a setting takes, for --help."""
    if "low" in rule and "high" in rule:
        return f" [{rule['low']} … {rule['high']}]"
    bounds = [f"{sign} {rule[key]}" for key, sign in SIGNS.items() if key in rule]
    return f" [{', '.join(bounds)}]" if bounds else ""


def describe(settings: Any) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """(title, rows) of every group, for --help; a row is a key, its value and its meaning."""
    groups: dict[str, list[tuple[str, str, str]]] = {}
    for key, f, value in walk(settings):
        rule = f.metadata
        text = rule["help"]
        if "choices" in rule:
            others = ["package.module:factory"] if rule.get("open") else []
            text += f" [{'|'.join([*rule['choices'], *others])}]"
        text += range_text(rule)
        shown = "" if value is None else str(value)
        shown = shown.lower() if isinstance(value, bool) else shown
        shown = f"[{','.join(map(str, value))}]" if isinstance(value, list) else shown
        groups.setdefault(title_of(settings, key), []).append((key, shown, text))
    return list(groups.items())
