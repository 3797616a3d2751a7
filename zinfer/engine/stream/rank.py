"""Entry of a follower's process: ``python -m zinfer.engine.stream.rank DESCRIPTOR`` (`zinfer.engine.stream.ranks`)."""

import sys

from zinfer.spec.ending import with_parent

if __name__ == "__main__":
    with_parent()
    from zinfer.engine.stream.team import follow

    follow(int(sys.argv[1]))
