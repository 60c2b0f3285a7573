"""Files: whole or not at all, with headers that are checked before memory is taken."""
