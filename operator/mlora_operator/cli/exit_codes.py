"""How ``mlora`` ends: one number for each kind of end, the same in every command. See docs/users/cli.md."""

from __future__ import annotations

OK = 0
FAILED = 1  # a task failed
INVALID = 2  # the user's input is wrong: files, options, names; also what the command line parser uses
TIMEOUT = 3  # --timeout ran out first
UNREACHABLE = 4  # the cluster or the store does not answer, or refuses the keys
NOT_FOUND = 5  # no such task, or no finished adapter there
CORRUPT = 6  # an adapter's files are not what its manifest says
REFUSED = 7  # the cluster, or the operator, does not take the task
BROKEN = 70  # a fault of the program itself; Python's own 1 would say that a task failed
INTERRUPTED = 130  # Ctrl-C
