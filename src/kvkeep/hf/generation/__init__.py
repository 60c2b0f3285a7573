"""`generate()` of attached models: what fills its cache, and what its call asks for."""
