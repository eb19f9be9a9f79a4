"""What is on disk: a checkpoint is a directory, committed by one rename, valid when it has an ``index.json``.

Knows torch and the safetensors layout, never Lightning. Nothing is imported here, so that the parts which need no
torch (`index`, `durable`, `verify`) stay quick to import.
"""
