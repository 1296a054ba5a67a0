"""The classifier's maps, their keys and values, as ``tlsched.h`` lays them out in C.

A test compares the two. ``maps`` compares the sizes with the kernel's at every read, so that a
program which another version loaded is not misread.
"""

from __future__ import annotations

import ctypes

from tlsched.bands import LANE_COUNT
from tlsched.trust import MAX_ENTRIES

PROGRAM_NAME = "tlsched"
MARKS_MAP = "marks"
COUNTERS_MAP = "counters"
SETTINGS_MAP = "settings"
UIDS_MAP = "trusted_uids"
CGROUPS_MAP = "trusted_cgroups"
V4_MAP = "trusted_v4"
V6_MAP = "trusted_v6"

BAND_COUNT = LANE_COUNT + 1
NO_DSCP = 64
MARK_COUNT = NO_DSCP + 1
REFUSED = BAND_COUNT  # key into the counters: what lost a lane's DSCP, its sender not trusted
COUNTER_COUNT = BAND_COUNT + 1
SET_ENTRIES = 2 * MAX_ENTRIES
CGROUP_LEVELS = 16

# Bits of SettingsValue.flags.
ETHERNET, ANY_LOCAL, UIDS, SOURCES = 1, 2, 4, 8


class MarkValue(ctypes.Structure):
    """``struct tlsched_mark``: what goes with one DSCP, or (key NO_DSCP) with none."""

    _fields_ = (
        ("priority", ctypes.c_uint32),
        ("band", ctypes.c_uint32),
        ("classid", ctypes.c_uint32),
    )


class CountersValue(ctypes.Structure):
    """``struct tlsched_counters``: one CPU's packets and bytes of one band."""

    _fields_ = (("packets", ctypes.c_uint64), ("bytes", ctypes.c_uint64))


class SettingsValue(ctypes.Structure):
    """``struct tlsched_settings``: which sets are looked into, and how deep."""

    _fields_ = (("flags", ctypes.c_uint32), ("cgroup_levels", ctypes.c_uint32))


class V4Prefix(ctypes.Structure):
    """``struct tlsched_v4_prefix``, a trie's key (bpf_lpm_trie_key, linux/bpf.h)."""

    _fields_ = (("bits", ctypes.c_uint32), ("address", ctypes.c_uint8 * 4))


class V6Prefix(ctypes.Structure):
    """``struct tlsched_v6_prefix``."""

    _fields_ = (("bits", ctypes.c_uint32), ("address", ctypes.c_uint8 * 16))


Datum = ctypes.Structure | ctypes.c_uint8 | ctypes.c_uint32 | ctypes.c_uint64

# Of each map the key, the value and the number of entries.
SHAPES: dict[str, tuple[type[Datum], type[Datum], int]] = {
    MARKS_MAP: (ctypes.c_uint32, MarkValue, MARK_COUNT),
    COUNTERS_MAP: (ctypes.c_uint32, CountersValue, COUNTER_COUNT),
    SETTINGS_MAP: (ctypes.c_uint32, SettingsValue, 1),
    UIDS_MAP: (ctypes.c_uint32, ctypes.c_uint8, SET_ENTRIES),
    CGROUPS_MAP: (ctypes.c_uint64, ctypes.c_uint8, SET_ENTRIES),
    V4_MAP: (V4Prefix, ctypes.c_uint8, SET_ENTRIES),
    V6_MAP: (V6Prefix, ctypes.c_uint8, SET_ENTRIES),
}
