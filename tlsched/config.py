"""Settings of a link: what flags say, checked before anything is touched."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from tlsched.bands import DEFAULT_DSCPS, Band, all_bands
from tlsched.errors import ConfigError
from tlsched.trust import ANY_LOCAL, Trust, check_trust

QDISCS = ("auto", "htb", "ets", "prio", "mqprio")
CLASSIFIERS = ("auto", "bpf", "u32")
DEFAULT_SHARE = 0.05
MIN_SHARE = 0.01
MAX_SHARE = 0.9
MAX_RATE_BPS = 10**12
# The default band must be able to send a full-size packet (MTU 9000) once a second, or
# connections that stand still behind full lanes time out.
MIN_SHARE_BPS = 9000 * 8
MAX_IFACE_BYTES = 15  # IFNAMSIZ less its terminating zero, <linux/if.h>

_UNITS_BPS = {
    "": 1,
    "bit": 1,
    "kbit": 10**3,
    "mbit": 10**6,
    "gbit": 10**9,
    "tbit": 10**12,
    "kibit": 2**10,
    "mibit": 2**20,
    "gibit": 2**30,
    "tibit": 2**40,
}
_RATE = re.compile(r"\s*([+-]?[0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?|[+-]?nan|[+-]?inf)\s*([a-z/]*)\s*")
_RATE_HINT = 'write a rate such as "1gbit", "2.5gbit", "100mbit" or plain bits per second'


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """What a link should be: validated when made, so whoever holds one may rely on it.

    ``rate_bps`` in bit/s, a multiple of 8 (the kernel counts whole bytes a second), or None to
    send as fast as the device does; ``default_share`` is the part that the default band always
    gets, None for the usual one if the kernel can give it, 0 (without a rate) for none;
    ``dscps`` are the lanes' code points, most urgent first; ``trust`` says who may use the lanes;
    ``qdisc`` is the root's kind; ``classifier`` says what tells the packets apart. Raises
    ConfigError for what cannot work.
    """

    iface: str
    rate_bps: int | None = None
    default_share: float | None = None
    dscps: tuple[int, ...] = DEFAULT_DSCPS
    trust: Trust = ANY_LOCAL
    qdisc: str = "auto"
    classifier: str = "auto"

    def __post_init__(self) -> None:
        """Check everything at once."""
        check_iface(self.iface)
        if self.qdisc not in QDISCS:
            raise ConfigError(
                f'there is no tree of qdisc "{self.qdisc}"', hint=f"use {', '.join(QDISCS)}"
            )
        if self.classifier not in CLASSIFIERS:
            raise ConfigError(
                f'there is no classifier "{self.classifier}"', hint=f"use {', '.join(CLASSIFIERS)}"
            )
        if self.classifier == "u32" and self.trust != ANY_LOCAL:
            raise ConfigError(
                "u32 filters cannot tell who sent a packet", hint="use --classifier bpf with trust"
            )
        if self.rate_bps is not None:
            check_rate(self.rate_bps)
        _check_share(self.share, self.rate_bps, self.qdisc)
        all_bands(self.dscps)  # raises for bad code points
        check_trust(self.trust)

    @property
    def share(self) -> float:
        """The part that the default band is to be guaranteed."""
        return DEFAULT_SHARE if self.default_share is None else self.default_share

    @property
    def bands(self) -> tuple[Band, ...]:
        """The lanes' bands, most urgent first, then the default band."""
        return all_bands(self.dscps)


def share_bps(rate_bps: int, share: float) -> int:
    """A share of a rate in bit/s, whole bytes a second."""
    return whole_bytes(rate_bps * share)


def parse_rate(text: str) -> int:
    """Read a rate as people write it and return bit/s, rounded down to whole bytes a second.

    Units are those of tc(8), bits only: bit, kbit, mbit, gbit, tbit (powers of 1000) and kibit
    to tibit (powers of 1024), in any case; none means bit/s. tc's "bps" means *bytes* a second
    and is refused, since most people read it as bits. Raises ConfigError.
    """
    match = _RATE.fullmatch(text.lower())
    if match is None:
        raise ConfigError(f'rate "{text}" is not understood', hint=_RATE_HINT)
    number, unit = match.groups()
    if unit not in _UNITS_BPS:
        raise _unknown_unit(text, number, unit)
    value = _exact(number)
    if not value.is_finite():
        raise ConfigError(f'rate "{text}" is not a finite number', hint=_RATE_HINT)
    # Compared before it is multiplied: the exponent may be anything.
    rate_bps = 0 if value.is_signed() else MAX_RATE_BPS + 8
    if value.copy_abs() <= MAX_RATE_BPS:  # abs() itself would overflow
        rate_bps = whole_bytes(int(value * _UNITS_BPS[unit]))
    check_rate(rate_bps, shown=text)
    return rate_bps


