"""The `isthmus` program. A command imports what it runs when it runs: the command line itself costs no torch."""
