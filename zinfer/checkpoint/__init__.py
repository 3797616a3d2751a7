"""Checkpoints: configuration, headers, the hub, tokenizer files, quantisation schemes, the model's shape."""
