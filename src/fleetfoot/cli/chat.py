"""`fleetfoot chat`: a conversation on the terminal, or with a turn on each line of standard input."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fleetfoot.cli.arguments import (
    add_engine_arguments,
    add_sampling_arguments,
    check_sampling_arguments,
    sampling_params,
)
from fleetfoot.cli.command import Command, UsageError, count, numbers_line, started_engine, usage_errors
from fleetfoot.inputs import ChatMessage
from fleetfoot.outputs import CompletionOutput
from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams
from fleetfoot.utils.process import StopSignal

if TYPE_CHECKING:
    from fleetfoot.engine.engine import LLMEngine
    from fleetfoot.tokenizer.tokenizer import Tokenizer

# Parameters that do not apply to one streamed text.
_NOT_FOR_CHAT = ("n", "logprobs", "prompt_logprobs", "detokenize", "truncate_prompt_tokens")

_COMMANDS = """\
/reset         forget the conversation; the system message stays
/system TEXT   set the system message; without TEXT there is none
/stats         numbers of the last reply and of the chat
/help          this
/exit          end; Ctrl-D and a Ctrl-C at the prompt do it too. A Ctrl-C during a reply stops the reply.
A message that begins with a slash needs a space before it."""

_EPILOG = f"""\
in the chat:
{_COMMANDS}

From a pipe each line is a turn; standard output gets the replies alone, and everything else goes to standard error."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument(
        "--chat-template", metavar="FILE_OR_NAME", help="a Jinja file, or the name of one of the model's templates"
    )
    add_sampling_arguments(parser, leave_out=_NOT_FOR_CHAT, max_tokens=None)
    add_engine_arguments(parser, leave_out=("skip_tokenizer_init",), takes_model=True)


def _run(arguments: argparse.Namespace) -> int:
    with usage_errors():
        check_sampling_arguments(arguments)
    with started_engine(arguments) as (engine, _):
        with usage_errors():
            params = sampling_params(arguments, RequestOutputKind.DELTA, engine.input_processor.sampling_defaults)
        assert engine.tokenizer is not None  # chat has no --skip-tokenizer-init
        template = _chat_template(arguments.chat_template, engine.tokenizer, engine.plan.config.model)
        is_interactive = sys.stdin is not None and sys.stdin.isatty()
        chat = _Chat(engine, engine.tokenizer, params, Conversation(arguments.system), template, is_interactive)
        return chat.run()


def _chat_template(given: str | None, tokenizer: Tokenizer, model: str) -> str | None:
    """The source or name of the template to use; None: the model's default."""
    if given is not None and given not in tokenizer.chat_templates:
        try:
            return Path(given).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            names = ", ".join(sorted(tokenizer.chat_templates)) or "none"
            raise UsageError(
                f"--chat-template {given} is neither a readable file ({error}) nor a template of the model's ({names})"
            ) from error
    if given is None and "default" not in tokenizer.chat_templates:
        raise UsageError(
            f"the model {model!r} has no chat template, so it is not known how it takes a conversation; "
            "give one with --chat-template, or use `fleetfoot generate`"
        )
    return given


