"""From a request to what the model reads: chat templates, images, and what answers must follow."""
