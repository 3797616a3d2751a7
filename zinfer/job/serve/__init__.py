"""Server: OpenAI's API over HTTP for one model on one engine."""
