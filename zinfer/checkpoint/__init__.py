"""Checkpoints: configuration, headers, hub, tokenizer files, quantisation, the model's shape."""
