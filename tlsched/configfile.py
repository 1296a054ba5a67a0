"""The configuration file: TOML, one section an interface, and flags that override it.

    [defaults]
    share = 0.1

    [link.eth0]
    rate = "10gbit"

A section holds the names of attach's options; what is not one of them is refused by name, with the
file and the section. :func:`attach_options` puts file and flags together.
"""

from __future__ import annotations

import contextlib
import difflib
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlsched.config import LinkSettings, check_iface, parse_dscps, parse_rate
from tlsched.errors import ConfigError
from tlsched.trust import make_trust

TRUST = "trust."


@dataclass(frozen=True, slots=True)
class AttachOptions:
    """What `attach` is to do: the link's settings, and whether a foreign root may go."""

    settings: LinkSettings
    replace_root: bool = False


def attach_options(
    iface: str, config: Path | None, flags: Mapping[str, Any] | None = None
) -> AttachOptions:
    """The options for ``iface``: those of the file's section, overridden by ``flags``.

    ``flags`` bear the names of the file's keys; None means not given. Raises ConfigError, naming
    file and section where the mistake is there, and when the file has no section for ``iface``.
    """
    check_iface(iface)
    given = {key: value for key, value in (flags or {}).items() if value is not None}
    if config is None:
        return _options(iface, _parsed(given))
    document = _read(config)
    where = f"{config}, {section_title(iface)}"
    from_file = _defaults(document, config) | _section(document, config, iface)
    merged = from_file | _parsed(given)
    if not given:  # then whatever is wrong, is wrong in the file
        with _named(where):
            return _options(iface, merged)
    return _options(iface, merged)


def section_title(iface: str) -> str:
    """The heading of an interface's section, quoted where TOML needs it."""
    bare = all(c.isascii() and (c.isalnum() or c in "-_") for c in iface)
    return f"[link.{iface}]" if bare else f'[link."{iface}"]'


def _options(iface: str, values: Mapping[str, Any]) -> AttachOptions:
    """What parsed values amount to; LinkSettings checks them against each other."""
    fields = {field: values[key] for key, field in _FIELDS.items() if key in values}
    trust = {key.removeprefix(TRUST): v for key, v in values.items() if key.startswith(TRUST)}
    settings = LinkSettings(iface, trust=make_trust(**trust), **fields)
    return AttachOptions(settings, values.get("replace_root", False))


def _read(path: Path) -> dict[str, Any]:
    """The file as a dictionary whose outer shape is right."""
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
        repr(document)  # a number of thousands of digits cannot be shown, nor then refused by name
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror})",
            hint="name the file with --config; `tlsched install-unit` puts a sample in place",
        ) from error
    except (ValueError, RecursionError) as error:  # of tomllib, or Python's own limits
        raise ConfigError(f"{path} is not TOML: {error}", hint="see https://toml.io") from error
    for name in document:
        if name not in ("defaults", "link"):
            raise _unknown(name, ("defaults", "link"), f"{path}", "section")
    for name in ("defaults", "link"):
        if not isinstance(document.get(name, {}), dict):
            raise ConfigError(f"{path}: {name} is not a section", hint="write [link.eth0]")
    return document


def _defaults(document: Mapping[str, Any], path: Path) -> dict[str, Any]:
    with _named(f"{path}, [defaults]"):
        return _parsed(_flat(document.get("defaults", {})))


def _section(document: Mapping[str, Any], path: Path, iface: str) -> dict[str, Any]:
    links = document.get("link", {})
    section = links.get(iface)
    title = section_title(iface)
    if not isinstance(section, dict):
        sections = [name for name, inner in links.items() if isinstance(inner, dict)]
        there = ", ".join(map(section_title, sections)) or "none"
        quote = " (names with a dot in quotes)" if '"' in title else ""
        raise ConfigError(
            f"{path} has no section {title}; links there: {there}", hint=f"add {title}{quote}"
        )
    with _named(f"{path}, {title}"):
        return _parsed(_flat(section))


def _flat(section: Mapping[str, Any]) -> dict[str, Any]:
    """The section's keys, those of the table ``trust`` with its name before them."""
    trust = section.get("trust", {})
    inner = trust if isinstance(trust, dict) else {}
    flat = {f"{TRUST}{key}": value for key, value in inner.items()}
    return flat | {key: v for key, v in section.items() if key != "trust" or v is not inner}


def _parsed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Each value as its key wants it. Raises ConfigError for keys that are not known."""
    for key, value in values.items():
        if key not in KEYS:
            if isinstance(value, dict) and key != "trust":
                raise ConfigError(
                    f'"{key}" is a section of its own', hint='quote names with dots: "eth0.100"'
                )
            raise _unknown(key, KEYS, None, "key")
    return {key: KEYS[key](key, value) for key, value in values.items()}


def _unknown(name: str, known: Iterable[str], where: str | None, kind: str) -> ConfigError:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f'did you mean "{near[0]}"?' if near else f"known: {', '.join(known)}"
    prefix = "" if where is None else f"{where}: "
    return ConfigError(f'{prefix}the {kind} "{name}" is not known', hint=hint)


@contextlib.contextmanager
def _named(where: str) -> Iterator[None]:
    """Say in a ConfigError's message where in the file its cause is."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", hint=error.hint) from error


def _rate(key: str, value: Any) -> int:
    if isinstance(value, str) or type(value) is int:  # a bool is an int, too
        return parse_rate(str(value))
    raise _wrong(key, value, '"10gbit" or bits per second')


def _word(key: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    raise _wrong(key, value, 'a word such as "auto"')


def _number(key: str, value: Any) -> float:
    if type(value) in (int, float):
        with contextlib.suppress(OverflowError):
            return float(value)
    raise _wrong(key, value, "a number such as 0.05")


def _dscps(key: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str):
        return parse_dscps(value)
    if isinstance(value, (list, tuple)) and all(type(item) is int for item in value):
        return tuple(value)
    raise _wrong(key, value, "a list such as [40, 32, 24, 16, 12, 8]")


def _list(key: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, (list, tuple)):
        return tuple(value)
    raise _wrong(key, value, 'a list such as ["..."]')


def _switch(key: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise _wrong(key, value, "true or false")


def _wrong(key: str, value: Any, wanted: str) -> ConfigError:
    return ConfigError(f"{key} = {value!r} is not understood", hint=f"write {wanted}")


# Every key of a section, and how its value is read. The flags of `attach` bear the same names.
KEYS: dict[str, Callable[[str, Any], Any]] = {
    "rate": _rate,
    "share": _number,
    "qdisc": _word,
    "classifier": _word,
    "dscps": _dscps,
    "replace_root": _switch,
    "trust.cgroups": _list,
    "trust.uids": _list,
    "trust.sources": _list,
}
# Which field of LinkSettings a key sets.
_FIELDS = {
    "rate": "rate_bps",
    "share": "default_share",
    "dscps": "dscps",
    "qdisc": "qdisc",
    "classifier": "classifier",
}
