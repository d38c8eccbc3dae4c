"""Fresh processes that are forked from one that has imported torch, which takes seconds each time.

What they are told is pickled all the same. As a script: FILE WORDS..., which runs FILE so.
"""

import multiprocessing
import runpy
import sys


def fork_from_one(_=None):
    """Stand in for `multiprocessing.get_context`."""
    context = multiprocessing.context.ForkServerContext()
    context.set_forkserver_preload(["onescan.bench.contest.rival"])
    return context


if __name__ == "__main__":
    multiprocessing.get_context = fork_from_one
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
