"""Processes for which the kernel refuses io_uring, as in many containers, or Landlock, as in old kernels."""

import ctypes
import errno
import struct

NR_IO_URING_SETUP = 425
NR_LANDLOCK_CREATE_RULESET = 444
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, FAIL_WITH = 0x7FFF0000, 0x00050000


class Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def without_io_uring():
    """For `preexec_fn`: makes io_uring_setup fail with EPERM."""
    refuse(NR_IO_URING_SETUP, errno.EPERM)


def without_landlock():
    """For `preexec_fn`: makes the kernel look like one without Landlock."""
    refuse(NR_LANDLOCK_CREATE_RULESET, errno.ENOSYS)


def refuse(call, error):
    """Makes a system call fail in this process and its children."""
    steps = [(LOAD_WORD, 0, 0, 0), (JUMP_IF_EQUAL, 0, 1, call), (RETURN, 0, 0, FAIL_WITH | error), (RETURN, 0, 0, ALLOW)]
    code = b"".join(struct.pack("<HBBI", *step) for step in steps)
    program = Program(len(steps), code)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program)):
        raise OSError(ctypes.get_errno(), "seccomp")
