"""Who else manages a link: NetworkManager and systemd-networkd, by the state they keep in /run.

Both name links by number, so their state counts only where they run in the network namespace
that is looked at. Sources: NetworkManager's nm-config-data and networkd-link.c keep a key file for
each link; systemd.network(5) for the sections that set a qdisc.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from tlsched.doctor.finding import Finding
from tlsched.doctor.links import Link

_COMM_LENGTH = 15  # TASK_COMM_LEN less its terminating zero, <linux/sched.h>


def findings(link: Link, root: Path = Path("/")) -> Iterator[Finding]:
    """Whether either manages ``link``; ``root`` is the folder that holds run/ and etc/."""
    by_manager = _read(root / f"run/NetworkManager/devices/{link.ifindex}")
    if by_manager.get("managed") == "true" and _runs_here("NetworkManager"):
        what = "NetworkManager manages it, and may replace its qdisc when a connection comes up"
        remedy = f"nmcli device set {link.iface} managed no, or attach again then"
        yield Finding("warning", what, remedy, link.iface)
    by_networkd = _read(root / f"run/systemd/netif/links/{link.ifindex}")
    if by_networkd.get("ADMIN_STATE", "unmanaged") != "unmanaged" and _runs_here(
        "systemd-networkd"
    ):
        yield _networkd_finding(link.iface, by_networkd.get("NETWORK_FILE"), root)


def _networkd_finding(iface: str, file: str | None, root: Path) -> Finding:
    setting = None if file is None else _qdisc_section(root / file.lstrip("/"))
    if setting is not None:
        what = f"networkd gives it a qdisc of its own (section {setting} of {file})"
        return Finding("warning", what, "take that section out, networkctl reload", iface)
    what = "networkd manages it, and leaves its qdiscs alone while no .network file names one"
    return Finding("note", what, about=iface)


def _qdisc_section(path: Path) -> str | None:
    """The section that sets a qdisc, in the file or what adds to it: Parent= is only in those."""
    parts = [path, *sorted(path.parent.glob(f"{path.name}.d/*.conf"))]
    section = None
    for part in parts:
        for line in _lines(part):
            section = line if line.startswith("[") else section
            if re.match(r"Parent\s*=", line):
                return section
    return None


def _read(path: Path) -> dict[str, str]:
    """KEY=VALUE lines of a key file, whatever their section."""
    return dict(line.split("=", 1) for line in _lines(path) if "=" in line)


def _lines(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text(errors="replace").splitlines()]
    except OSError:
        return []


def _runs_here(program: str) -> bool:
    """Whether a process of this name is in our network namespace, as far as can be seen."""
    ours = os.stat("/proc/thread-self/ns/net").st_ino
    for process in Path("/proc").glob("[0-9]*"):
        if _lines(process / "comm") == [program[:_COMM_LENGTH]]:
            try:
                if os.stat(process / "ns/net").st_ino == ours:
                    return True
            except PermissionError:  # another user's: it may well be here
                return True
            except FileNotFoundError:
                continue
    return False
