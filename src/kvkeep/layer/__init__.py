"""One layer's cache: its slots, and the step that changes them."""
