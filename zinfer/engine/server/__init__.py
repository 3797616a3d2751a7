"""Servers of others as engines: a command is started, asked over HTTP, and ended.

`preset` says how, as data; `process` owns the command and all that it starts; `completions` asks for tokens.
"""
