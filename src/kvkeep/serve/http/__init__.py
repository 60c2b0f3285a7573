"""What stands between a socket and the endpoints: who is admitted, and how fast it must be."""
