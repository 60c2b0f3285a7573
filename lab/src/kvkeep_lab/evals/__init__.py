"""What a cache spec costs in quality, against the full cache, on a real model and real text."""
