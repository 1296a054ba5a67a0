"""The programs at an interface's tcx egress hook, which run before every filter of clsact.

The hook is there since Linux 6.6 (net/core/dev.c, sch_handle_egress). It is read by bpf(2),
BPF_PROG_QUERY, and no netlink shows it.
"""

from __future__ import annotations

from tlsched.ebpf import libbpf

_BPF_TCX_EGRESS = 47  # enum bpf_attach_type, linux/bpf.h


def egress_programs(ifindex: int) -> list[str]:
    """Names of the programs, in their order; none on a kernel without tcx.

    Raises PermissionMissing without CAP_NET_ADMIN (for the list) or CAP_SYS_ADMIN (for the
    names), HostError when a program went meanwhile.
    """
    return [_name(program_id) for program_id in libbpf.programs_at(ifindex, _BPF_TCX_EGRESS)]


def _name(program_id: int) -> str:
    with libbpf.program_by_id(program_id) as fd:
        info, _ = libbpf.program_info(fd)
    name: bytes = info.name
    return name.decode(errors="replace")
