"""Command line: `python -m tools.campaign [--seed N] [--class NAME,..] [--count N] [--jobs N] [-o FILE]`."""

from tools.campaign.run import main

main()
