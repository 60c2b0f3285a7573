"""`generate()` of attached models: its calls, and how its cache is filled."""
