"""Pages that show a cache: the server's, and single files."""
