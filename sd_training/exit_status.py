"""What the number means that a run ends with, for launchers and batch files.

Numbers of 126 and more belong to shells and signals, 64 to 78 to sysexits.h (69 is its EX_UNAVAILABLE, 74 its EX_IOERR,
75 its EX_TEMPFAIL, "try again"), and torchrun, srun and Python itself use 1 and 2. So 86 to 89 can come from this
program only.
"""

FINISHED = 0
"""All optimizer steps are done and saved; nothing else ends with it."""
UNEXPECTED = 1
"""An error that nobody expected, or a process of the run that ended on its own; Python's status after an exception."""
MISTAKE = 2
"""The user can mend it: an option, a file, a data set. Starting again gives the same sentence."""
TAKEN_OVER = 69
"""Another start of the same run writes in its folder now; this one must not."""
UNWRITABLE = 74
"""Saves fail, and going on would train for nothing. Older checkpoints are intact."""
STOPPED = 75
"""Asked to stop by a signal or a time limit, and saved; or storage does not answer for now: start me again."""
NUMERIC = 86
"""The numbers went wrong and stayed so: non-finite gradients or a loss that does not come back."""
HANG = 87
"""A process did nothing for longer than `watch` allows. Starting again often helps, on another node."""
BAD_DATA = 88
"""More samples could not be used than `dataset.params` allows."""
INTEGRITY = 89
"""Checkpoints exist and none of them is whole, or weights that must be equal on several processes are not."""
INTERRUPTED = 130
"""Ctrl-C, as shells give it: a person stopped the run (and it saved), nothing should start it again."""
