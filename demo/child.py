"""Runs a service as a child that cannot outlive its parent.

`python -m demo.child PARENT_PID MODULE`. A launcher that is killed has no chance to clean up,
so the kernel does it (Linux only; elsewhere the child is ended by the launcher alone).
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, module = int(sys.argv[1]), sys.argv[2]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("the launcher is gone")
    sys.argv = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
