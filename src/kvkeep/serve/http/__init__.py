"""HTTP connections: admission of clients, time limits, access control, static files."""
