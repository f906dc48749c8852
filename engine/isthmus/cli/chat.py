"""`isthmus chat`: talk to a model, in a terminal, through a pipe, or with one message."""

from __future__ import annotations

import argparse
import contextlib
import sys

from isthmus.cli.console import note, print_error
from isthmus.cli.conversation import ChatModel, Conversation, Quit
from isthmus.cli.engine_args import add_engine_arguments, open_llm
from isthmus.cli.parser import unicode_text
from isthmus.cli.sampling_args import add_sampling_arguments, sampling_params
from isthmus.cli.stream import Answer, stream_answer, summary
from isthmus.errors import RequestError
from isthmus.plugins.commands import Subparsers

PROMPT = "> "


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "chat",
        help="talk to a model",
        description="Talk to a model through its chat template. /help lists what can be typed beside messages. "
        "If stdin is not a terminal, each of its lines is a message.",
    )
    parser.add_argument("--message", type=unicode_text, metavar="TEXT", help="answer this one message and exit")
    parser.add_argument("--system", type=unicode_text, metavar="TEXT", help="the system message")
    add_engine_arguments(parser)
    add_sampling_arguments(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """One message, or a session."""
    conversation = Conversation(sampling_params(args), args.system)
    interactive = args.message is None and sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        note(f"loading {vars(args)['model.model']}")
    with open_llm(args) as llm:
        if args.message is not None:
            if answer_one(llm, conversation, args.message).interrupted:
                raise KeyboardInterrupt
            return 0
        return talk(llm, conversation) if interactive else read_all(llm, conversation)


def answer_one(llm: ChatModel, conversation: Conversation, text: str) -> Answer:
    """Write the answer to `text` as it comes, then its summary, and remember the turn. Raises RequestError."""
    answer = stream_answer(llm.stream_chat(conversation.messages_with(text), conversation.params), sys.stdout)
    conversation.keep(text, answer.text)
    note(summary(answer.timing, llm.config))
    return answer


def read_all(llm: ChatModel, conversation: Conversation) -> int:
    """Each line of stdin is a message or a command. The first error and Ctrl-C end the session."""
    with contextlib.suppress(Quit):
        for line in sys.stdin:
            answer = _obey(llm, conversation, line)
            if answer is not None and answer.interrupted:
                raise KeyboardInterrupt
    return 0


def talk(llm: ChatModel, conversation: Conversation) -> int:
    """A session in a terminal: errors are shown, Ctrl-C stops an answer or clears the line, and it goes on."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  with it loaded, input() edits lines and has a history
    note("/help lists the commands, Ctrl-D leaves")
    while True:
        try:
            _obey(llm, conversation, input(PROMPT))
        except RequestError as error:
            print_error(error)
        except KeyboardInterrupt:
            print()
            note("Ctrl-D or /quit leaves")
        except EOFError:
            print()
            return 0
        except Quit:
            return 0


def _obey(llm: ChatModel, conversation: Conversation, line: str) -> Answer | None:
    """Do what a line says; None if it was no message. Raises RequestError or Quit."""
    text = line.strip()
    if text.startswith("/"):
        note(conversation.command(text))
    elif text:
        return answer_one(llm, conversation, text)
    return None
