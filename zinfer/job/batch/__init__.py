"""Batch jobs: OpenAI requests of a file, answered without loss."""
