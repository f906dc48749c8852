"""Outputs that follow a grammar: what a request asks for, how that is compiled, and which tokens it allows next."""