def _exact(number: str) -> Decimal:
    """The number without a float's loss of digits; an exponent beyond all bounds is cut."""
    try:
        return Decimal(number)
    except InvalidOperation:  # an exponent of more than about 18 digits, as of decimal.MAX_EMAX
        mantissa, _, exponent = number.partition("e")
        return Decimal(f"{mantissa}e{'-' if exponent.startswith('-') else ''}999999")


def parse_dscps(text: str) -> tuple[int, ...]:
    """Read code points separated by commas; which ones suit, LinkSettings checks.

    Raises ConfigError for what is not a number.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f'DSCPs "{text}" are not understood', hint='write six numbers: "40,32,24,16,12,8"'
        ) from None


def whole_bytes(rate_bps: float) -> int:
    """Round a rate in bit/s down to what the kernel can hold: whole bytes a second."""
    return math.floor(rate_bps / 8) * 8 if isinstance(rate_bps, float) else rate_bps // 8 * 8


def format_rate(rate_bps: int) -> str:
    """A rate in bit/s as `parse_rate` reads it back: 1000000000 is "1gbit"."""
    for unit, factor in (("tbit", 10**12), ("gbit", 10**9), ("mbit", 10**6), ("kbit", 10**3)):
        if rate_bps >= factor:
            whole, rest = divmod(rate_bps, factor)
            decimals = str(rest).zfill(len(str(factor)) - 1).rstrip("0")
            return f"{whole}.{decimals}{unit}" if decimals else f"{whole}{unit}"
    return f"{rate_bps}bit"


def check_iface(iface: str) -> None:
    """Raise ConfigError unless ``iface`` could name an interface (dev_valid_name in the kernel)."""
    bad = not iface or iface in (".", "..") or any(c in "/:" or c.isspace() for c in iface)
    # Bytes that are no UTF-8 arrive as surrogates (PEP 383); pyroute2 cannot send such a name.
    bad = bad or any("\ud800" <= c <= "\udfff" for c in iface)
    if bad or len(iface.encode()) > MAX_IFACE_BYTES:
        raise ConfigError(
            f'"{iface.encode(errors="backslashreplace").decode()}" cannot be an interface name',
            hint="see `ip link` for the names of this host's interfaces",
        )


def check_rate(rate_bps: int, shown: str | None = None) -> None:
    """Raise ConfigError unless ``rate_bps`` (bit/s) is above zero and at most 1 Tbit/s."""
    what = shown or f"{rate_bps} bit/s"
    if rate_bps <= 0:
        raise ConfigError(f'rate "{what}" is not above zero', hint=_RATE_HINT)
    if rate_bps > MAX_RATE_BPS:
        raise ConfigError(
            f'rate "{what}" is above 1 Tbit/s', hint="give the rate of the link, not of the fabric"
        )


def _check_share(share: float, rate_bps: int | None, qdisc: str) -> None:
    if rate_bps is not None and qdisc not in ("auto", "htb"):
        raise ConfigError(f"{qdisc} shapes to no rate", hint="leave --rate out, or use --qdisc htb")
    if share == 0 and rate_bps is None and qdisc in ("auto", "prio", "mqprio"):
        return
    if not MIN_SHARE <= share <= MAX_SHARE:  # also false for nan
        raise ConfigError(
            f"the default band's share {share} is out of range",
            hint=f"use {MIN_SHARE} to {MAX_SHARE}: 0.05 leaves 5 % to everything but training",
        )
    if rate_bps is not None and rate_bps * share < MIN_SHARE_BPS:
        raise ConfigError(
            f"a share of {share} of {format_rate(rate_bps)} cannot carry one packet a second",
            hint=f"give a rate of at least {format_rate(math.ceil(MIN_SHARE_BPS / share))}"
            " or a larger share",
        )


def _unknown_unit(text: str, number: str, unit: str) -> ConfigError:
    if "ps" in unit or "/s" in unit:
        letter = unit[0] if unit[0] in "kmgt" else ""
        return ConfigError(
            f'rate "{text}" is ambiguous: tc reads "bps" as bytes per second, most people as bits',
            hint=f'write "{number}{letter}bit" if you mean bits per second',
        )
    return ConfigError(f'rate "{text}" has the unknown unit "{unit}"', hint=_RATE_HINT)
