"""One file a verb; each has a click command named `command` and is imported only when the verb is called."""
