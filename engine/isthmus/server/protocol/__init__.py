"""The bodies of requests and answers: OpenAI's forms, with the fields that vLLM adds."""
