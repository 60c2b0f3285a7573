"""From a request to the model's input: chat templates, images, tokenisation, structured output."""
