"""Keeps the rivals from the matrix unit of newer x86 CPUs (AMX), so that they run as on a CPU without it.

onnxruntime has no switch for it. When it is imported, it asks the system for the unit, and does without where the system
refuses. So a filter of system calls refuses this one request. lbq has asked before, and keeps what it got.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

from lbq import native

REQUEST_PERMISSION, ARCH_PRCTL = 0x1023, 158  # of a CPU's further state; the system call
NO_NEW_PRIVILEGES, SET_SECCOMP, FILTER = 38, 22, 2
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06  # instructions of a filter
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | 1  # with EPERM


def keep_rivals_off() -> None:
    """Where RIVALS_AMX or LBQ_NATIVE_AMX is `off`, refuse the unit to what is imported from now on."""
    off = "off" in (os.environ.get("RIVALS_AMX"), os.environ.get("LBQ_NATIVE_AMX"))
    if not off or sys.platform != "linux" or platform.machine() != "x86_64":
        return
    native.report()  # asks for the unit itself, unless it is off
    code = [  # the call's number, then the lower half of its first argument
        (LOAD, 0, 0, 0),
        (EQUAL, 0, 3, ARCH_PRCTL),
        (LOAD, 0, 0, 16),
        (EQUAL, 0, 1, REQUEST_PERMISSION),
        (RETURN, 0, 0, REFUSE),
        (RETURN, 0, 0, ALLOW),
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    filter = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((NO_NEW_PRIVILEGES, 1, 0), (SET_SECCOMP, FILTER, filter)):
        if libc.prctl(*arguments, 0, 0):
            raise OSError(ctypes.get_errno(), "the system refuses a filter of system calls")
