"""Files from which models are loaded, and fingerprints that tell models apart."""
