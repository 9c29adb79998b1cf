"""The HTTP endpoint: OpenAI's API over one engine."""
