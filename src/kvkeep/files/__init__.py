"""Files: written atomically, with headers that are validated before memory is allocated."""
