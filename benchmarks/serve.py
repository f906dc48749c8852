"""The server under load. Without a word first, this is `isthmus bench serve`.

    python benchmarks/serve.py [flags of isthmus bench serve]
    python benchmarks/serve.py null [--streams 1000] [--duration 60] [--tokens 400] [--output FILE]
    python benchmarks/serve.py offline MODEL [--streams 64] [--device cpu] [--rounds 3] [--output FILE]

null: many streams at once, from a server of its own on the NULL platform; every token is checked. Prints what a token
costs the server in CPU time, and how much later tokens come than from AsyncLLM in the same process.
offline: the throughput of a server with a real model against that of LLM, in alternating rounds.
"""

from __future__ import annotations

import sys

from isthmus.cli.main import main


def run(arguments: list[str]) -> int:
    match arguments:
        case ["null", *rest]:
            import serve_null

            return serve_null.main(rest)
        case ["offline", *rest]:
            import serve_offline

            return serve_offline.main(rest)
        case ["-h" | "--help"]:
            print(__doc__)
            return main(["bench", "serve", "--help"])
    return main(["bench", "serve", *arguments])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
