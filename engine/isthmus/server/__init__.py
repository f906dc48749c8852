"""The OpenAI-compatible HTTP server over AsyncLLM. Pydantic lives here and nowhere else."""
