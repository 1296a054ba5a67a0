"""The values of the classifier's maps, as ``tlsched.h`` lays them out in C.

A test compares the two. ``maps`` compares the sizes with the kernel's at every read, so that a
program which another version loaded is not misread.
"""

from __future__ import annotations

import ctypes

from tlsched.bands import LANE_COUNT

PROGRAM_NAME = "tlsched"
MARKS_MAP = "marks"
COUNTERS_MAP = "counters"
BAND_COUNT = LANE_COUNT + 1
NO_DSCP = 64
MARK_COUNT = NO_DSCP + 1


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
