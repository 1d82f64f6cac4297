"""Jobs as users of other tools write them, checked first. Described in docs/howto/launchers.md."""
