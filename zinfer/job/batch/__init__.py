"""Batch job: a file of requests in the OpenAI format, answered in batches, killed at any moment without loss."""