@dataclass(slots=True)
class Conversation:
    """A system message and turns, each a user's message and the reply to it."""

    system: str | None = None
    turns: list[list[ChatMessage]] = field(default_factory=list)

    def ask(self, text: str) -> None:
        """Begin a turn."""
        self.turns.append([{"role": "user", "content": text}])

    def answer(self, text: str) -> None:
        """End a turn."""
        self.turns[-1].append({"role": "assistant", "content": text})

    def messages(self, first: int = 0) -> list[ChatMessage]:
        """The system message, and the turns from index ``first`` on."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return system + [message for turn in self.turns[first:] for message in turn]

    def fit(
        self, tokenize: Callable[[list[ChatMessage]], list[int]], *, limit: int, reserve: int
    ) -> tuple[list[int], int]:
        """The prompt for the next reply. A conversation that is too long loses its oldest turns.

        Args:
            tokenize: renders messages as token ids.
            limit: most tokens of prompt and reply together.
            reserve: tokens to keep free for the reply, unless the last message alone leaves fewer.

        Returns:
            The prompt's token ids, and the number of dropped turns.

        Raises:
            ValueError: the last message is too long; the conversation has not changed.
        """
        last = len(self.turns) - 1
        for first in range(last + 1):
            token_ids = tokenize(self.messages(first))
            if len(token_ids) + reserve <= limit or (first == last and len(token_ids) < limit):
                del self.turns[:first]
                return token_ids, first
        raise ValueError(
            f"the message makes a prompt of {len(token_ids)} tokens, and there is room for {limit - 1}; "
            f"shorten it, or raise max_model_len where the model allows"
        )


@dataclass(slots=True)
class _Chat:
    """Reads turns and generates a reply to each."""

    engine: LLMEngine
    tokenizer: Tokenizer
    params: SamplingParams
    conversation: Conversation
    template: str | None
    is_interactive: bool
    num_replies: int = 0
    last_reply: str = ""
    """Its numbers."""

    def run(self) -> int:
        """Run until the input ends or /exit. Returns 1 if a piped turn was refused or failed."""
        if self.is_interactive:
            engine = self.engine
            title = f"{engine.plan.config.model} on {engine.plan.device}, runner {engine.runner_name}"
            _print_status(f"{title}. /help shows the commands.")
        failed = False
        for line in self._lines():
            if line.startswith("/"):
                if not self._run_command(line):
                    break
            elif line.strip():
                failed |= not self._turn(line)
        return 1 if failed and not self.is_interactive else 0

    def _lines(self) -> Iterator[str]:
        if not self.is_interactive:
            for line in sys.stdin or ():
                yield line.rstrip("\r\n")
            return
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives `input` line editing and a history
        while True:
            try:
                if not sys.stdout.isatty():
                    print("> ", end="", file=sys.stderr, flush=True)
                yield input("> " if sys.stdout.isatty() else "")
            except EOFError:  # Ctrl-D
                _print_status("")
                return

    def _run_command(self, line: str) -> bool:
        """Run a line that begins with a slash. Returns False for /exit."""
        name, *rest = line.split(maxsplit=1)
        match name:
            case "/exit":
                return False
            case "/help":
                _print_status(_COMMANDS)
            case "/reset":
                self.conversation.turns.clear()
                _print_status("the conversation is forgotten")
            case "/system":
                self.conversation.system = rest[0].strip() if rest else None
                _print_status("the system message is set" if rest else "there is no system message now")
            case "/stats":
                _print_status(self._stats())
            case unknown:
                _print_status(f"unknown command {unknown}; there are /reset, /system, /stats, /help and /exit")
        return True

    def _stats(self) -> str:
        if not self.num_replies:
            return "no reply yet"
        stats = self.engine.stats()
        return (
            f"last reply: {self.last_reply}\nchat: {count(self.num_replies, 'reply', 'replies')}, "
            f"{count(len(self.conversation.turns), 'turn')} remembered, {stats.num_prompt_tokens} tokens in "
            f"({stats.scheduler.prefix_cache_hits} from the prefix cache), {stats.num_generation_tokens} out"
        )

    def _turn(self, text: str) -> bool:
        """Print the reply to a message; a turn without one is dropped. Returns False on an error."""
        self.conversation.ask(text)
        try:
            reply = self._reply(self._prompt())
        except (ValueError, TypeError) as error:  # refused before anything was generated; the chat continues
            reply = CompletionOutput(0, "", [], finish_reason="error", stop_reason=str(error))
        if reply.text or reply.finish_reason in ("stop", "length"):
            self.conversation.answer(reply.text)
        else:
            self.conversation.turns.pop()
        if reply.finish_reason == "error":
            _print_status(f"fleetfoot chat: error: {reply.stop_reason}")
        elif reply.finish_reason == "abort":
            _print_status("(stopped)" if reply.text else "(stopped before the first word: the turn is forgotten)")
        return reply.finish_reason != "error"

    def _prompt(self) -> list[int]:
        """Token ids of the conversation; drops its oldest turns if it is too long."""
        limit = self.engine.max_request_len
        reserve = limit // 4 if self.params.max_tokens is None else min(limit // 4, self.params.max_tokens)
        tokenize = partial(self.tokenizer.apply_chat_template_ids, chat_template=self.template)
        token_ids, num_dropped = self.conversation.fit(tokenize, limit=limit, reserve=reserve)
        if num_dropped:
            turns = count(num_dropped, "turn")
            _print_status(f"(the conversation grew too long; forgotten from its beginning: {turns})")
        return token_ids

    def _reply(self, token_ids: list[int]) -> CompletionOutput:
        """Stream one reply to standard output; returns it with its whole text.

        Raises:
            ValueError, TypeError: the engine refuses the request.
        """
        room = self.engine.max_request_len - len(token_ids)
        max_tokens = room if self.params.max_tokens is None else min(room, self.params.max_tokens)
        params = dataclasses.replace(self.params, max_tokens=max_tokens)
        begin = time.perf_counter()
        self.engine.add_request("reply", {"prompt_token_ids": token_ids}, params)
        text = ""
        with StopSignal() as stop:
            while True:
                for output in self.engine.step():
                    completion = output.outputs[0]
                    text += completion.text
                    print(completion.text, end="", flush=True)
                    if output.finished:
                        print(flush=True)
                        self.num_replies += 1
                        self.last_reply = numbers_line([output.metrics], time.perf_counter() - begin)
                        completion.text = text
                        return completion
                if stop.is_set:
                    self.engine.abort_request("reply")


def _print_status(text: str) -> None:
    """Print to standard error: standard output holds the replies only."""
    print(text, file=sys.stderr, flush=True)


COMMAND = Command("chat", "talk with a model", _add_arguments, _run, _EPILOG, "[MODEL] ")
