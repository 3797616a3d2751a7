"""Servers of others as engines: a command is started, asked over HTTP, and ended."""
