"""Entry of a follower's process, with three descriptors: socket, orders, answers."""

import sys

from zinfer.system.ending import with_parent

if __name__ == "__main__":
    with_parent()
    from zinfer.engine.team import follow

    follow(*map(int, sys.argv[1:]))
