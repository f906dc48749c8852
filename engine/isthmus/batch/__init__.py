"""OpenAI batch files, answered by the routes of the server without a socket between."""
