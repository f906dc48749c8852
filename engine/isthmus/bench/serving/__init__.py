"""Load for any server with the API of OpenAI, and what it answers, measured."""
