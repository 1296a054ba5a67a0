"""sysfs as this thread's network namespace sees it.

What is mounted at /sys shows the network namespace of whoever mounted it: under
`nsenter --net=…` that is another one, whose eth0 is not ours. So a mount of our own is made, at no
place and for no process but this one (fsopen(2), fsmount(2)). Without CAP_SYS_ADMIN /sys is taken
if it shows the interfaces that this namespace has.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
from collections.abc import Iterator

# The same numbers on every architecture but alpha (<asm-generic/unistd.h>); glibc knows them
# since 2.36, musl does not.
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_CLOEXEC, _FSCONFIG_CMD_CREATE = 1, 6  # <linux/mount.h>
_SIOCGIFHWADDR = 0x8927  # <linux/sockios.h>


class Sysfs:
    """An open sysfs. Paths are below it: "class/net/eth0/speed"."""

    def __init__(self, fd: int) -> None:
        """``fd`` is its root folder, which stays the caller's to close."""
        self._fd = fd

    def text(self, path: str) -> str | None:
        """What a file says; None where there is none, or where the driver does not answer."""
        try:
            with open(path, opener=self._open) as file:
                return file.read().strip()
        except OSError:
            return None

    def names(self, path: str) -> list[str]:
        """The names in a folder, none where there is no such folder."""
        try:
            fd = self._open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return []
        try:
            return sorted(os.listdir(fd))
        finally:
            os.close(fd)

    def _open(self, path: str, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, dir_fd=self._fd)


@contextlib.contextmanager
def of_this_namespace() -> Iterator[Sysfs | None]:
    """The sysfs of the calling thread's network namespace; None where it cannot be seen."""
    fd = _mount()
    mounted = fd is not None
    try:
        if fd is None:
            fd = os.open("/sys", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        found = Sysfs(fd)
        yield found if mounted or _shows_our_interfaces(found) else None
    finally:
        if fd is not None:
            os.close(fd)


def _mount() -> int | None:
    """The root folder of a fresh mount, or None without the permission or the system call."""
    call = ctypes.CDLL(None).syscall
    context = call(_FSOPEN, b"sysfs", _CLOEXEC)
    if context < 0:
        return None
    try:
        if call(_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0):
            return None
        mounted: int = call(_FSMOUNT, context, _CLOEXEC, 0)
        return mounted if mounted >= 0 else None
    finally:
        os.close(context)


def _shows_our_interfaces(found: Sysfs) -> bool:
    # Two namespaces may well have the same names and numbers, but seldom all the addresses too.
    ours = socket.if_nameindex()
    shown = [name for name in found.names("class/net") if found.names(f"class/net/{name}")]
    if sorted(name for _, name in ours) != shown:
        return False
    return all(
        found.text(f"class/net/{name}/ifindex") == str(ifindex)
        and found.text(f"class/net/{name}/address") == _address(name)
        for ifindex, name in ours
    )


def _address(iface: str) -> str:
    """The interface's hardware address as sysfs writes it (packet(7), SIOCGIFHWADDR)."""
    request = iface.encode().ljust(40, b"\0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock, _SIOCGIFHWADDR, request)
    return answer[18:24].hex(":")
