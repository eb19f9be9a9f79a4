"""Where in the data: positions of samplers and loaders. Knows torch, never Lightning."""
