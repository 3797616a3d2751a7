"""Commands: one file a verb. Each has a click command named `command`, imported only when the verb is called."""
